"""Executors: the same bytes from every engine, also after processes were killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import raytrain_hpc.data.preprocess.chunks as chunks_module
import raytrain_hpc.data.preprocess.partition as partition_module
from raytrain_hpc.data.dataset.manifest import load_manifest, verify_shards
from raytrain_hpc.data.preprocess.executors import MultiprocessExecutor, SerialExecutor, WorkersLostError
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.errors import ClusterError, DataError
from tests.data.preprocess.input_corpus import read_contents, tokenize_documents, write_mixed

SETTINGS = {"tokenizer": "bpe:300", "val_fraction": 0.2, "shard_tokens": 700}


@pytest.fixture
def many_partitions(monkeypatch):
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 1500)


def test_all_engines_write_the_same_bytes(tmp_path, many_partitions, ray_cluster):
    documents = write_mixed(tmp_path / "in")
    seen: list[tuple[int, int]] = []
    manifests = {
        name: prepare([tmp_path / "in"], tmp_path / name, **SETTINGS, engine=engine, workers=workers)
        for name, engine, workers in [("one", "local", 1), ("pool", "local", 2)]
    }
    manifests["ray"] = prepare(
        [tmp_path / "in"], tmp_path / "ray", **SETTINGS, engine="ray", workers=2, progress=lambda *now: seen.append(now)
    )
    assert manifests["one"] == manifests["pool"] == manifests["ray"]
    for name in manifests:
        verify_shards(tmp_path / name, manifests[name])
    tokens, ends = tokenize_documents(documents, tokenizer_from_json(manifests["one"].tokenizer))
    stored = read_contents(tmp_path / "ray")
    assert stored[0] == tokens
    assert stored[1] == sorted({*ends, manifests["one"].splits["train"].tokens})
    assert seen[-1][0] == seen[-1][1] and len(seen) > 10
    # Errors about the input are raised unchanged by every engine.
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' * 200 + '{"txt": "x"}\n')
    for engine in ("ray", "local"):
        with pytest.raises(DataError, match=r"bad.jsonl: line 201 has no field 'text'"):
            prepare([tmp_path / "bad.jsonl"], tmp_path / "bad", engine=engine, workers=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "in", "one", "pool", "ray"]


LOCAL_RAY_PREPARE = """
import contextlib
import sys
from pathlib import Path
import psutil
from raytrain_hpc.data.preprocess.prepare import prepare

def look(done, total):
    if done:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                seen.update((Path(word).name, process.pid) for word in process.cmdline())

seen = set()
settings = dict(tokenizer="bpe:300", val_fraction=0.2, shard_tokens=700)
prepare([sys.argv[1] + "/in"], sys.argv[1] + "/out", **settings, engine="ray", address="local", progress=look)
for name, pid in seen:
    if name in ("raylet", "log_monitor.py", "monitor.py", "dashboard.py"):
        print(name, pid)
"""


def test_local_ray_runs_few_daemons_and_is_shut_down(tmp_path):
    write_mixed(tmp_path / "in")
    expected = prepare([tmp_path / "in"], tmp_path / "expected", **SETTINGS)
    command = [sys.executable, "-c", LOCAL_RAY_PREPARE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    daemons = [line.split() for line in done.stdout.splitlines()]  # a raylet that starts a process appears twice
    assert {name for name, _ in daemons} == {"raylet"} and not any(psutil.pid_exists(int(pid)) for _, pid in daemons)
    assert load_manifest(str(tmp_path / "out")) == expected and read_contents(tmp_path / "out") == read_contents(
        tmp_path / "expected"
    )


def test_unreachable_address_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ClusterError, match="address=127.0.0.1:1: nothing answers there"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", address="127.0.0.1:1")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


SLOW_PREPARE = """
import sys, time
import raytrain_hpc.data.preprocess.chunks as chunks
import raytrain_hpc.data.preprocess.partition as partition
from raytrain_hpc.data.preprocess.prepare import prepare
partition.PARTITION_BYTES = 1500
write = chunks.write_chunk
def slow_write(*arguments):
    time.sleep(0.05)
    return write(*arguments)
