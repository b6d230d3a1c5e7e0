"""Text to a dataset directory: plan pieces, encode each into a chunk, in parallel, then assemble shards in order.

The inputs are one stream of documents, file after file and row after row. Its first part is the training split, the
rest the validation split. The directory appears complete or not at all, and holds the same bytes whoever worked on
the pieces, however many there were, and however often they were interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from raytrain_hpc.data.dataset.manifest import MANIFEST, VERSION, Input, Manifest, load_manifest, verify
from raytrain_hpc.data.dataset.token_shards import token_dtype
from raytrain_hpc.data.preprocess.assemble import Assembly, split_sizes
from raytrain_hpc.data.preprocess.chunks import CharactersTask, EncodeTask, publish_json, read_reports, report_from_json
from raytrain_hpc.data.preprocess.executors import Executor, ProcessPool, ThisProcess, WorkersLost, cpus
from raytrain_hpc.data.preprocess.input_files import Fields, InputFile, check_fields, find_files, parse_fields
from raytrain_hpc.data.preprocess.partition import Piece, checksum, file_checksums, plan_pieces
from raytrain_hpc.data.preprocess.readers import PartReader
from raytrain_hpc.data.preprocess.staging import Staging
from raytrain_hpc.data.tokenizer.base import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    TokenizerSpec,
    parse_spec,
    tokenizer_from_json,
)
from raytrain_hpc.data.tokenizer.bpe import load_tokenizer, train_tokenizer
from raytrain_hpc.errors import DataError

ENGINES = ("auto", "local", "ray")
RAY_FROM_BYTES = 64 << 20
_SAMPLE_CHARS, _SAMPLE_PIECES = 16 << 20, 64
# Below this, starting processes takes longer than the work. Bytes and characters are encoded at hundreds of MB/s.
_ONE_PROCESS_BYTES = {"byte": 256 << 20, "char": 128 << 20}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Job:
    """What was asked for, and what was found. `given`: a tokenizer that is there before any input is read."""

    files: Sequence[InputFile]
    pieces: Sequence[Piece]
    fields: Fields
    spec: TokenizerSpec
    given: Tokenizer | None
    val_fraction: float
    shard_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as the manifest has them: whatever the tokens depend on beside inputs and tokenizer."""
        settings: dict[str, Any] = {
            "tokenizer": self.spec.identity,
            "val_fraction": self.val_fraction,
            "shard_tokens": self.shard_tokens,
        }
        if any(file.has_fields for file in self.files):
            settings["fields"] = list(self.fields.names)
        return settings

    @property
    def plan(self) -> dict[str, Any]:
        """What a staging directory belongs to."""
        files = [(str(file.path), file.name, file.bytes, file.mtime_ns) for file in self.files]
        tokenizer = None if self.given is None else self.given.to_json()
        sizes = [piece.bytes for piece in self.pieces]
        return {
            "version": VERSION,
            "files": files,
            "pieces": sizes,
            "settings": self.settings,
            "tokenizer": tokenizer,
        }


