"""Every error that a user can meet, as one tree. Each message is one line: the key, the value, the remedy."""

from __future__ import annotations


class RaytrainError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 2


class ConfigError(RaytrainError):
    """A setting is wrong. Nothing was started and nothing was written."""

    def __init__(self, key: str, value: object, origin: str, remedy: str):
        self.key, self.value, self.origin, self.remedy = key, value, origin, remedy
        where = f" ({origin})" if origin else ""
        super().__init__(f"{key}={value!r}{where}: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.value, self.origin, self.remedy)


class LayoutError(ConfigError):
    """The parallel axes, the batch and the number of workers do not fit together."""


class OffloadError(ConfigError):
    """parallel.offload_dir cannot hold a rank's optimizer state. A worker finds that, before its first step."""


class DataError(RaytrainError):
    """An input, a dataset or a tokenizer cannot be used."""


class ModelError(RaytrainError):
    """A model or a loss given by the user does not keep the interface."""


class CheckpointError(RaytrainError):
    """A checkpoint cannot be loaded into this run."""


class CheckpointCorruptedError(CheckpointError):
    """A checkpoint directory does not hold what its manifest says."""


class StateLostError(RaytrainError):
    """No rank that is left holds some part of the state. The run goes on from its newest checkpoint."""

    exit_code = 4


class RunDirectoryError(RaytrainError):
    """The run directory cannot be used: not writable, or it belongs to another run."""


class LeaseLostError(RunDirectoryError):
    """Another driver has taken over the run directory; this one must not publish any more."""

    exit_code = 4


class ClusterError(RaytrainError):
    """No Ray at the address given, or it has fewer slots than the run needs."""


class WorkerFailedError(RaytrainError):
    """A rank died or raised; the generation it belonged to is over."""

    exit_code = 4

    def __init__(
        self,
        rank: int,
        node: str,
        pid: int,
        kind: str,
        reason: str,
        *,
        detected_at: float = 0.0,
        last_seen: float | None = None,
        operation: str = "",
        stacks: dict[int, str] | None = None,
    ):
        """`kind` is died, node lost, raised, silent, frozen, interpreter held, stalled, out of step, slow, corrupt,
        replicas differ, or deadlocked: then nobody could be told from the others.

        `detected` and `last_seen` (its last sign of life) are unix times; `operation` is the collective in which the
        others stood, where that is known, and `stacks` what the threads of each rank were at.
        """
        self.rank, self.node, self.pid, self.kind, self.reason = rank, node, pid, kind, reason
        self.detected_at, self.last_seen = detected_at, last_seen
        self.operation, self.stacks = operation, stacks or {}
        self.ranks: tuple[int, ...] = (rank,)  # all that were lost with it
        super().__init__(f"rank {rank} (node {node}, pid {pid}) {kind}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.node, self.pid, self.kind, self.reason), self.__dict__


class RunFailedError(RaytrainError):
    """The run gave up after faults."""

    exit_code = 4


class MissingDependencyError(RaytrainError):
    """An optional package that a setting asks for is not installed."""
