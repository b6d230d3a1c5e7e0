"""Settings of a run that follow from a user's dataset, and those that its form excludes."""

from __future__ import annotations

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.data.samples.dataset_form import get_loader_batch_size
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.errors import ConfigError

_ORIGIN = "batch_size of the dataset"
_OWN_WORKERS = "a DataLoader has workers of its own; set its num_workers, and leave the key out"

_REBALANCED_PARTS = (
    "each rank reads its part of the dataset in order, and where it continues is its microbatches per step times the "
    "steps before, which does not hold once its share has changed; use warn or evict, or pass a map-style dataset"
)


def fit_settings(config: Config, dataset: SampleDataset) -> None:
    """Take `train.micro_batch_size` from a loader. Raises ConfigError for settings that the form excludes."""
    if dataset.form == "map":
        if dataset.reads_object_store:
            _refuse_readers(config, "a reader process cannot read Ray's object store; leave the key out")
            config.data.num_readers = 0
        return
    if config.data.order == "random":
        _refuse(config, "data.order", "a stream has an order of its own; leave the key out")
    if dataset.form == "function" and config.fault.on_straggler == "rebalance":
        _refuse(config, "fault.on_straggler", _REBALANCED_PARTS)
    if dataset.form == "batches":
        _fit_batch_size(config, get_loader_batch_size(dataset.train))
        _refuse_readers(config, _OWN_WORKERS)


def check_loader(config: Config, micro_batch_size: int, batch_size: int | None) -> None:
    """Raise ConfigError if a loader that a function has returned does not fit the settings of the run."""
    if batch_size not in (None, micro_batch_size):
        remedy = f"the function returned a DataLoader with batches of {batch_size}, and the run has microbatches of "
        _refuse(config, "train.micro_batch_size", f"{remedy}{micro_batch_size}; set the key to its batch_size")
    _refuse_readers(config, _OWN_WORKERS)


def _refuse_readers(config: Config, remedy: str) -> None:
    if config.data.num_readers not in (AUTO, 0):
        _refuse(config, "data.num_readers", remedy)


def _fit_batch_size(config: Config, batch_size: int | None) -> None:
    key, value = "train.micro_batch_size", config.train.micro_batch_size
    if value == AUTO or config.origin(key) == _ORIGIN:
        if batch_size is None:
            _refuse(config, key, "the dataset yields batches and does not know their size; set it to theirs")
        else:
            config.train.micro_batch_size = batch_size
            config.origins = config.origins | {key: _ORIGIN}
    elif batch_size not in (None, value):
        _refuse(config, key, f"the dataset yields batches of {batch_size}; leave the key out, or change its batch_size")


def _refuse(config: Config, key: str, remedy: str) -> None:
    section, _, name = key.partition(".")
    raise ConfigError(key, getattr(getattr(config, section), name), config.origin(key), remedy)
