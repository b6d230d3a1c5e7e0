"""Worker processes of a user's DataLoader, inside a rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raytrain_hpc.data.samples.sample_reader import make_reader_context
from raytrain_hpc.ray_private import pickle_by_value

_PARTS = ("dataset", "collate_fn", "worker_init_fn")  # of a DataLoader, sent to its workers


class _ByValue:
    """A part of a loader that is pickled by value, and becomes itself again in a worker process."""

    def __init__(self, part: Any):
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle_by_value(self.part),)

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
    parts = {name: attributes[name] for name in _PARTS if attributes.get(name) is not None}
    attributes.update({name: _ByValue(part) for name, part in parts.items()})
    try:
        yield
    finally:
        attributes.update(parts)
        loader.multiprocessing_context = None