def prepare(
    inputs: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: str = "byte",
    val_fraction: float = 0.1,
    shard_tokens: int = 1 << 26,
    field: str | None = None,
    prompt_field: str | None = None,
    response_field: str | None = None,
    engine: str = "auto",
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a dataset at `out` from files, folders (all files below one, sorted by relative path) and patterns.

    A text file is a document; so is `field` ("text") of every row of .jsonl and .parquet files, or `prompt_field` and
    `response_field`, of which only responses count as targets. .gz and .zst are decompressed. `val_fraction` of the
    tokens, at the end of the stream, become the validation split.

    `engine` is local (`workers` processes), ray (Ray Data, on the cluster at `address`) or auto; it changes no byte.
    `progress(done, total)` counts bytes over all passes. A dataset already at `out` is kept if the same inputs and
    settings made it; anything else there is an error: nothing is ever overwritten. What was interrupted is gone on
    with by the same call. DataError for inputs, settings or a target that cannot be used, ClusterError without Ray.
    """
    spec = parse_spec(tokenizer)
    _check_settings(val_fraction, shard_tokens, engine, workers)
    fields = parse_fields(field, prompt_field, response_field)
    staging = Staging(Path(out))
    _check_target(Path(out))
    files = find_files(inputs, leave_out=[staging.out, staging.path])
    check_fields(files, fields, named=field is not None)
    given = load_tokenizer(spec) if spec.from_file else None
    job = _Job(files, plan_pieces(files), fields, spec, given, val_fraction, shard_tokens)
    present = _prepared_before(Path(out), job)
    if present is not None and not staging.path.exists():  # else what is left over is removed below
        return present
    executor = _choose_executor(engine, workers, address, job)
    try:
        with staging.locked():
            return _prepare_locked(Path(out), job, staging, executor, progress)
    except WorkersLost as error:
        raise DataError(f"{out}: {error}; the same command goes on with what is finished") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{out}: cannot be written ({reason}); the same command goes on with what is finished, in {staging.path}"
        ) from error


def _prepare_locked(out: Path, job: _Job, staging: Staging, executor: Executor, progress: Progress | None) -> Manifest:
    present = _prepared_before(out, job)
    if present is not None:  # whoever had the lock before wrote it
        staging.remove()
        return present
    try:
        staging.begin(job.plan)
        return _build(job, staging, executor, progress)
    except DataError:  # something must be changed first: nothing of this can be gone on with
        staging.remove()
        raise


def _build(job: _Job, staging: Staging, executor: Executor, progress: Progress | None) -> Manifest:
    survey = job.spec.kind == "char"
    tick = _Meter((3 if survey else 2) * sum(file.bytes for file in job.files), progress)
    tokenizer = _tokenizer(job, staging, executor, tick)
    dtype = token_dtype(tokenizer.vocab_size)
    reports = read_reports(staging.chunks)
    for index in reports:
        tick(job.pieces[index].bytes)
    encode = EncodeTask(staging.chunks, staging.tokenizer, job.fields, dtype)
    missing = [piece for piece in job.pieces if piece.index not in reports]
    for piece, found in executor.run(encode, missing):
        reports[piece.index] = report_from_json(found)
        tick(piece.bytes)
    ordered = [reports[piece.index] for piece in job.pieces]
    sizes = split_sizes(sum(report.tokens for report in ordered), job.val_fraction)
    assembly = Assembly(staging, sizes, dtype, job.shard_tokens, masked=job.fields.pairs)
    splits = assembly.run(ordered, lambda index: tick(job.pieces[index].bytes))
    manifest = Manifest(
        tokenizer=tokenizer.to_json(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        masked=job.fields.pairs,
        characters=None if isinstance(tokenizer, ByteTokenizer) else sum(report.characters for report in ordered),
        settings=job.settings,
        inputs=_inputs(job.pieces, [report.checksums for report in ordered]),
        splits=splits,
        empty_documents=sum(report.empty for report in ordered),
    )
    staging.publish(manifest)
    return manifest


def _tokenizer(job: _Job, staging: Staging, executor: Executor, tick: Callable[[int], None]) -> Tokenizer:
    """The tokenizer that was asked for, stored where those who encode find it. Made from the input where needed."""
    stored = staging.read_tokenizer()
    if stored is not None:
        if job.spec.kind == "char":
            tick(sum(piece.bytes for piece in job.pieces))
        return tokenizer_from_json(stored)
    built: Tokenizer
    if job.given is not None:
        built = job.given
    elif job.spec.kind == "byte":
        built = ByteTokenizer()
    elif job.spec.kind == "char":
        seen: set[str] = set()
        for piece, characters in executor.run(CharactersTask(job.fields), job.pieces):
            seen.update(characters)
            tick(piece.bytes)
        built = CharTokenizer(seen)
    else:
        built = train_tokenizer(_sample(job.pieces, job.fields), int(job.spec.argument))
    publish_json(staging.tokenizer, built.to_json())
    return built


def _sample(pieces: Sequence[Piece], fields: Fields) -> Iterator[str]:
    """At most 16 Mi characters: the beginnings of at most 64 pieces, spread evenly over the input."""
    chosen = min(len(pieces), _SAMPLE_PIECES)
    for index in range(chosen):
        left = _SAMPLE_CHARS // chosen
        for text in _texts(pieces[index * len(pieces) // chosen], fields):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _texts(piece: Piece, fields: Fields) -> Iterator[str]:
    for part in piece.parts:
        yield from (stretch.text for stretch in PartReader(part, fields).stretches())


def _check_settings(val_fraction: float, shard_tokens: int, engine: str, workers: int | None) -> None:
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction}: must be at least 0 and below 1")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens}: must be at least 1")
    if engine not in ENGINES:
        raise DataError(f"engine={engine!r}: must be {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers}: must be at least 1")


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; choose another directory to write to")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise DataError(f"{out}: holds other files and is no dataset; choose another directory to write to")


def _choose_executor(engine: str, workers: int | None, address: str | None, job: _Job) -> Executor:
    total = sum(file.bytes for file in job.files)
    address = address or os.environ.get("RAY_ADDRESS")
    if engine == "ray" or (engine == "auto" and (address or total > RAY_FROM_BYTES)):
        from raytrain_hpc.data.preprocess.ray_executor import RayData  # Ray takes a second to import

        return RayData(address, workers)
    if workers is None:
        workers = 1 if total < _ONE_PROCESS_BYTES.get(job.spec.kind, 8 << 20) else cpus()
    return ThisProcess() if min(workers, len(job.pieces)) == 1 else ProcessPool(workers)


def _prepared_before(out: Path, job: _Job) -> Manifest | None:
    """The manifest of the dataset at `out` if it is the one asked for; None if nothing is there; else DataError.

    A tokenizer made from the input is the same if the input is.
    """
    if not (out / MANIFEST).exists():
        return None
    manifest = load_manifest(out)
    same = manifest.settings == job.settings and (job.given is None or manifest.tokenizer == job.given.to_json())
    same = same and [(i.name, i.bytes) for i in manifest.inputs] == [(f.name, f.bytes) for f in job.files]
    if not same or manifest.inputs != _checksummed(job.pieces):
        raise DataError(f"{out}: holds a dataset of other inputs or settings; delete it or choose another directory")
    verify(out, manifest, limit_bytes=0)
    return manifest


def _checksummed(pieces: Sequence[Piece]) -> tuple[Input, ...]:
    """The inputs as they are now."""
    with ThreadPoolExecutor(cpus()) as threads:
        checksums = threads.map(checksum, [part for piece in pieces for part in piece.parts])
        return _inputs(pieces, [tuple(islice(checksums, len(piece.parts))) for piece in pieces])


def _inputs(pieces: Sequence[Piece], checksums: Iterable[Sequence[str]]) -> tuple[Input, ...]:
    files = file_checksums(zip(pieces, checksums, strict=True))
    return tuple(Input(file.name, file.bytes, digest) for file, digest in files)


class _Meter:
    """Adds up bytes and passes them on to a progress callback."""

    def __init__(self, total: int, progress: Progress | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)
