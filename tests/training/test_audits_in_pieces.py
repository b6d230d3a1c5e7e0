"""Audits of parameters that are larger than what is computed at a time: by pieces, with the same verdicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import raytrain_hpc as rt
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.optim.grad_norm import Region
from raytrain_hpc.parallel.computation_trace import Trace
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.training import shard_recomputation
from raytrain_hpc.training.shard_recomputation import Inputs, Regions, ShardRecomputation
from tests.training.elastic_runs import BASE, MODELS, RunOnce, get_bits
from tests.training.test_step_audits import make_fault
from tests.warm_pool import RankFailedError, WarmPool, make_small_config

AUDITED, LLAMA = "fault.audit_interval=1", [*MODELS["llama"], "train.micro_batch_size=3"]
LAYOUTS: dict[str, list[str]] = {
    "ddp-2": [*LLAMA, "cluster.workers=2"],
    "zero2-3": [*LLAMA, "cluster.workers=3", "parallel.zero=2"],
    "zero3-2, sgd": [*LLAMA, "cluster.workers=2", "parallel.zero=3", "optimizer.name=sgd"],
    "tp2 x zero3-2, offload": [
        *(*LLAMA, "cluster.workers=4", "parallel.tp=2", "parallel.zero=3"),
        "parallel.offload=cpu",
    ],
    "hsdp-2x2, muon": [
        *(*LLAMA, "cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
        "optimizer.name=muon",
    ],
    "pp2 x ddp-2, bf16 moments": [
        *(*LLAMA, "cluster.workers=4", "parallel.pp=2"),
        *("train.dtype=bf16", "optimizer.moment_dtype=bf16"),
    ],
    "class": [*LLAMA, "cluster.workers=2", "optimizer.name=torch.optim.Adagrad"],  # whole parameters
    "ep2 x ddp-2": [*MODELS["moe"], "train.micro_batch_size=3", "cluster.workers=4", "parallel.ep=2"],
}


class SmallPieces(rt.Callback):
    """Pieces of 1,000 elements: matrices of the small models have several; rows of 32 do not divide them evenly."""

    def pre_train(self) -> None:
        self._sizes = shard_recomputation.PIECE_ELEMENTS, shard_recomputation.PART_BYTES
        shard_recomputation.PIECE_ELEMENTS, shard_recomputation.PART_BYTES = 1000, 40_000

    def close(self) -> None:
        shard_recomputation.PIECE_ELEMENTS, shard_recomputation.PART_BYTES = self._sizes


def sum_regions(tensor: Tensor, regions: Sequence[Region]) -> int:
    return sum(int((tensor if region is None else tensor[region]).sum()) for region in regions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_update_is_found_by_pieces(pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str) -> None:
    words = [*LAYOUTS[layout], "train.steps=4"]
    expected = run_once(*words)
    config = make_small_config(tmp_path, *BASE, *words, AUDITED, make_fault("update", 1))
    records = pool.train(config, callbacks=[SmallPieces()])[0]
    assert get_bits(records, tmp_path) == expected
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert incident["rank"] == 1 and incident["reason"].endswith("right when repeated")


def test_pieces_hold_all_rows_once_and_what_the_norm_counts_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_recomputation, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(shard_recomputation, "PART_BYTES", 1000)
    tensors = {"matrix": torch.arange(352).view(11, 32), "vector": torch.arange(250), "scalar": torch.tensor(3)}
    tensors["empty"] = torch.zeros(0, 7)
    regions: dict[str, list[Region]] = {
        "matrix": [(slice(2, 5), slice(0, 32)), (slice(7, 11), slice(4, 9))],
        "vector": [None],
        "scalar": [None],
    }
    recomputation = ShardRecomputation(ParallelContext(0, Layout(), torch.device("cpu")), regions, ())
    seen, counted, sizes = defaultdict[str, list[Tensor]](list), Counter[str](), list[int]()

    def compute(inputs: Inputs, of_part: Regions, trace: Trace) -> None:
        sizes.append(sum(tensor.nbytes for tensor in inputs.values()))
        for (_, name), piece in inputs.items():
            seen[name].append(piece)
            counted[name] += sum_regions(piece, of_part.get(name, ()))

    recomputation.run(0, tensors, lambda name: {("weight", name): tensors[name]}, compute, in_pieces=True)
    assert [len(piece) for piece in seen["matrix"]] == [3, 3, 3, 2]
    assert [len(piece) for piece in seen["vector"]] == [100, 100, 50]
    for name, pieces in seen.items():
        assert torch.equal(torch.cat(pieces) if tensors[name].ndim else pieces[0], tensors[name])
        split = [piece["", name] for piece in recomputation.split({("", name): tensors[name]})]
        assert all(map(torch.equal, split, pieces)) and len(split) == len(pieces)
        assert counted[name] == sum_regions(tensors[name], regions.get(name, ()))
    assert max(sizes) <= 1000 and len(sizes) < 9


def test_a_persistent_fault_is_named_by_pieces(pool: WarmPool, tmp_path: Path) -> None:
    fault = make_fault("update", 1, more=", persistent: true")
    config = make_small_config(tmp_path, *BASE, *LAYOUTS["zero2-3"], AUDITED, fault)
    with pytest.raises(RankFailedError, match="AuditMismatchError: audit of step 2: rank 1 computed the update wrong"):
        pool.train(config, callbacks=[SmallPieces()])
