"""The store at which ranks meet. It lives with the driver, so that it outlives any rank."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from raytrain_hpc.config import AUTO, Config
from raytrain_hpc.worker.groups import FALLEN, Rendezvous

COLLECTIVE_TIMEOUT_S = 300.0  # the last resort: whoever stalls is given up on long before


class RendezvousStore:
    """A TCP store on this host; every generation uses a prefix of its own in it."""

    def __init__(self, host: str, config: Config):
        stall = config.fault.stall_timeout
        self._timeout_s = COLLECTIVE_TIMEOUT_S if stall == AUTO else max(10 * float(stall), 10.0)
        self._host = host
        self._store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )

    def fall(self, generation: int) -> None:
        """Tell the ranks that still wait for others of this generation that it will not be formed."""
        PrefixStore(f"generation-{generation}", self._store).set(FALLEN, "1")

    def meeting(self, generation: int) -> Rendezvous:
        """Where the ranks of `generation` meet."""
        return Rendezvous(self._host, self._store.port, generation, self._timeout_s)
