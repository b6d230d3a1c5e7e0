"""A user's dataset in any form, with validation sets and the function that forms batches."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.stream import DataState
from raytrain_hpc.data.samples.dataset_form import DatasetForm, describe_identity, find_form, get_name
from raytrain_hpc.data.samples.sample_order import SampleOrder
from raytrain_hpc.errors import DataError

CollateFunction = Callable[[list[Any]], Any]
_VOCAB_SIZE = 1  # of the spec of the built-in decoder, which is not used


@dataclass(frozen=True)
class SampleDataset:
    """Datasets in one of the forms of `find_form`: a torch Dataset, an array, an IterableDataset, a DataLoader.

    `validation`: by name; "" for a single one without a name. `collate`: forms a batch of a list of samples; None:
    torch's default. `lengths`: of the training samples, to put samples of similar length into one microbatch.
    """

    train: Any
    validation: Mapping[str, Any] = field(default_factory=dict)
    collate: CollateFunction | None = None
    lengths: np.ndarray[Any, Any] | None = None
    tokenizer: None = field(default=None, init=False)
    vocab_size: int = field(default=_VOCAB_SIZE, init=False)

    @property
    def val(self) -> Mapping[str, Any] | None:
        """The validation sets, or None if there is none."""
        return self.validation or None

    @property
    def form(self) -> DatasetForm:
        """The form of the training data."""
        return find_form("dataset", self.train)

    @property
    def reads_object_store(self) -> bool:
        """Whether reading a training sample needs Ray, which reader processes do not have."""
        return bool(getattr(self.train, "reads_object_store", False))

    @property
    def dataset_hash(self) -> str:
        """Hash of what identifies the dataset without reading it."""
        identity = describe_identity(self.train)
        if self.lengths is not None:  # the order depends on them
            identity += f" {hashlib.sha256(self.lengths.tobytes()).hexdigest()}"
        return hashlib.sha256(identity.encode()).hexdigest()

    def open_order(self, config: Config, micro_batch_size: int) -> SampleOrder:
        """Return the order of the training samples. Raises DataError if the dataset is empty."""
        return SampleOrder(
            len(self.train),
            kind=config.data.order,
            seed=config.run.seed,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=micro_batch_size,
            lengths=self.lengths,
            bucket_steps=config.data.bucket_steps,
        )


def make_sample_dataset(
    train: Any, validation: Any = None, collate: CollateFunction | None = None, lengths: Any = None
) -> SampleDataset:
    """Return the dataset of a run. Raises DataError if an object is no dataset, or is a map-style one and empty.

    `validation`: a dataset, or a mapping from names to datasets. `lengths`: a sequence of numbers, one per sample of a
    map-style dataset.
    """
    sets = {} if validation is None else dict(validation) if _is_mapping(validation) else {"": validation}
    train, sets = _open_ray_data(train), {name: _open_ray_data(dataset) for name, dataset in sets.items()}
    for name, dataset in (("dataset", train), *((f"val_dataset {name}".rstrip(), d) for name, d in sets.items())):
        form = find_form(name, dataset)
        if form == "map" and len(dataset) < 1:
            raise DataError(f"{name}: it is empty")
        if form != "map" and name == "dataset" and lengths is not None:
            raise DataError(
                "lengths: a stream cannot be sorted by length, which needs samples that are not read yet; leave it "
                "out, or pass a dataset with __len__ and __getitem__"
            )
    if wrong := [name for name in sets if not isinstance(name, str) or "/" in name]:
        raise DataError(f"val_dataset: {wrong[0]!r} is no name of a validation set; use text without a slash")
    return SampleDataset(train, sets, collate, None if lengths is None else _parse_lengths(lengths))


def _parse_lengths(lengths: Any) -> np.ndarray[Any, Any]:
    """Return lengths as int64, or as fp64 unless all are whole numbers, as seconds of audio."""
    values = np.asarray(lengths)
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise DataError("lengths: they must be finite numbers, one per sample")
    whole = values.astype(np.int64)
    return whole if np.array_equal(whole, values) else values.astype(np.float64)


def _open_ray_data(dataset: Any) -> Any:
    """Return the rows of a Ray Data dataset, which is executed; other datasets as they are."""
    ray_data = sys.modules.get("ray.data")
    if ray_data is None or not isinstance(dataset, ray_data.Dataset):
        return dataset
    from raytrain_hpc.data.samples.ray_data_rows import RayDataRows  # imports Ray

    return RayDataRows(dataset)


def _describe_size(dataset: Any) -> str:
    """Return the size of a dataset for a message."""
    is_map = find_form("dataset", dataset) == "map"
    return f"of {len(dataset)} samples" if is_map else f"stream ({get_name(dataset)})"


def _is_mapping(validation: Any) -> bool:
    """Return whether validation sets are given by name. A Hugging Face DatasetDict is a dict too."""
    return isinstance(validation, Mapping)


@dataclass(frozen=True)
class SampleStream:
    """Data position of a run on a user's dataset; what `LocalStream` is for tokens."""

    dataset: SampleDataset
    seed: int
    global_batch_size: int

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Samples per epoch; none for a stream, which has no known size."""
        return (len(self.dataset.train),) if self.dataset.form == "map" else ()

    def get_state(self, step: int) -> DataState:
        """Return the data state after `step` committed steps."""
        dataset_hash = self.dataset.dataset_hash
        mixture = ({"dataset_hash": dataset_hash, "weight": 1.0},)
        return DataState(self.seed, step * self.global_batch_size, dataset_hash, mixture)

    def get_resume_step(self, state: DataState) -> int:
        """Return the step to resume from a saved state. Raises DataError if the dataset is another one."""
        if state.dataset_hash != self.dataset.dataset_hash:
            raise DataError(
                f"dataset: the run was trained with another one than this {_describe_size(self.dataset.train)}; pass "
                "the same, or choose another run.dir"
            )
        return state.next_sample // self.global_batch_size
