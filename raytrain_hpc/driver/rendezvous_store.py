"""The store through which ranks form process groups. It lives in the driver, so that it outlives every rank."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.distributed.rendezvous import ABORTED, DECISION_KEY, Rendezvous

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# A last resort: the watchdog detects stalled ranks much earlier. Ranks wait in collectives for one that loads data or
# runs a callback, for which it has as long.
COLLECTIVE_TIMEOUT_S = 300.0


class RendezvousStore:
    """A TCP store on this host. Each generation uses its own key prefix.

    The store opens at the first rendezvous: importing torch takes seconds, in which workers can start.
    """

    def __init__(self, host: str, config: Config):
        stall_timeout = config.fault.stall_timeout
        self._timeout_s = max(COLLECTIVE_TIMEOUT_S, 0.0 if stall_timeout == AUTO else 10 * float(stall_timeout))
        self._host = host

    @cached_property
    def _store(self) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=self._timeout_s)
        return TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)

    def abort_generation(self, generation: int) -> None:
        """Release the ranks that wait in the rendezvous of this generation: it will not be formed."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        PrefixStore(f"generation-{generation}", self._store).set(DECISION_KEY, ABORTED)

    def create_rendezvous(self, generation: int) -> Rendezvous:
        """Return the rendezvous at which the ranks of `generation` meet."""
        return Rendezvous(self._host, self._store.port, generation, self._timeout_s)
