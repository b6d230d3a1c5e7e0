"""Request to Ray's autoscaler for the nodes that runs want. Their coordinator sends it."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.cluster_following import get_max_workers
from raytrain_hpc.elastic.recovery import get_min_workers
from raytrain_hpc.planner.layout import get_fixed_world_size

Bundle = dict[str, float]  # resource -> amount, which must fit on one node


def count_wanted_workers(config: Config, target: int = 0) -> int:
    """Return the workers that a run wants nodes for, besides spares.

    `target`: the number that it should have now; 0 before it starts. A run whose settings fix no number wants at least
    `cluster.max_workers`; without a bound, `cluster.min_workers`.
    """
    fixed_size = get_fixed_world_size(config)
    if fixed_size is not None:
        return target or fixed_size
    return max(target, get_max_workers(config) or get_min_workers(config))


def send_request(bundles: Sequence[Bundle]) -> None:
    """Ask the autoscaler of the connected cluster for room for these bundles; it replaces the last request.

    A cluster without autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources  # a slow import that only the coordinator needs

    request_resources(bundles=list(bundles))
