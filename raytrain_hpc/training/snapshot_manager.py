"""In-memory snapshots of the last committed steps, used to recover when a rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.replica_check import CorruptionError
from raytrain_hpc.snapshot.memory_store import RankSnapshots, SnapshotRing, SnapshotStore
from raytrain_hpc.snapshot.replicator import SnapshotReplicator
from raytrain_hpc.state.sharded_state import ShardedState


def snapshots_enabled(config: Config) -> bool:
    """Return whether snapshots are taken. State that is offloaded to disk does not fit into memory."""
    return config.checkpoint.snapshot_interval > 0 and config.parallel.offload != "disk"


@dataclass
class SnapshotManager:
    """Manager of this rank's snapshots in `store`.

    `live_state_suffices`: every rank holds the whole state, so that between two steps any surviving rank's live state
    serves as a snapshot. Otherwise a snapshot is taken every `checkpoint.snapshot_interval` steps, and `replicator`
    sends it to a peer. `release_memory`: called after moments were read.
    """

    config: Config
    store: SnapshotStore | None  # None: there is no recovery from memory
    live_state: ShardedState
    live_state_suffices: bool
    replicator: SnapshotReplicator | None
    release_memory: Callable[[], None]

    def begin_generation(
        self,
        step: int,
        generation: int,
        own_snapshots: SnapshotRing | None = None,
        attached_snapshots: Mapping[int, RankSnapshots] | None = None,
        replicas: Mapping[int, SnapshotRing] | None = None,
        *,
        is_start_verified: bool = True,
    ) -> None:
        """Replace earlier snapshots. Call when the state has been restored and is equal on all replicas.

        `is_start_verified`: audits have verified the state of `step`. Other arguments: see `SnapshotStore.reset`.
        """
        if self.store is not None:
            self.store.reset(generation, own_snapshots, attached_snapshots, replicas)
            fault = self.config.fault
            if snapshots_enabled(self.config):
                self._take_snapshot(step, self.store)
            if is_start_verified if fault.audit_interval else fault.replica_check_interval:
                self.mark_verified(step)

    def before_update(self) -> None:
        """Revoke the live state. Call before the optimizer step, which changes it."""
        if self.store is not None:
            self.store.revoke_live()

    def mark_verified(self, step: int) -> None:
        """Keep the live state of `step` as verified. Call on all ranks, when all replicas are equal.

        Where ranks hold different parts of the state, it is kept as a snapshot, which others have too.
        """
        if self.store is None or not self.config.fault.keep_verified_state:
            return
        if self.live_state_suffices or not snapshots_enabled(self.config):
            self.store.keep_verified(step, self.live_state)
            self.release_memory()
            return
        if not self.store.has_snapshot(step):
            self._take_snapshot(step, self.store)
        self.store.keep_verified_snapshots(step)

    def wait_for_copies(self) -> None:
        """Wait for this rank's snapshot, and for the copies that it sends and receives, to complete.

        Call after the backward passes and before the all-reduce of losses. A rank that passes that all-reduce then
        knows that all earlier copies are complete on all ranks.
        """
        if self.store is not None:
            self.store.synchronize()
        if self.replicator is not None:
            self.replicator.wait()

    def after_step(self, step: int, *, before_pause: bool = False) -> None:
        """Snapshot or publish the live state of `step`.

        `before_pause`: the generation ends with this step, without a checkpoint.
        """
        if self.store is None:
            return
        is_due = snapshots_enabled(self.config) and (
            self.live_state_suffices or step % self.config.checkpoint.snapshot_interval == 0
        )
        # Always snapshot the last state: the ranks that hold a part of it may be missing in the next generation.
        if is_due or (before_pause and not self.live_state_suffices):
            self._take_snapshot(step, self.store)
        elif before_pause:
            self.store.publish_live(step, self.live_state)

    def _take_snapshot(self, step: int, store: SnapshotStore) -> None:
        if self.live_state_suffices:
            store.publish_live(step, self.live_state)
            return
        self.wait_for_copies()  # the snapshot that is overwritten must have been sent
        slot = store.take(step, self.live_state)
        if self.replicator is not None:
            self.replicator.send_async(step, slot)
        self.release_memory()

    @property
    def is_live_published(self) -> bool:
        """Whether the live state serves as a snapshot now."""
        return self.store is not None and self.store.is_live_published

    def publish_live(self, step: int, live_state: ShardedState) -> None:
        """Publish another description of the live state of `step`, which must be valid and stay so."""
        if self.store is not None:
            self.store.publish_live(step, live_state)

    @contextmanager
    def close_on_exit(self) -> Iterator[None]:
        """Close the replicator at the end of the context. Pending copies complete, or are canceled on an error."""
        try:
            yield
        except BaseException as error:
            if isinstance(
                error, CorruptionError
            ):  # of all ranks: verified snapshots that are being copied can complete
                self.wait_for_copies()
            if self.replicator is not None:
                self.replicator.cancel()
            raise
        if self.replicator is not None:
            self.replicator.close()
