"""The last collectives of this process, from PyTorch's flight recorder. Input of `elastic.fault_attribution`."""

from __future__ import annotations

import json
import os
from typing import Any

from raytrain_hpc.elastic.fault_attribution import CollectiveCall

_BUFFER_SIZE = 512  # calls that the recorder keeps; a step of a deep model under ZeRO-3 makes hundreds


def enable_flight_recorder() -> None:
    """Enable recording in this process. Call before torch is imported."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_BUFFER_SIZE))


def read_calls(since_ns: int) -> list[CollectiveCall]:
    """Return the collectives entered since `since_ns` (as `time.time_ns`), oldest first; no point-to-point calls."""
    from raytrain_hpc.torch_private_groups import dump_flight_recorder  # imports torch

    entries: list[dict[str, Any]] = json.loads(dump_flight_recorder()).get("entries", [])
    return [
        CollectiveCall(
            group=entry["process_group"][0],
            sequence_number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            operation=_format_operation(entry),
            is_pending=not entry["retired"],
        )
        for entry in entries
        if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]
    ]


def _format_operation(entry: dict[str, Any]) -> str:
    """Return the operation with its input sizes, which must be equal on all ranks."""
    name: str = entry["profiling_name"].rpartition(":")[2]
    if name.startswith("all_to_all"):  # its sizes may differ between ranks
        return name
    return f"{name}{entry['input_sizes']}".replace(" ", "")
