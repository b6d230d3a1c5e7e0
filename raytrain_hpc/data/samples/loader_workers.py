"""Worker processes of a user's DataLoader, inside a rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import TypedStorage, UntypedStorage
from torch.multiprocessing import reductions

from raytrain_hpc.data.samples.sample_reader import exit_with_parent, make_reader_context
from raytrain_hpc.ray_private import pickle_by_value
from raytrain_hpc.torch_private import is_storage_shared

_PARTS = ("dataset", "collate_fn")  # of a DataLoader, sent to its workers


def _reduce_storage(storage: Any) -> Any:
    """Share the memory of a tensor if the user has shared it; else copy it: a process inherits few descriptors."""
    return (
        _SHARE[type(storage)](storage) if is_storage_shared(storage) else storage.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    )


_SHARE: dict[type, Callable[[Any], Any]] = {
    TypedStorage: reductions.reduce_typed_storage,
    UntypedStorage: reductions.reduce_storage,
}
_REDUCERS = dict.fromkeys(_SHARE, _reduce_storage)


class _StartWorker:
    """The `worker_init_fn` of a loader, in a worker that ends with its rank."""

    def __init__(self, init: Any):
        self._init = None if init is None else _ByValue(init)

    def __call__(self, worker_id: int) -> None:
        exit_with_parent(worker_id)
        if self._init is not None:
            self._init(worker_id)


class _ByValue:
    """A part of a loader that is pickled by value, and becomes itself again in a worker process.

    Tensors in shared memory stay shared, such as the epoch of a Hugging Face stream, which persistent workers look at.
    """

    def __init__(self, part: Any):
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle_by_value(self.part, _REDUCERS),)

    def __len__(self) -> int:
        return len(self.part)

    def __call__(self, *arguments: Any) -> Any:
        return self.part(*arguments)


@contextmanager
def start_workers_afresh(loader: Any) -> Iterator[None]:
    """Start the workers of a loader from a fresh process inside the context, unless the loader says how it starts them.

    By default they are forked from this process: they would keep its connections open after its death, and hide it from
    its peers. Classes of the user's script reach them by value, as they reach Ray's workers.
    """
    if not getattr(loader, "num_workers", 0) or getattr(loader, "multiprocessing_context", None) is not None:
        yield
        return
    loader.multiprocessing_context = make_reader_context()
    attributes = vars(loader)  # a DataLoader refuses to set them
    init = attributes.get("worker_init_fn")
    parts = {name: attributes[name] for name in _PARTS if attributes.get(name) is not None}
    attributes.update({name: _ByValue(part) for name, part in parts.items()}, worker_init_fn=_StartWorker(init))
    try:
        yield
    finally:
        attributes.update(parts, worker_init_fn=init)
        loader.multiprocessing_context = None
