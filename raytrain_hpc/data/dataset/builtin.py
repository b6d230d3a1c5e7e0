"""Built-in datasets that need no download: the source code of the standard library, and random tokens."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytrain_hpc.cache_dir import get_cache_dir
from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, VERSION
from raytrain_hpc.data.loader.sampler import Permutation, derive_key, generate_words
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.errors import DataError

_EXCLUDED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SHUFFLE_KEY = derive_key("stdlib files")


def prepare_stdlib_dataset(cache_dir: Path | None = None) -> Path:
    """Return the directory of the byte-level dataset of the standard library; prepare it if the cache lacks it.

    `cache_dir` overrides the default of raytrain_hpc.cache_dir. The order of the files is a fixed shuffle, so that
    the validation split at the end resembles the training text. Several processes may call this concurrently.
    Raises DataError if this Python has no source files or the cache cannot be written.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = _find_stdlib_files(root)
    if not files:
        raise DataError(f"{root}: this Python has no source files; prepare a dataset and set data.path")
    listing = "\n".join(f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in files)
    identity = hashlib.sha256(listing.encode()).hexdigest()[:12]
    out = (cache_dir or get_cache_dir()) / f"stdlib{VERSION}-{platform.python_version()}-{identity}"
    if not (out / MANIFEST_FILE).exists():
        shuffle = Permutation(len(files), _SHUFFLE_KEY)
        shuffled = [files[i] for i in shuffle(np.arange(len(files)))]
        prepare(shuffled, out, tokenizer="byte", val_fraction=0.1, engine="local", workers=1)
    return out


def _find_stdlib_files(root: Path) -> list[Path]:
    """Find the non-empty source files of the standard library, without tests, sorted by relative path."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_DIRS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    non_empty = [path for path in files if path.is_file() and path.stat().st_size]
    return sorted(non_empty, key=lambda path: path.relative_to(root).as_posix())


class SyntheticTokens:
    """Random tokens without a file: token p is word p of the splitmix64 stream keyed by `seed`, modulo vocab_size."""

    def __init__(self, vocab_size: int, seed: int, num_tokens: int = 1 << 40):
        """Describe a source of `num_tokens` tokens; none are stored. Raises DataError if `vocab_size` is below 1."""
        if vocab_size < 1:
            raise DataError(f"vocab_size={vocab_size}: must be at least 1 for synthetic tokens")
        self.vocab_size, self.seed, self._num_tokens = vocab_size, seed, num_tokens
        self._key = derive_key("synthetic", seed)
        self.num_documents, self.masked = 0, False

    @property
    def num_tokens(self) -> int:
        """Nominal number of tokens."""
        return self._num_tokens

    @property
    def dataset_hash(self) -> str:
        """Hash that identifies the tokens."""
        return hashlib.sha256(f"synthetic/{self.vocab_size}/{self.seed}/{self._num_tokens}".encode()).hexdigest()

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Read windows [start, start + length), int64[n, length], for starts int64[n]. Raises DataError if outside."""
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (int(starts.min()) < 0 or int(starts.max()) + length > self._num_tokens):
            raise DataError(f"window of {length} tokens at {starts.max()} exceeds the {self._num_tokens} tokens")
        words = generate_words(self._key, starts[:, None] + np.arange(length))
        return (words % np.uint64(self.vocab_size)).astype(np.int64)

    def read_document_ids(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return zeros int64[n, length]: all tokens belong to one document."""
        return np.zeros((len(starts), length), dtype=np.int64)

    def read_loss_mask(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
        """Return ones, bool[n, length]: every token counts as a target."""
        return np.ones((len(starts), length), dtype=bool)

    def get_document_spans(
        self, documents: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Raise DataError: random tokens have no document boundaries."""
        raise DataError("data.path=synthetic: has no documents; use data.packing=stream")
