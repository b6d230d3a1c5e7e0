"""The store at which ranks meet. It lives with the driver, so that it outlives any rank."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.distributed.rendezvous import ABORTED, DECISION_KEY, Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

COLLECTIVE_TIMEOUT_S = 300.0  # the last resort: whoever stalls is given up on long before


class RendezvousStore:
    """A TCP store on this host; every generation uses a prefix of its own in it.

    It is opened for the first meeting: torch, which it is made of, takes seconds to load, in which workers can start.
    """

    def __init__(self, host: str, config: Config):
        stall = config.fault.stall_timeout
        self._timeout_s = COLLECTIVE_TIMEOUT_S if stall == AUTO else max(10 * float(stall), 10.0)
        self._host = host

    @cached_property
    def _store(self) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore

        patience = timedelta(seconds=self._timeout_s)
        return TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=patience)

    def abort_generation(self, generation: int) -> None:
        """Tell the ranks that still wait for others of this generation that it will not be formed."""
        from torch._C._distributed_c10d import PrefixStore

        PrefixStore(f"generation-{generation}", self._store).set(DECISION_KEY, ABORTED)

    def create_rendezvous(self, generation: int) -> Rendezvous:
        """Where the ranks of `generation` meet."""
        return Rendezvous(self._host, self._store.port, generation, self._timeout_s)
