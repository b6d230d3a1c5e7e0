"""Peers that a benchmark can be run against: their names on the command line, and whether they can be imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from raytrain_hpc.bench.torch_baseline import TORCHTITAN, TRANSFORMERS
from raytrain_hpc.errors import MissingDependencyError, RunFailedError

NANOGPT = "nanogpt"
LIBRARIES = (TRANSFORMERS, TORCHTITAN)
RECOVERY_PEERS = ("ray-train", "torchrun", "torchft", "nvrx", "torch-reconfigure")  # see `recovery_systems`
# Words of --against that each benchmark knows.
KNOWN_PEERS = {"step": (f"{NANOGPT}=DIR", *LIBRARIES), "device": LIBRARIES, "recovery": RECOVERY_PEERS}
_MODULES = {TRANSFORMERS: "transformers_baseline", TORCHTITAN: "torchtitan_baseline"}
_REQUIREMENTS = {TRANSFORMERS: "transformers", TORCHTITAN: "'torchtitan>=0.3,<0.4' triton"}


def parse_peers(benchmark: str, words: Sequence[str]) -> dict[str, Path | None]:
    """Return the peers of `--against`, repeated or separated by commas: name -> clone of its repository, or None.

    Raises:
        ValueError: A word cannot be used with this benchmark.
    """
    known = KNOWN_PEERS.get(benchmark, ())
    peers: dict[str, Path | None] = {}
    for word in (word for words_at_once in words for word in words_at_once.split(",")):
        name, separator, directory = word.partition("=")
        pattern = f"{name}=DIR" if separator and directory else name
        if pattern not in known:
            offer = f"it takes {', '.join(known)}" if known else f"only {_list_benchmarks()} compare with other systems"
            raise ValueError(f"--against {word}: `bench {benchmark}` cannot use that; {offer}")
        peers[name] = Path(directory) if directory else None
    return peers


def parse_pythons(words: Sequence[str], peers: Iterable[str]) -> dict[str, str]:
    """Return the interpreters of `--python PEER=PATH`, repeated: name -> path.

    Raises:
        ValueError: A word has another form, or names no peer of this run.
    """
    pythons, peers = {}, list(peers)
    for word in words:
        name, separator, path = word.partition("=")
        if not separator or name not in peers:
            raise ValueError(f"--python {word}: expected PEER=PATH with a peer of --against ({', '.join(peers)})")
        if shutil.which(path) is None:
            raise ValueError(f"--python {word}: {path} is no program")
        pythons[name] = path
    return pythons


def _list_benchmarks() -> str:
    *others, last = (f"`bench {name}`" for name in KNOWN_PEERS)
    return f"{', '.join(others)} and {last}"


def check_peers(libraries: Iterable[str]) -> None:
    """Check that the libraries can be imported, in processes of their own: an import may change torch's settings.

    Raises:
        MissingDependencyError: One is not installed, or its version has not the names that the comparison uses.
        RunFailedError: Its import fails in another way.
    """
    for library in libraries:
        command = [sys.executable, "-c", f"import raytrain_hpc.bench.{_MODULES[library]}"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = (finished.stderr.strip().splitlines() or ["no output"])[-1]
            if not reason.startswith(("ImportError", "ModuleNotFoundError")):
                raise RunFailedError(f"--against {library}: its import failed: {reason}")
            remedy = f"run `pip install {_REQUIREMENTS[library]}`"
            raise MissingDependencyError(f"--against {library}: cannot be imported ({reason}); {remedy}")
