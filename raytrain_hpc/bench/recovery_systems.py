"""Systems of `bench recovery`: how each one is started, and where it reports its steps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_hpc.bench import restart_baseline
from raytrain_hpc.bench.contenders import read_jsonl, scratch_dir
from raytrain_hpc.bench.interleave import TrainingProcess, launch_training
from raytrain_hpc.bench.step_report import GROW_FILE, RAISED_FILE, STEPS_FILE, request_exception
from raytrain_hpc.bench.workloads import SMALL, build_baseline_job, make_settings
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.driver.mailbox import Mailbox
from raytrain_hpc.driver.resize_request import send_resize
from raytrain_hpc.errors import MissingDependencyError

WORKERS = 2
STEPS = 1_000_000
OVERRIDES = (*SMALL, "data.path=synthetic")
PLATFORM, SPARE = "platform", ", one spare"
RESIZE_TIMEOUT_S = 30.0
_BENCH = Path(__file__).parent


@dataclass(frozen=True)
class InjectedException:
    """An exception that rank `rank` raises when `step` steps are complete."""

    rank: int
    step: int


@dataclass(frozen=True)
class SystemRun:
    """A run under one of the systems. `read_steps` returns step, Unix time and loss of its steps so far, in order.

    `raised`: file that exists from the moment of an injected exception. `incidents`: the file in which it records its
    recoveries, if it does. `grow`: lets a run that was started on one rank continue on two.
    """

    process: TrainingProcess
    read_steps: Callable[[], list[dict[str, Any]]]
    raised: Path
    incidents: Path
    grow: Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """A system that the platform is compared with.

    `command`: arguments of Python after JOB and DIRECTORY are put in for these words. `requirement`: what pip installs;
    `module`: what it must then be able to import. `growing_command`: the same on one rank, which can grow; () if it
    cannot. `grows_by_command`: it grows when the command is started once more, else when GROW_FILE appears.
    """

    command: tuple[str, ...]
    requirement: str
    module: str
    environment: Mapping[str, str]
    growing_command: tuple[str, ...] = ()
    grows_by_command: bool = False


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=3", f"--nproc-per-node={WORKERS}")
# Port 0 is not possible: the second one must know it.
_ELASTIC_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:PORT", "--rdzv-id=growth"),
)
_RESTART = (restart_baseline.__file__, "JOB", "DIRECTORY")
_RAY_SLOTS = str(max(count_usable_cpus(), WORKERS + 1))


def _launch(script: str, *words: str) -> tuple[str, ...]:
    return (str(_BENCH / script), "JOB", "DIRECTORY", "launch", str(WORKERS), *words)


PEERS: dict[str, Peer] = {
    "ray-train": Peer((*_RESTART, "ray-train", str(WORKERS), _RAY_SLOTS), "'ray[train]'", "ray.train.torch", {}),
    # By default restarted workers share a store with the previous ones. New gloo ranks sometimes read the address of a
    # dead rank from it, and then fail to connect or hang.
    "torchrun": Peer(
        (*_TORCHRUN, *_RESTART),
        "torch",
        "torch",
        {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        growing_command=(*_ELASTIC_TORCHRUN, *_RESTART),
        grows_by_command=True,
    ),
    "torchft": Peer(
        _launch("torchft_baseline.py"),
        "torchft",
        "torchft",
        {},
        growing_command=_launch("torchft_baseline.py", "late"),
    ),
    "nvrx": Peer(_launch("nvrx_baseline.py", "0"), "nvidia-resiliency-ext", "nvidia_resiliency_ext.inprocess", {}),
    f"nvrx{SPARE}": Peer(
        _launch("nvrx_baseline.py", "1"), "nvidia-resiliency-ext", "nvidia_resiliency_ext.inprocess", {}
    ),
    "torch-reconfigure": Peer(
        _launch("reconfigure_baseline.py"), "'torch>=2.14'", "raytrain_hpc.bench.reconfigure_baseline", {}
    ),
}
DEFAULT_PEERS = ("ray-train", "torchrun")


def list_systems(peers: Sequence[str]) -> list[str]:
    """Return the platform and the peers, each also with a spare where it has such a thing."""
    with_spares = [name for peer in peers for name in (peer, f"{peer}{SPARE}") if name in PEERS]
    return [PLATFORM, f"{PLATFORM}{SPARE}", *with_spares]


def check_systems(peers: Sequence[str], pythons: Mapping[str, str]) -> None:
    """Check that each peer can be imported by its interpreter.

    Raises:
        MissingDependencyError: One is not installed, or its version lacks what the comparison uses.
    """
    for peer in peers:
        python = pythons.get(peer, sys.executable)
        command = [python, "-c", f"import {PEERS[peer].module}"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = (finished.stderr.strip().splitlines() or ["no output"])[-1]
            raise MissingDependencyError(
                f"--against {peer}: {python} cannot import it ({reason}); run `pip install {PEERS[peer].requirement}`, "
                f"or name another interpreter by --python {peer}=PATH"
            )


def can_grow(name: str) -> bool:
    """Return whether a system can continue a run of one rank on two."""
    return name == PLATFORM or (name in PEERS and bool(PEERS[name].growing_command))


@contextmanager
def start_system(
    name: str, python: str, exception: InjectedException | None, *, grows: bool = False
) -> Iterator[SystemRun]:
    """Start a run under a system, which is killed when the context exits.

    `exception`: the one to inject, if any. `grows`: start it on one rank.
    """
    if name.startswith(PLATFORM):
        spares = ("cluster.spares=1",) if name.endswith(SPARE) else ()
        with _start_platform(spares, exception, 1 if grows else WORKERS) as system:
            yield system
        return
    peer = PEERS[name]
    with scratch_dir() as directory:
        _, config = make_settings(OVERRIDES, WORKERS, STEPS)
        job_file = directory / "job.json"
        job_file.write_text(json.dumps(build_baseline_job(config, WORKERS, directory).to_json()))
        if exception is not None:
            request_exception(directory, exception.rank, exception.step)
        places = {"JOB": str(job_file), "DIRECTORY": str(directory)}
        words = peer.growing_command if grows else peer.command
        command = [python, *(places.get(word, word) for word in words)]
        command = [word.replace("PORT", str(_find_free_port())) for word in command]
        environment = {"RAY_TMPDIR": str(directory), **peer.environment}
        read_pids = lambda: [int(path.read_text() or 0) for path in sorted(directory.glob("[0-9].pid"))]  # noqa: E731

        with ExitStack() as stack:

            def grow() -> None:
                if peer.grows_by_command:
                    second = launch_training(name, command, environment, directory / "output-2", list, list)
                    stack.enter_context(second)
                (directory / GROW_FILE).touch()

            process = stack.enter_context(
                _start(name, command, environment, directory, directory / STEPS_FILE, read_pids)
            )
            yield _to_system_run(process, directory / STEPS_FILE, directory / RAISED_FILE, grow)


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def _start_platform(words: Sequence[str], exception: InjectedException | None, num_workers: int) -> Iterator[SystemRun]:
    with scratch_dir() as directory:
        run_dir = directory / "run"
        # With the bits of one rank on any number of ranks, which is what the platform promises:
        overrides, config = make_settings((*OVERRIDES, "train.deterministic=elastic", *words), WORKERS, STEPS)
        micro_batch_size = config.train.global_batch_size // WORKERS  # one microbatch per rank, also after growth
        overrides += [f"cluster.workers={num_workers}", f"train.micro_batch_size={micro_batch_size}"]
        command = [sys.executable, "-m", "raytrain_hpc", "train", *overrides, f"run.dir={run_dir}"]
        command += ["cluster.address=local"]
        if exception is not None:
            fault = f"{{kind: exception, rank: {exception.rank}, step: {exception.step + 1}}}"
            command += [f"fault.inject=[{fault}]"]
        workers_file, metrics = run_dir / "workers.json", run_dir / "metrics.jsonl"

        def read_pids() -> list[int]:
            if not workers_file.exists():
                return []
            return [worker["pid"] for worker in json.loads(workers_file.read_text())["workers"]]

        environment = {"RAY_TMPDIR": str(directory)}
        with _start(PLATFORM, command, environment, directory, metrics, read_pids) as process:
            grow = partial(send_resize, Mailbox(run_dir), WORKERS, RESIZE_TIMEOUT_S)
            yield _to_system_run(process, metrics, run_dir / "injected" / "0", grow)


@contextmanager
def _start(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    directory: Path,
    steps: Path,
    read_pids: Callable[[], list[int]],
) -> Iterator[TrainingProcess]:
    read_commit_times = lambda: [line["time/unix"] for line in read_jsonl(steps)]  # noqa: E731
    with launch_training(name, command, environment, directory / "output", read_commit_times, read_pids) as process:
        yield process


def _to_system_run(process: TrainingProcess, steps: Path, raised: Path, grow: Callable[[], object]) -> SystemRun:
    return SystemRun(process, lambda: read_jsonl(steps), raised, steps.with_name("incidents.jsonl"), grow)
