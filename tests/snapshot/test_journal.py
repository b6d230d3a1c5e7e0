"""Journal in shared memory: the last records, also of a process that was killed while it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from raytrain_hpc.snapshot.journal import JournalReader, SharedJournal
from raytrain_hpc.snapshot.shared_file import SharedMemoryHandle

WRITER = """
import json, os
from raytrain_hpc.snapshot.journal import SharedJournal
journal = SharedJournal()
print(json.dumps(journal.handle), flush=True)
number = 0
while True:
    number += 1
    journal.append({"step": number, "text": "x" * (number % 3000)})
"""


def test_records_are_read_in_order_and_old_ones_are_dropped() -> None:
    journal = SharedJournal()
    reader = JournalReader(journal.handle)
    assert reader.read() == []
    journal.append({"step": 1, "loss": float("inf")})
    assert reader.read() == [{"step": 1, "loss": float("inf")}]
    for step in range(2, 5000):
        journal.append({"step": step, "text": "x" * 200})
    steps = [record["step"] for record in reader.read()]
    assert steps == list(range(steps[0], 5000)) and 1000 < len(steps) < 2600
    journal.append({"step": 5000, "text": "x" * (1 << 20)})
    assert [record["step"] for record in reader.read()] == steps, "a record that does not fit is left out"


def test_records_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    for delay_s in (0.05, 0.2, 0.31):
        child = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            reader = JournalReader(SharedMemoryHandle(*json.loads(child.stdout.readline())))
            try:
                child.wait(delay_s)
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
        finally:
            child.kill()
            child.wait(10)
        records = reader.read()
        steps = [record["step"] for record in records]
        assert steps and steps == list(range(steps[0], steps[-1] + 1))
        assert all(record["text"] == "x" * (record["step"] % 3000) for record in records)
