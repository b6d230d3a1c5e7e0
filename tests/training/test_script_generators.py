"""Random generators of a script: equal on all ranks, also if a fault ends a step before the ranks agree on them."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_hpc.runtime.worker_spec import Script
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

SOURCE = """
import torch
import raytrain_hpc as rt

model = torch.nn.Linear(4, 2)
run = rt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(4):
    x = run.local_batch(torch.randn(8, 4))
    run.backward(model(x).square().mean())
    if run.is_main_process:
        torch.rand(700)  # such as for a sample that it prints
"""


def run_generation(rank: int, rendezvous: Any, spec: Any, fails: bool) -> tuple[Any, list[float], str]:
    """Train one generation. If it `fails`, no rank gets the generators of rank 0 after step 2.

    Return the steps in memory, the losses, and the error.
    """
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.snapshot.memory_store import SnapshotStore
    from raytrain_hpc.training.script_random import ScriptGenerators
    from raytrain_hpc.training.script_trainer import ScriptTrainer

    number_of_calls, sync = 0, ScriptGenerators.sync

    def fail_after_step_2(generators: ScriptGenerators) -> None:
        nonlocal number_of_calls
        number_of_calls += 1  # the first call precedes the steps
        if number_of_calls == 3:
            raise RuntimeError("Connection closed by peer")
        sync(generators)

    process_state = sys.modules.setdefault("state_kept_between_generations", types.ModuleType("process_state"))
    if spec.generation == 1:
        process_state.memory = SnapshotStore()
    if fails:
        ScriptGenerators.sync = fail_after_step_2  # type: ignore[method-assign]
    control, error = ControlChannel(), ""
    trainer = ScriptTrainer(spec, rank, torch.device("cpu"), rendezvous, control, process_state.memory)
    try:
        trainer.run(spec.start_step, spec.end_step)
    except RuntimeError as failure:
        error = str(failure)
    finally:
        ScriptGenerators.sync = sync  # type: ignore[method-assign]
    process_state.memory.copy_live()
    process_state.memory.revoke_live()
    losses = [step["train/loss"] for step in get_step_metrics(control.drain())]
    return process_state.memory.steps, losses, error


def test_a_fault_before_the_ranks_agree_on_generators_makes_no_rank_corrupt(pool: WarmPool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SOURCE)
    words = ["cluster.workers=3", "train.steps=4", "train.global_batch_size=8", "train.micro_batch_size=2"]
    config = make_small_config(tmp_path / "run", *words)
    first = replace(make_worker_spec(config, 3, steps_to=4), custom=Script(str(script)))
    _, undisturbed, _ = pool.call(run_generation, 3, first, False)[0]
    for steps, _, error in pool.call(run_generation, 3, first, True):
        assert 2 in steps and error == "Connection closed by peer"
    second = replace(first, memory_step=2, generation=first.generation + 1)
    _, losses, _ = pool.call(run_generation, 3, second, False)[0]
    assert losses == undisturbed[2:] and len(losses) == 2
