"""Exceptions that the public API and the command line raise. Every message is one line.

RaytrainError
  + ConfigError
      + LayoutError
      + OffloadError
  + DataError
  + ModelError
  + CallbackError
  + CheckpointError
      + CheckpointCorruptedError
  + StateLostError              exit code 4
  + RunDirectoryError
      + LeaseLostError          exit code 4
  + ClusterError
  + WorkerFailedError           exit code 4
  + RunFailedError              exit code 4
  + MissingDependencyError

The exit code of all others is 2.
"""

from __future__ import annotations


class RaytrainError(Exception):
    """Base class of all errors that the package raises deliberately.

    `exit_code` is the exit code of the command line for this error.
    """

    exit_code = 2


class ConfigError(RaytrainError):
    """Invalid setting. Raised before anything is started or written."""

    def __init__(self, key: str, value: object, origin: str, remedy: str):
        self.key, self.value, self.origin, self.remedy = key, value, origin, remedy
        where = f" ({origin})" if origin else ""
        super().__init__(f"{key}={value!r}{where}: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.value, self.origin, self.remedy)


class LayoutError(ConfigError):
    """Incompatible combination of parallel axes, batch sizes and number of workers."""


class OffloadError(ConfigError):
    """parallel.offload_dir cannot hold a rank's optimizer state. Raised by a worker before its first step."""


class DataError(RaytrainError):
    """Unusable input file, dataset or tokenizer."""


class ModelError(RaytrainError):
    """Model, loss or script that does not meet the interface, or a model file that cannot be converted."""


class CallbackError(RaytrainError):
    """Callback that raised an exception, or whose state does not meet the interface."""


class CheckpointError(RaytrainError):
    """Checkpoint that is missing, or that cannot be loaded or written."""


class CheckpointCorruptedError(CheckpointError):
    """Checkpoint directory whose files do not match its manifest."""


class StateLostError(RaytrainError):
    """No surviving rank holds part of the training state. The run resumes from its newest checkpoint."""

    exit_code = 4


class RunDirectoryError(RaytrainError):
    """Unusable run directory: missing, not writable, or owned by another run."""


class LeaseLostError(RunDirectoryError):
    """The run directory was taken over by another driver. This driver must stop publishing to it."""

    exit_code = 4


class ClusterError(RaytrainError):
    """No Ray cluster at the given address, or a cluster with fewer slots than the run needs."""


class WorkerFailedError(RaytrainError):
    """A rank failed, which ends its generation."""

    exit_code = 4

    def __init__(
        self,
        rank: int,
        node: str,
        pid: int,
        kind: str,
        reason: str,
        *,
        node_id: str = "",
        detected_at: float = 0.0,
        aborted_at: float = 0.0,
        last_seen: float | None = None,
        operation: str = "",
        stacks: dict[int, str] | None = None,
        device: str = "",
    ):
        """Initialize the error.

        Args:
            kind: died, crashed (by a fatal signal of its own), out of memory, node lost, preempted (lost after notice),
                raised, silent, frozen, interpreter held, stalled, out of step, link down (it receives nothing), slow,
                corrupt, faulty device (it computes wrong again and again), suspected (it or another one does), disputed
                (it or a spare did), replicas differ, or deadlocked (no single rank could be identified as the cause).
            node_id: Ray's identifier of the node, whose name is `node`.
            detected_at: Unix time of the detection.
            aborted_at: Unix time at which all other ranks of the generation had ended it.
            last_seen: Unix time of the rank's last heartbeat, if known.
            operation: Collective in which the other ranks were waiting, if known.
            stacks: Thread stacks per rank.
            device: State of the rank's GPU in one line, if known.
        """
        self.rank, self.node, self.pid, self.kind, self.reason = rank, node, pid, kind, reason
        self.node_id, self.detected_at, self.aborted_at = node_id, detected_at, aborted_at
        self.last_seen, self.operation, self.stacks, self.device = last_seen, operation, stacks or {}, device
        self.ranks: tuple[int, ...] = (rank,)  # all ranks that failed together
        self.trusted_step: int | None = None  # no state after this step is to be used; None: no limit is known
        self.traceback = ""  # of the exception that it raised, if known
        self.is_program_error = False  # it raised an exception of the user's code or of the model's passes
        self.is_on_all_ranks = False  # all ranks of the generation raised such an exception
        super().__init__(f"rank {rank} (node {node}, pid {pid}) {kind}: {reason}" + f" (GPU: {device})" * bool(device))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.node, self.pid, self.kind, self.reason), self.__dict__


class RunFailedError(RaytrainError):
    """The run ended because it could not recover from a failure."""

    exit_code = 4


class MissingDependencyError(RaytrainError):
    """Optional package that a setting requires but that is not installed."""
