"""Datasets that need no download: the standard library's own source text, and random tokens."""

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
    """The dataset of this Python's standard library, as bytes; prepared on the first call, then found in the cache.

    `cache_dir`: where it is kept, else raytrain_hpc.cache_dir. The
    files are put in an order that is shuffled, always the same way, so that the validation split at the end is text
    like the training text and not whatever comes last in the alphabet. Several processes may call this at once.
    DataError where this Python has no source files, or the cache cannot be written.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = _find_stdlib_files(root)
    if not files:
        raise DataError(f"{root}: this Python comes without source files; prepare a dataset and set data.path")
    listing = "\n".join(f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in files)
    identity = hashlib.sha256(listing.encode()).hexdigest()[:12]
    out = (cache_dir or get_cache_dir()) / f"stdlib{VERSION}-{platform.python_version()}-{identity}"
    if not (out / MANIFEST_FILE).exists():
        shuffle = Permutation(len(files), _SHUFFLE_KEY)
        shuffled = [files[i] for i in shuffle(np.arange(len(files)))]
        prepare(shuffled, out, tokenizer="byte", val_fraction=0.1, engine="local", workers=1)
    return out


def _find_stdlib_files(root: Path) -> list[Path]:
    """The source files of the standard library that hold text, sorted by relative path."""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _EXCLUDED_DIRS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    kept = [path for path in found if path.is_file() and path.stat().st_size]
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


class SyntheticTokens:
    """Random tokens without a file: token p is word p of the splitmix64 stream of `seed`, modulo the vocabulary."""

    def __init__(self, vocab_size: int, seed: int, num_tokens: int = 1 << 40):
        """`num_tokens` is nominal: nothing of that size exists. DataError for a vocabulary below 1."""
        if vocab_size < 1:
            raise DataError(f"vocab_size={vocab_size}: synthetic tokens need at least 1")
        self.vocab_size, self.seed, self._num_tokens = vocab_size, seed, num_tokens
        self._key = derive_key("synthetic", seed)
        self.num_documents, self.masked = 0, False

    @property
    def num_tokens(self) -> int:
        """The nominal length."""
        return self._num_tokens

    @property
    def dataset_hash(self) -> str:
        """Identity of the tokens."""
        return hashlib.sha256(f"synthetic/{self.vocab_size}/{self.seed}/{self._num_tokens}".encode()).hexdigest()

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Windows [start, start + length), int64[n, length], for starts int64[n]. DataError outside the array."""
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (int(starts.min()) < 0 or int(starts.max()) + length > self._num_tokens):
            raise DataError(f"window of {length} tokens at {starts.max()} leaves the {self._num_tokens} tokens")
        words = generate_words(self._key, starts[:, None] + np.arange(length))
        return (words % np.uint64(self.vocab_size)).astype(np.int64)

    def read_document_ids(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """One document, int64[n, length] of 0."""
        return np.zeros((len(starts), length), dtype=np.int64)

    def read_loss_mask(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
        """Every token, bool[n, length] of True."""
        return np.ones((len(starts), length), dtype=bool)

    def get_document_spans(
        self, documents: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """DataError: random tokens are no documents."""
        raise DataError("data.path=synthetic: has no documents; use data.packing=stream")