chunks.write_chunk = slow_write
prepare([sys.argv[1] + "/in"], sys.argv[1] + "/out", tokenizer="bpe:300", val_fraction=0.2, shard_tokens=700)
"""


def test_killed_preparation_is_resumed(tmp_path, many_partitions, monkeypatch):
    write_mixed(tmp_path / "in")
    expected = prepare([tmp_path / "in"], tmp_path / "expected", **SETTINGS)
    process = subprocess.Popen([sys.executable, "-c", SLOW_PREPARE, str(tmp_path)])
    chunks = tmp_path / ".out.preparing" / "chunks"
    while len(list(chunks.glob("*.json"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = len(list(chunks.glob("*.json")))
    written = []
    write = chunks_module.write_chunk
    monkeypatch.setattr(chunks_module, "write_chunk", lambda *args: written.append(args[1].index) or write(*args))
    assert prepare([tmp_path / "in"], tmp_path / "out", **SETTINGS) == expected
    assert finished >= 3 and written[0] > 0
    assert len(set(written)) == len(written) == len(plan_folder(tmp_path / "in")) - finished
    assert read_contents(tmp_path / "out") == read_contents(tmp_path / "expected")
    assert not (tmp_path / ".out.preparing").exists()


def plan_folder(folder: Path) -> list[partition_module.InputPartition]:
    from raytrain_hpc.data.preprocess.input_files import find_input_files

    return partition_module.plan_partitions(find_input_files([folder]))


def test_killed_worker_raises(tmp_path, many_partitions):
    write_mixed(tmp_path / "in")
    with pytest.raises(WorkersLostError, match="use fewer workers"):
        list(MultiprocessExecutor(2).run(_kill_self, plan_folder(tmp_path / "in")))


UNGUARDED_SCRIPT = """
import raytrain_hpc as rt
import raytrain_hpc.data.preprocess.partition as partition_module
partition_module.PARTITION_BYTES = 100
rt.prepare(["a.txt"], "out", engine="local", workers=2)
"""


def test_script_without_a_main_guard_is_told_to_have_one(tmp_path):
    (tmp_path / "a.txt").write_text("hello world " * 100)
    (tmp_path / "script.py").write_text(UNGUARDED_SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    message = 'script.py: calls prepare when it is imported.*put prepare under `if __name__ == "__main__":`'
    assert done.returncode == 1 and re.search(message, done.stderr)
    assert "DataError: out: a worker process ended: its error is printed above" in done.stderr
    guarded = UNGUARDED_SCRIPT.replace("rt.prepare", "if __name__ == '__main__': rt.prepare")
    (tmp_path / "script.py").write_text(guarded)
    subprocess.run(command, cwd=tmp_path, timeout=30, check=True)
    assert load_manifest(tmp_path / "out").inputs[0].bytes == 1200


def _kill_self(piece: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_preparation_resumes_after_a_full_disk(tmp_path, many_partitions):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        write_mixed(tmp_path / "in")
        expected = prepare([tmp_path / "in"], tmp_path / "expected", **SETTINGS)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(960 << 10))
        with pytest.raises(DataError, match="No space left on device.*repeat the same command to resume"):
            prepare([tmp_path / "in"], disk / "out", **SETTINGS)
        assert not (disk / "out").exists() and list((disk / ".out.preparing" / "chunks").glob("*.json"))
        ballast.unlink()
        assert prepare([tmp_path / "in"], disk / "out", **SETTINGS) == expected
        assert [p.name for p in disk.iterdir()] == ["out"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_partitions_cover_the_files(tmp_path, many_partitions):
    write_mixed(tmp_path / "in")
    ranges = [file_range for partition in plan_folder(tmp_path / "in") for file_range in partition.ranges]
    for before, after in zip(ranges, ranges[1:], strict=False):
        assert (after.begin == before.end and not before.is_last) if after.begin else before.is_last
    assert ranges[-1].is_last and len(ranges) > 20


def test_serial_executor_keeps_the_order(tmp_path, many_partitions):
    write_mixed(tmp_path / "in")
    partitions = plan_folder(tmp_path / "in")
    results = list(SerialExecutor().run(lambda partition: json.dumps(partition.index), partitions))
    assert results == [(partition, str(partition.index)) for partition in partitions]
