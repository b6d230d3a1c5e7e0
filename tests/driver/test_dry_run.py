"""The driver over simulated ranks, and the shard of single ranks among thousands."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.distributed.process_groups import build_parallel_context
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.parallelize import parallelize
from raytrain_hpc.planner.layout import Layout, resolve_layout
from raytrain_hpc.planner.model_state_memory import count_parameters_by_pp_rank
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.state.sharded_state import to_local
from tests.driver.dry_run import RANKS_PER_NODE, dry_run
from tests.driver.fake_ray import Scenario

SHORT = Scenario(build_s=0.2, step_s=0.1)
SIZES = (64, 512)


@pytest.fixture(scope="module")
def runs() -> dict[int, dict[str, Any]]:
    return {ranks: dry_run(ranks, SHORT) for ranks in SIZES}


@pytest.mark.parametrize("ranks", SIZES)
def test_run_recovers_from_a_lost_rank(runs: dict[int, dict[str, Any]], ranks: int) -> None:
    """Recover the lost rank's state, which only its replica holds, on a spare."""
    run = runs[ranks]
    assert (run["outcome"], run["steps"]) == ("done", 20)
    [incident] = run["incidents"]
    assert (incident["kind"], incident["rank"], incident["step"]) == ("died", SHORT.lost_rank, SHORT.lost_after_step)
    assert (incident["world_after"], incident["steps_lost"], incident["device"]) == (ranks, 0, "60 C")


@pytest.mark.parametrize("ranks", SIZES)
def test_ranks_are_placed_by_their_layout(runs: dict[int, dict[str, Any]], ranks: int) -> None:
    first, second = runs[ranks]["node_of_rank"]
    for tensor_parallel in (range(begin, begin + RANKS_PER_NODE) for begin in range(0, ranks, RANKS_PER_NODE)):
        assert len({first[rank] for rank in tensor_parallel}) == 1
    assert set(Counter(first.values()).values()) == {RANKS_PER_NODE}
    assert sum(first[rank] != second[rank] for rank in range(ranks)) <= RANKS_PER_NODE, (
        "only one tensor-parallel group moved"
    )
    assert len({second[rank] for rank in range(RANKS_PER_NODE)}) == 1, "and shares a node again"


def test_message_count_is_linear_in_ranks(runs: dict[int, dict[str, Any]]) -> None:
    fewer, more = (Counter(runs[ranks]["messages"]) for ranks in SIZES)
    ratio = SIZES[1] / SIZES[0]
    for name in ("describe", "run", "warm_up", "watch", "drain", "get_health"):
        assert 0 < more[name] <= 1.1 * ratio * fewer[name], name
    assert more["run"] == 2 * SIZES[1], "one per rank and generation"


LAYOUTS = {
    "zero3": ["parallel.tp=8", "parallel.pp=4", "parallel.zero=3", "parallel.dp_shard=auto"],
    "hsdp": ["parallel.tp=8", "parallel.pp=4", "parallel.zero=3", "parallel.dp_shard=8", "parallel.dp_replicate=auto"],
    "replicas": ["parallel.tp=8", "parallel.pp=8", "parallel.dp_replicate=auto"],
}
WORLD = 4096


@pytest.mark.parametrize("rank", [0, 514, 2049, 3589])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_of_4096_stores_its_shard_of_the_model(layout: str, rank: int) -> None:
    """Build the process groups on a fake backend, and the rank's stage of Llama 8B on the meta device."""
    words = [
        f"cluster.workers={WORLD}",
        f"train.global_batch_size={WORLD}",
        "train.micro_batch_size=1",
        "train.seq_len=4096",
    ]
    config = load_config(None, ["model.preset=llama3_8b", *words, *LAYOUTS[layout]])
    resolved = resolve_layout(config, WORLD)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        stored = count_parameters(config, resolved, rank)
    finally:
        dist.destroy_process_group()
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=4096)
    planned = count_parameters_by_pp_rank(spec, resolved, 4096)[resolved.get_coordinates(rank)["pp"]].dense
    shards = resolved.dp_shard if resolved.zero == 3 else 1
    assert stored == pytest.approx(planned / shards, rel=0.01)


def count_parameters(config: Any, layout: Layout, rank: int) -> int:
    """Return the number of parameters that this rank stores."""
    context = build_parallel_context(rank, layout, torch.device("cpu"), tied_weights=False, balance_experts=False)
    assert context.coordinates == layout.get_coordinates(rank)
    if layout.tp > 1:
        neighbors = dist.get_process_group_ranks(context.axes["tp"].group)
        assert len({neighbor // RANKS_PER_NODE for neighbor in neighbors}) == 1 and rank in neighbors
        assert all(after - before == 1 for before, after in pairwise(neighbors))
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    stages = split_layers(spec, config.train.seq_len, layout.pipeline.num_stages)
    with torch.device("meta"):
        modules = {
            stage: Decoder(spec, stages[stage])
            for stage in layout.pipeline.get_stages_of_rank(context.coordinates["pp"])
        }
    meta = torch.device("meta")
    parallel_model = parallelize(
        modules,
        config=config,
        layout=layout,
        mesh=context.mesh,
        axes=context.axes,
        expert_mesh=context.expert_mesh,
        device=meta,
        reduction_orders=None,
        keyed_randomness=True,
    )
    return sum(to_local(parameter).numel() for parameter in parallel_model.parameters.values())
