"""Time saving and loading of the same state in the platform's format and in torch's DCP, alternating."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from raytrain_hpc.bench.contenders import scratch_dir
from raytrain_hpc.bench.workloads import MEDIUM, make_settings
from raytrain_hpc.checkpoint.manifest import get_shard_name, read_manifest
from raytrain_hpc.checkpoint.shard_io import read_state, write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import init_weights
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

State = dict[str, Any]  # name -> tensor
Timings = dict[str, tuple[list[float], list[float]]]  # operation -> (platform ms, peer ms), one value per round


def measure_formats(rounds: int) -> Timings:
    """Measure both formats for `rounds` rounds, after one warm-up round."""
    torch.set_num_threads(1)
    state = build_adamw_state()
    timings: Timings = {"save": ([], []), "load": ([], []), "load, checksums verified": ([], [])}
    for round_number in range(rounds + 1):
        with scratch_dir() as directory:
            round_ms = _run_round(state, directory)
        if round_number == 0:  # warm-up: first allocations and imports
            continue
        for operation, (platform_ms, peer_ms) in timings.items():
            platform_ms.append(round_ms[f"platform {operation}"])
            peer_ms.append(round_ms.get(f"dcp {operation}", round_ms["dcp load"]))
    return timings


def build_adamw_state() -> State:
    """Build weights and AdamW moments of the 25M model, by name."""
    _, config = make_settings(MEDIUM, 1, 1)
    model = Decoder(resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len))
    init_weights(model, config.run.seed)
    state: State = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{kind}.{name}"] = torch.rand_like(parameter.detach())
    return state


def _run_round(state: State, directory: Path) -> dict[str, float]:
    store = CheckpointStore(directory / "checkpoints")
    source = ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in state.items())
    dcp_dir = directory / "dcp"
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    target = ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in loaded.items())

    def save() -> None:
        report = write_shard(store.create_staging(1, 1) / get_shard_name(0), source)
        store.publish(1, 1, [report], {}, lambda: None)

    def load() -> None:
        read_state(read_manifest(store.get_path(1)), target)

    def load_verified() -> None:
        read_state(store.verify(1), target)

    round_ms = {
        "platform save": _time_ms(save),
        "dcp save": _time_ms(lambda: dcp_save(state, checkpoint_id=dcp_dir, no_dist=True)),
        "platform load": _time_ms(load),
        "dcp load": _time_ms(lambda: dcp_load(loaded, checkpoint_id=dcp_dir, no_dist=True)),
        "platform load, checksums verified": _time_ms(load_verified),
    }
    if any(not torch.equal(loaded[name], tensor) for name, tensor in state.items()):
        raise RuntimeError("the loaded state differs from the saved state")
    shutil.rmtree(dcp_dir)
    return round_ms


def _time_ms(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)
