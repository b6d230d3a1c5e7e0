"""Records of the worker that runs in the driver's process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raytrain_hpc.driver.local_backend import DirectControlChannel


def test_records_of_several_threads_are_handled_one_at_a_time() -> None:
    """The training loop and the thread that writes checkpoints emit at the same time; a handler may emit too."""
    in_progress, handled = [], []

    def handle(record: dict[str, Any]) -> None:
        in_progress.append(record)
        time.sleep(0.002)  # lets the other thread run
        assert in_progress == [record]
        in_progress.clear()
        handled.append(record["step"])
        if record["step"] == 0:
            channel.emit({"step": 100})

    channel = DirectControlChannel(threading.Event(), handle)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda step: channel.emit({"step": step}), range(20)))
    assert sorted(handled) == [*range(20), 100]
