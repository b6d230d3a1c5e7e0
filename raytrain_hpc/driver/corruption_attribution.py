"""Kind of failure of a rank whose generation ended because of silent corruption."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.audit_verdict import choose_suspect
from raytrain_hpc.runtime.control_channel import GenerationOutcome

REPLICAS_DIFFER = "replicas differ"  # a consequence: of a rank that is not to be replaced


def attribute_corruption(rank: int, outcome: GenerationOutcome, workers: Sequence[Worker], generation: int) -> str:
    """Return the kind of failure of a rank with outcome "differs".

    If it is unknown which of several suspects is at fault, one is replaced, and the workers of the others are marked:
    one that becomes a suspect again in a later generation, beside another process, is at fault.
    """
    if rank in outcome.divergent_ranks:
        return outcome.divergence
    if rank not in outcome.suspects:
        return REPLICAS_DIFFER
    for suspect in outcome.suspects:
        workers[suspect].suspected_in = workers[suspect].suspected_in or generation
    before = [suspect for suspect in outcome.suspects if workers[suspect].suspected_in != generation]
    chosen, kind = choose_suspect(outcome.suspects, before)
    return kind if rank == chosen else REPLICAS_DIFFER
