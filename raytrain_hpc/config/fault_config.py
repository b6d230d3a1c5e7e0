"""Settings of fault tolerance: section `fault` of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.config.field import AUTO, Auto, Section, key

FaultKind = Literal[
    "kill",
    "stop",
    "hang",
    "gil",
    "exception",
    "segfault",
    "oom",
    "skip_collective",
    "swap_collectives",
    "resize_collective",
    "network_down",
    "nan",
    "spike",
    "bitflip",
    "bitflip_batch",
    "bitflip_activation",
    "bitflip_gradient",
    "bitflip_message",
    "bitflip_sum",
    "bitflip_reduced",
    "bitflip_update",
    "bitflip_weight",
    "bitflip_moment",
    "slow",
    "gpu_hang",
    "gpu_error",
    "node",
]


@dataclass
class InjectConfig(Section):
    """A fault to inject."""

    kind: FaultKind = key(
        "kill",
        "kill: SIGKILL; stop: SIGSTOP; hang: infinite loop; gil: hold the interpreter lock forever; exception: raise; "
        "segfault: access invalid memory; oom: allocate more memory than there is on the device; skip_collective: skip "
        "one all-reduce; swap_collectives: reorder two of them; resize_collective: give one half of its tensor; "
        "network_down: receive no packet of other ranks any more, on CPUs; nan: a NaN gradient; spike: a loss 100 "
        "times too high; bitflip: flip a bit of a weight after the step; bitflip_weight: before it; bitflip_moment: of "
        "a moment of the optimizer before it; bitflip_batch: of what the model reads; bitflip_activation: of what it "
        "returns; bitflip_gradient: of the gradient of that; bitflip_message: of what the rank receives in an "
        "all-to-all, as in the reduction of gradients under train.deterministic=elastic; bitflip_sum: of a sum of "
        "gradients in that reduction; bitflip_reduced: of a gradient after its reduction; bitflip_update: of a weight "
        "that the optimizer has computed; slow: microbatches take three times as long from then on; gpu_hang: a kernel "
        "that never ends; gpu_error: an invalid memory access of a kernel; node: kill all Ray processes of the rank's "
        "node, which must not be the driver's.",
    )
    rank: int = key(0, "Rank that it hits, modulo the world size.", minimum=0)
    step: int = key(1, "Step of the fault. It is injected once, even if the step is repeated.", minimum=1)
    bit: int = key(
        0,
        "Bit that a bitflip_* fault flips in one element, from the lowest (0); in fp32, bits 23 to 30 are the exponent "
        "and 31 is the sign.",
        minimum=0,
    )
    persistent: bool = key(
        False, "A bitflip_* fault hits every later step of the process too, as a broken device would."
    )


@dataclass
class FaultConfig(Section):
    """Detection of failures, and reactions to them."""

    stall_timeout: float | Auto = key(
        AUTO,
        "Seconds without progress after which a worker counts as failed; auto: nearly 3 steps, at least 0.8 s.",
        above=0,
    )
    max_failures: int = key(
        3, "Failures in a row, without a step beyond the furthest one, that a run survives.", minimum=0
    )
    max_preemptions: int | Auto = key(
        AUTO,
        "Like max_failures, for nodes that are lost after a drain or a preemption notice and do not count as failures; "
        "auto: any number.",
        minimum=0,
    )
    on_nan: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "Reaction to a non-finite step or a loss spike that persists when recomputed, at most max_failures in a row. "
        "stop: end the run; skip: discard the update; rollback: restore the newest checkpoint and continue with the "
        "next batch.",
    )
    loss_spike_deviations: float = key(
        0.0,
        "A loss this many standard deviations above the mean of the last 128 steps is a spike; 0: off. 6 is typical.",
        minimum=0,
    )
    replica_check_interval: int = key(
        100,
        "Steps between bitwise comparisons of replicas, also made before every checkpoint; 0: never. A rank that "
        "differs from the majority is replaced; the run restores the state of keep_verified_state or else the newest "
        "checkpoint.",
        minimum=0,
    )
    audit_interval: int | Auto = key(
        0,
        "Steps between audits, which find silent corruption: another data-parallel rank computes a microbatch, a sum "
        "of gradients and the update of a shard again, hashes tell whether memory has changed, and the step is applied "
        "only if all bits are equal. 0: never; auto: as often as costs 1 % of the time. Needs "
        "train.deterministic=elastic. A rank that is wrong again when repeated is replaced, as with "
        "replica_check_interval.",
        minimum=0,
    )
    spare_audit_interval: int | Auto = key(
        AUTO,
        "Steps between those of which idle spares (cluster.spares) compute a microbatch again, outside the time of a "
        "step, with audit_interval. 0: never; auto: as often as costs 1 % of the time. If a spare and a rank disagree, "
        "the run goes back to the last state that an audit found right, and its next step is audited.",
        minimum=0,
    )
    on_straggler: Literal["warn", "evict", "rebalance"] = key(
        "warn",
        "Reaction to a slow rank. warn: record an incident; evict: also replace it; rebalance: give it fewer "
        "microbatches (data parallelism only). CPU workers only, so far.",
    )
    straggler_factor: float = key(
        2.0, "A rank is slow if its compute time per step exceeds the others' median by this factor.", above=1
    )
    keep_verified_state: bool = key(
        False,
        "Keep the last state that replicas agreed on in host memory, for replica_check_interval; with audits, the last "
        "one after a step whose audit found no difference. What only one rank has of it is kept at its peer too.",
    )
    inject: list[InjectConfig] = key([], "Faults to inject, for tests: [{kind: kill, rank: 1, step: 10}, ...].")
