"""Forms of a user's dataset: map-style, a stream of samples, a loader of batches, or a function of the rank."""

from __future__ import annotations

import sys
from typing import Any, Literal

from raytrain_hpc.errors import DataError

DatasetForm = Literal["map", "samples", "batches", "function"]


def find_form(name: str, dataset: Any) -> DatasetForm:
    """Return the form of a dataset. Raises DataError, which calls it `name`, if it has none.

    map: `__len__` and `__getitem__`. samples: an iterable whose `iter` begins an epoch. batches: a DataLoader or
    another iterable with `batch_size` and `collate_fn`. function: (rank, world_size) -> an iterable of either kind.
    """
    if isinstance(dataset, type):  # a class, whose instances may be iterable
        return "function"
    if is_loader(dataset):
        return "batches"
    if _is_torch_iterable(dataset):
        return "samples"
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return "map"
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"{name}: {type(dataset).__name__} has no __len__ and __getitem__, and can be iterated only once; pass an "
            "object whose __iter__ begins an epoch anew, or a function (rank, world_size) that returns an iterable"
        )
    if hasattr(dataset, "__iter__"):
        return "samples"
    if callable(dataset):
        return "function"
    raise DataError(
        f"{name}: {type(dataset).__name__} has no __len__ and __getitem__, and no __iter__; wrap it in a Dataset"
    )


def is_loader(dataset: Any) -> bool:
    """Return whether an object yields finished batches, as torch's DataLoader does."""
    return all(hasattr(dataset, name) for name in ("__iter__", "batch_size", "collate_fn"))


def get_loader_batch_size(loader: Any) -> int | None:
    """Return the number of samples in the batches of a loader, or None if it does not know."""
    size: int | None = loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size


def get_name(dataset: Any) -> str:
    """Return the name of a dataset for messages: that of a function, or else of its class."""
    return str(getattr(dataset, "__name__", type(dataset).__name__))


def describe_identity(dataset: Any) -> str:
    """Return what identifies a dataset without reading it: types, length of a map-style one, and columns if any."""
    form, content = find_form("dataset", dataset), getattr(dataset, "dataset", dataset)
    if form == "function":
        return form
    inner_type = f"{type(content).__name__} " if form == "batches" else ""
    length = f"{len(dataset)} " if form == "map" else ""
    columns = getattr(content if form == "batches" else dataset, "column_names", "")  # of Hugging Face datasets
    return f"{type(dataset).__name__} {inner_type}{length}{columns}"


def _is_torch_iterable(dataset: Any) -> bool:
    """Return whether a dataset is a torch IterableDataset, which inherits a `__getitem__` that it does not have."""
    torch_data = sys.modules.get("torch.utils.data")  # without importing torch, which the driver may not need
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
