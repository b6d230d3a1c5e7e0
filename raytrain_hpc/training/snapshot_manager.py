"""What a rank keeps in memory of its committed steps, for the others to go on from should it or they be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from raytrain_hpc.config.schema import Config
from raytrain_hpc.snapshot.memory_store import Kept, LastSteps, Snapshots
from raytrain_hpc.snapshot.replicator import Copying
from raytrain_hpc.state.sharded_state import Holding


def keeps_snapshots(config: Config) -> bool:
    """Whether state is kept in memory from step to step: not where it is on disk, for memory is too small for it."""
    return config.checkpoint.snapshot_every > 0 and config.parallel.offload != "disk"


@dataclass
class Keeper:
    """Keeps the state in `memory`, as seldom as is enough.

    `lends`: the live state is as good as a snapshot between two steps, since every rank holds all of it: whoever is
    left, at whichever step, has it whole. Else a snapshot is taken every so many steps, and `copying` sends it on.
    `rest`: called when moments were read.
    """

    config: Config
    memory: Snapshots | None  # None: nobody would go on from it
    holding: Holding
    lends: bool
    copying: Copying | None
    rest: Callable[[], None]

    def begin(
        self, step: int, generation: int, own: LastSteps | None = None, opened: Mapping[int, Kept] | None = None
    ) -> None:
        """The state has been loaded, the same on all replicas; what was held before is of no more use.

        `own`, `opened`: as in `Snapshots.begin`.
        """
        if self.memory is not None:
            self.memory.begin(generation, own, opened)
            if self.config.fault.compare_every:
                self.agreed(step)
            if keeps_snapshots(self.config):
                self._keep(step, self.memory)

    def steps(self) -> None:
        """The live state is about to change."""
        if self.memory is not None:
            self.memory.withdraw()

    def agreed(self, step: int) -> None:
        """The live state is that of `step`, and all replicas of it are equal."""
        if self.memory is not None and self.config.fault.keep_agreed:
            self.memory.agree(step, self.holding)
            self.rest()

    def wait_for_copies(self) -> None:
        """Wait until the own snapshot and the copies that this rank sends and takes have arrived.

        Before ranks come together in a step: who is through with it knows that all copies of the one before are there.
        """
        if self.memory is not None:
            self.memory.arrive()
        if self.copying is not None:
            self.copying.wait()

    def stepped(self, step: int, *, last: bool = False) -> None:
        """The live state is that of `step`; with `last` it stays that."""
        if self.memory is None:
            return
        due = keeps_snapshots(self.config) and (self.lends or step % self.config.checkpoint.snapshot_every == 0)
        if due or (last and not self.lends):  # not all that hold it may be there afterwards
            self._keep(step, self.memory)
        elif last:
            self.memory.lend(step, self.holding)

    def _keep(self, step: int, memory: Snapshots) -> None:
        if self.lends:
            memory.lend(step, self.holding)
            return
        self.wait_for_copies()  # what is overwritten must have been sent
        slot = memory.take(step, self.holding)
        if self.copying is not None:
            self.copying.send(step, slot)
        self.rest()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While a generation runs. Copies that are under way when it ends well arrive."""
        try:
            yield
        except BaseException:
            if self.copying is not None:
                self.copying.abandon()
            raise
        if self.copying is not None:
            self.copying.finish()
