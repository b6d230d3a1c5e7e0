"""Time saving and loading of the same state in the platform's format and in torch's DCP, alternating."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from raytrain_hpc.bench.contenders import scratch_dir
from raytrain_hpc.bench.workloads import MEDIUM, make_settings
from raytrain_hpc.checkpoint.checksum import ChecksumBuilder
from raytrain_hpc.checkpoint.manifest import get_shard_name, read_manifest
from raytrain_hpc.checkpoint.shard_io import read_state, write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.checkpoint.verification import check_checkpoint
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.errors import MissingDependencyError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import init_weights
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath

_PEER_THREADS = 4  # of the S3 connector; its default of 1 is slower
_HASHED_BYTES = 4 * 2**20

State = dict[str, Any]  # name -> tensor
Peer = tuple[Callable[[State], object], Callable[[State], object]]  # save, and load in place
Timings = dict[str, tuple[list[float], list[float]]]  # operation -> (platform ms, peer ms), one value per round


def measure_formats(rounds: int, url: str | None = None) -> Timings:
    """Measure both formats for `rounds` rounds, after one warm-up round, on local disk or below `url` of an S3 store.

    The peer on S3 is DCP with the S3 connector for PyTorch. Raises MissingDependencyError without it.
    """
    torch.set_num_threads(1)
    state = build_adamw_state()
    timings: Timings = {"save": ([], []), "load": ([], []), "choose and load": ([], [])}
    for round_number in range(rounds + 1):
        if url is None:
            with scratch_dir() as directory:
                peer = _make_local_peer(directory / "dcp")
                round_ms = _run_round(state, directory, peer, peer_first=bool(round_number % 2))
        else:
            folder = ObjectPath.from_url(url) / f"bench-{uuid.uuid4().hex}"
            try:
                peer = _make_s3_peer(folder / "dcp")
                round_ms = _run_round(state, folder, peer, peer_first=bool(round_number % 2))
            finally:
                folder.delete_tree()
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


def measure_hashing() -> float:
    """Return the GB/s at which one core computes the checksums of a file that is in memory."""
    content = memoryview(bytearray(torch.randint(256, (256 << 20,), dtype=torch.uint8).numpy().tobytes()))
    seconds = []
    for _ in range(3):
        checksum, start = ChecksumBuilder(), time.perf_counter()
        for position in range(0, len(content), _HASHED_BYTES):
            checksum.update(content[position : position + _HASHED_BYTES])
        checksum.finish()
        seconds.append(time.perf_counter() - start)
    return len(content) / min(seconds) / 1e9


def _make_local_peer(directory: Path) -> Peer:
    return (
        lambda state: dcp_save(state, checkpoint_id=directory, no_dist=True),
        lambda state: dcp_load(state, checkpoint_id=directory, no_dist=True),
    )


def _make_s3_peer(folder: ObjectPath) -> Peer:
    try:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
    except ImportError as error:
        raise MissingDependencyError("bench checkpoint --url: run `pip install 's3torchconnector[dcp]'`") from error
    client = S3ClientConfig(force_path_style="AWS_ENDPOINT_URL" in os.environ)
    options: dict[str, Any] = {"region": os.environ.get("AWS_REGION", "us-east-1"), "path": f"{folder}/"}
    options["s3client_config"] = client
    return (
        lambda state: dcp_save(
            state, storage_writer=S3StorageWriter(**options, thread_count=_PEER_THREADS), no_dist=True
        ),
        lambda state: dcp_load(state, storage_reader=S3StorageReader(**options), no_dist=True),
    )


def _run_round(state: State, directory: Location, peer: Peer, *, peer_first: bool) -> dict[str, float]:
    """Return the milliseconds of each operation of both sides."""
    store = CheckpointStore(directory / "checkpoints")
    source = ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in state.items())
    peer_save, peer_load = peer
    # Filled, since the first write to new memory takes as long as the load itself.
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    target = ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in loaded.items())

    def save() -> None:
        report = write_shard(store.create_staging(1, 1) / get_shard_name(0), source)
        store.publish(1, 1, [report], {}, lambda: None)

    def load() -> None:
        read_state(read_manifest(store.get_path(1)), target)

    def resume() -> None:
        if store.find_newest_valid(lambda path, problem: None, check_checkpoint) is None:  # in the driver
            raise RuntimeError("the saved state is damaged")
        read_state(read_manifest(store.get_path(1)), target)  # in a rank

    turns = [
        [("platform save", save), ("dcp save", lambda: peer_save(state))],
        [("platform load", load), ("dcp load", lambda: peer_load(loaded)), ("platform choose and load", resume)],
    ]
    actions = [action for turn in turns for action in (reversed(turn) if peer_first else turn)]
    round_ms = {name: _time_ms(action) for name, action in actions}
    if any(not torch.equal(loaded[name], tensor) for name, tensor in state.items()):
        raise RuntimeError("the loaded state differs from the saved state")
    return round_ms


def _time_ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)
