"""A run on one node whose processes are killed again and again, one to all of them within 0.2 s.

python -m tests.driver.losing_processes [TIMES] [SEED] [WORD ...] prints what each time cost, and whether the losses
have the bits of an undisturbed run. WORD: settings, besides those of ZeRO-3 with tensor parallelism on four workers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import raytrain_hpc as rt
from raytrain_hpc.config.schema import Config
from tests.driver.cli_process import count_steps, curve_point, read_curve, wait_until
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS_BETWEEN = 30  # from one time to the next
WORDS = [
    *("model.num_kv_heads=2", "model.norm=rmsnorm", "model.activation=swiglu", "model.position_embedding=rotary"),
    *("train.micro_batch_size=1", "train.global_batch_size=12"),
    *("cluster.workers=4", "parallel.zero=3", "parallel.tp=2"),
    *("train.deterministic=elastic", "checkpoint.interval=0", "fault.max_failures=1000"),
]


def kill_workers(run_dir: Path, count: int, generator: random.Random, within_s: float = 0.2) -> None:
    """Kill `count` of the workers within some seconds, in a random order."""
    pids = [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]
    for pid in generator.sample(pids, min(count, len(pids))):
        os.kill(pid, signal.SIGKILL)
        time.sleep(generator.uniform(0.0, within_s / count))


def train_reference(pool: WarmPool, steps: int, *words: str) -> list[tuple[float, float, float]]:
    """Return the curve of `steps` steps without Ray, a driver or faults."""
    config = make_small_config(None, *WORDS, *words, f"train.steps={steps}")
    return [curve_point(metrics) for metrics in get_step_metrics(pool.train(config)[0])]


def read_incidents(run_dir: Path) -> list[dict[str, object]]:
    """Return the incidents of a run, oldest first."""
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def make_config(run_dir: Path, steps: int, *words: str) -> Config:
    """Return the settings of the run."""
    return make_small_config(run_dir, *WORDS, *words, f"train.steps={steps}")


def has_all_workers(run_dir: Path, count: int) -> bool:
    """Return whether the current generation has `count` workers, all alive."""
    pids = [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]
    return len(pids) == count and all(Path(f"/proc/{pid}").exists() for pid in pids)


def main(times: int = 20, seed: int = 0, *words: str) -> None:
    """Run, and print one line per time."""
    generator, steps = random.Random(seed), STEPS_BETWEEN * (times + 2)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        run = rt.start(make_config(run_dir, steps, *words))
        for number in range(times):
            target = count_steps(run_dir) + STEPS_BETWEEN // 2
            wait_until(lambda target=target: count_steps(run_dir) >= target and has_all_workers(run_dir, 4))
            count = generator.randint(1, 4)
            kill_workers(run_dir, count, generator, generator.choice((0.0, 0.2)))
            print(f"{number + 1}: {count} of 4 killed at step {count_steps(run_dir)}", flush=True)
        result = run.result(timeout=600)
        incidents = read_incidents(run_dir)
        print(f"{result.outcome} after {result.steps} steps, {len(incidents)} incidents")
        print(f"steps lost: {[incident['steps_lost'] for incident in incidents]}")
        print(f"recovered after: {[round(float(str(i['recovered_s'])), 2) for i in incidents]} s")
        curve = read_curve(run_dir, steps)
    pool = WarmPool(timeout_s=1800.0)
    expected = train_reference(pool, steps, *words)
    pool.close()
    num_equal = sum(point == reference for point, reference in zip(curve, expected, strict=True))
    print(f"losses with the bits of an undisturbed run: {num_equal} of {steps}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
