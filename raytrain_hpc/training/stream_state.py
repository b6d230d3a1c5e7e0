"""Position of a user's stream as part of the training state."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.data.samples.stream_source import StreamPosition
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import DataError

_MAX_BYTES = 1 << 20


class StreamState(Callback):
    """The positions of a stream after the last committed step, saved and recovered as the state of a callback.

    A stream that all ranks share has one position. If every data-parallel rank has a stream of its own, the positions
    of all are gathered in each step, before the update: they survive the loss of a rank.
    """

    def __init__(self, context: ParallelContext, *, is_partitioned: bool):
        self._parallel_context, self._is_partitioned = context, is_partitioned
        self._tensor = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
        self._text, self._is_open = b"", False
        self.position = StreamPosition()  # of this rank, after the step that is being computed

    def open(self) -> list[StreamPosition]:
        """Return the positions to continue from, none if nothing is known. A later rollback does not move them."""
        self._is_open = True
        return [StreamPosition(**values) for values in json.loads(self._text or b"[]")]

    def post_forward_backward(self) -> None:
        """Gather the positions after the step that is being computed. Raises DataError if their state is too large."""
        positions = [asdict(self.position)]
        context = self._parallel_context
        if self._is_partitioned and context.world_group is not None:
            gathered: list[Any] = [None] * dist.get_world_size(context.world_group)
            dist.all_gather_object(gathered, positions[0], group=context.world_group)
            ranks = range(len(gathered))
            of_dp_rank = {context.layout.get_dp_rank(rank): gathered[rank] for rank in reversed(ranks)}
            positions = [of_dp_rank[dp_rank] for dp_rank in range(context.layout.dp_size)]
        self._text = json.dumps(positions).encode()
        if len(self._text) > _MAX_BYTES:
            raise DataError(
                f"dataset: the state_dict of {len(positions)} streams has {len(self._text)} bytes; at most "
                f"{_MAX_BYTES} are kept: leave samples out of it, or remove it, so that a resume reads samples again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the positions."""
        self._tensor.zero_()
        if self._text:
            self._tensor[: len(self._text)] = torch.frombuffer(bytearray(self._text), dtype=torch.uint8)
        return {"positions": self._tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the positions, unless the stream is open: after a rollback, training continues with later samples."""
        if not self._is_open:
            self._text = bytes(state["positions"].numpy()).rstrip(b"\0")
