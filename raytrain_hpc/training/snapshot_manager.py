"""What a rank keeps in memory of its committed steps, for the others to go on from should it or they be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from raytrain_hpc.config.schema import Config
from raytrain_hpc.snapshot.memory_store import RankSnapshots, SnapshotRing, SnapshotStore
from raytrain_hpc.snapshot.replicator import SnapshotReplicator
from raytrain_hpc.state.sharded_state import ShardedState


def snapshots_enabled(config: Config) -> bool:
    """Whether state is kept in memory from step to step: not where it is on disk, for memory is too small for it."""
    return config.checkpoint.snapshot_every > 0 and config.parallel.offload != "disk"


@dataclass
class SnapshotManager:
    """Keeps the state in `memory`, as seldom as is enough.

    `lends`: the live state is as good as a snapshot between two steps, since every rank holds all of it: whoever is
    left, at whichever step, has it whole. Else a snapshot is taken every so many steps, and `copying` sends it on.
    `rest`: called when moments were read.
    """

    config: Config
    store: SnapshotStore | None  # None: nobody would go on from it
    state: ShardedState
    live_state_suffices: bool
    replicator: SnapshotReplicator | None
    release_memory: Callable[[], None]

    def begin_generation(
        self,
        step: int,
        generation: int,
        own_snapshots: SnapshotRing | None = None,
        attached: Mapping[int, RankSnapshots] | None = None,
    ) -> None:
        """The state has been loaded, the same on all replicas; what was held before is of no more use.

        `own`, `opened`: as in `Snapshots.begin`.
        """
        if self.store is not None:
            self.store.reset(generation, own_snapshots, attached)
            if self.config.fault.compare_every:
                self.mark_verified(step)
            if snapshots_enabled(self.config):
                self._take_snapshot(step, self.store)

    def before_update(self) -> None:
        """The live state is about to change."""
        if self.store is not None:
            self.store.revoke_live()

    def mark_verified(self, step: int) -> None:
        """The live state is that of `step`, and all replicas of it are equal."""
        if self.store is not None and self.config.fault.keep_agreed:
            self.store.keep_verified(step, self.state)
            self.release_memory()

    def wait_for_copies(self) -> None:
        """Wait until the own snapshot and the copies that this rank sends and takes have arrived.

        Before ranks come together in a step: who is through with it knows that all copies of the one before are there.
        """
        if self.store is not None:
            self.store.synchronize()
        if self.replicator is not None:
            self.replicator.wait()

    def after_step(self, step: int, *, is_last: bool = False) -> None:
        """The live state is that of `step`; with `last` it stays that."""
        if self.store is None:
            return
        due = snapshots_enabled(self.config) and (
            self.live_state_suffices or step % self.config.checkpoint.snapshot_every == 0
        )
        if due or (is_last and not self.live_state_suffices):  # not all that hold it may be there afterwards
            self._take_snapshot(step, self.store)
        elif is_last:
            self.store.publish_live(step, self.state)

    def _take_snapshot(self, step: int, store: SnapshotStore) -> None:
        if self.live_state_suffices:
            store.publish_live(step, self.state)
            return
        self.wait_for_copies()  # what is overwritten must have been sent
        slot = store.take(step, self.state)
        if self.replicator is not None:
            self.replicator.send_async(step, slot)
        self.release_memory()

    @contextmanager
    def close_on_exit(self) -> Iterator[None]:
        """While a generation runs. Copies that are under way when it ends well arrive."""
        try:
            yield
        except BaseException:
            if self.replicator is not None:
                self.replicator.cancel()
            raise
        if self.replicator is not None:
            self.replicator.close()
