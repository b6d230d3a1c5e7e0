"""The collectives that this process was last in, out of torch's flight recorder."""

from __future__ import annotations

import json
import os
from typing import Any

from raytrain_hpc.elastic.fault_attribution import CollectiveCall

_BUFFER_SIZE = 512  # calls that the recorder keeps; a step of a deep model under ZeRO-3 makes hundreds


def enable_flight_recorder() -> None:
    """Must come before torch is imported."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_BUFFER_SIZE))


def read_calls(since_ns: int) -> list[CollectiveCall]:
    """Collectives and transfers entered since a moment (time.time_ns), oldest first."""
    import torch._C._distributed_c10d as c10d  # no public call tells

    dumped: str = c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]
    entries: list[dict[str, Any]] = json.loads(dumped).get("entries", [])
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
    name: str = entry["profiling_name"].rpartition(":")[2]
    if name.startswith("all_to_all"):  # ranks may give each other more or less
        return name
    return f"{name}{entry['input_sizes']}".replace(" ", "")
