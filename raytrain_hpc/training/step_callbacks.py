"""Callbacks of the training loop itself: when to evaluate, when to compare replicas, and statistics over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.schema import EvalConfig
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.observability.metrics import RANK_STATISTIC_KEYS
from raytrain_hpc.optim.lr_scheduler import should_evaluate
from raytrain_hpc.training.timers import reduce_over_ranks


class EvaluationSchedule(Callback):
    """Evaluation every `eval.interval` steps and at the end."""

    def __init__(self, config: EvalConfig):
        self._config = config

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Request an evaluation if one is due."""
        if should_evaluate(self._config, self.context.step, self.context.end_step):
            self.control.evaluate()


class RankStatistics(Callback):
    """Mean, minimum, maximum and deviation over ranks, every `logging.rank_stats_interval` steps."""

    priority = -80

    def __init__(self, interval: int, parallel_context: ParallelContext):
        self._interval, self._parallel_context = interval, parallel_context

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Add the statistics to the metrics. Collective."""
        if self.context.step % self._interval == 0:
            values = {name: metrics[name] for name in RANK_STATISTIC_KEYS}
            metrics |= reduce_over_ranks(values, self._parallel_context.world_group, self._parallel_context.device)


class ReplicaCheckSchedule(Callback):
    """Comparison of replicas every `fault.replica_check_interval` steps and before every checkpoint.

    After loading, replicas are always compared (training/builder.py).
    """

    priority = -60  # before the statistics, whose collective would hide a rank that differs

    def __init__(self, interval: int, replica_check: ReplicaCheck, on_verified: Callable[[int], None]):
        """Set the interval. `on_verified`: called with the step whose state is equal on all replicas."""
        self._interval, self._replica_check, self._on_verified = interval, replica_check, on_verified
        self._last_step = -1

    def pre_train(self) -> None:
        """Count the state that was loaded as compared (training/builder.py)."""
        self._last_step = self.context.step

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Compare replicas if a comparison is due. Raises ReplicaMismatchError on all ranks if they differ."""
        if self.context.step % self._interval == 0:
            self._compare()

    def pre_checkpoint_saved(self) -> None:
        """Compare replicas unless this step has been compared. Raises as `post_commit` does."""
        if self._last_step != self.context.step:
            self._compare()

    def _compare(self) -> None:
        self._last_step = self.context.step
        self._replica_check.compare()
        self._on_verified(self.context.step)


class AuditedState(Callback):
    """Verified state of runs with audits: that after a step whose audit found no difference, if replicas agree too."""

    priority = -61  # after a comparison that is due anyway

    def __init__(
        self,
        is_audited: Callable[[int], bool],
        replica_check: ReplicaCheck,
        on_verified: Sequence[Callable[[int], None]],
    ):
        """`is_audited`: says whether the step after some committed ones is. `on_verified`: take the step."""
        self._is_audited, self._replica_check, self._on_verified = is_audited, replica_check, on_verified

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Compare replicas after an audited step. Raises ReplicaMismatchError on all ranks if they differ."""
        if self._is_audited(self.context.step - 1):
            self._replica_check.compare()
            for take_step in self._on_verified:
                take_step(self.context.step)
