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

from raytrain_hpc.data.dataset.manifest import (
    MANIFEST_FILE,
    VERSION,
    InputRecord,
    Manifest,
    load_manifest,
    verify_shards,
)
from raytrain_hpc.data.dataset.token_shards import choose_token_dtype
from raytrain_hpc.data.preprocess.assemble import ShardAssembler, compute_split_sizes
from raytrain_hpc.data.preprocess.chunks import (
    CollectCharactersTask,
    EncodeTask,
    read_reports,
    report_from_json,
    write_json_atomically,
)
from raytrain_hpc.data.preprocess.executors import (
    Executor,
    MultiprocessExecutor,
    SerialExecutor,
    WorkersLostError,
    count_cpus,
)
from raytrain_hpc.data.preprocess.input_files import InputFile, TextFields, check_fields, find_input_files, parse_fields
from raytrain_hpc.data.preprocess.partition import InputPartition, combine_checksums, compute_checksum, plan_partitions
from raytrain_hpc.data.preprocess.readers import DocumentReader
from raytrain_hpc.data.preprocess.staging import StagingDirectory
from raytrain_hpc.data.tokenizer.base import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    TokenizerSpec,
    parse_tokenizer_spec,
    tokenizer_from_json,
)
from raytrain_hpc.data.tokenizer.bpe import load_tokenizer, train_tokenizer
from raytrain_hpc.errors import DataError

ENGINES = ("auto", "local", "ray")
RAY_MIN_BYTES = 64 << 20
_SAMPLE_CHARS, _SAMPLE_PARTITIONS = 16 << 20, 64
# Below this, starting processes takes longer than the work. Bytes and characters are encoded at hundreds of MB/s.
_SINGLE_PROCESS_MAX_BYTES = {"byte": 256 << 20, "char": 128 << 20}
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class _PrepareJob:
    """What was asked for, and what was found. `given`: a tokenizer that is there before any input is read."""

    files: Sequence[InputFile]
    partitions: Sequence[InputPartition]
    fields: TextFields
    spec: TokenizerSpec
    file_tokenizer: Tokenizer | None
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
        files = [(str(file.path), file.name, file.nbytes, file.mtime_ns) for file in self.files]
        tokenizer = None if self.file_tokenizer is None else self.file_tokenizer.to_json()
        sizes = [piece.nbytes for piece in self.partitions]
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
    progress: ProgressCallback | None = None,
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
    spec = parse_tokenizer_spec(tokenizer)
    _check_settings(val_fraction, shard_tokens, engine, workers)
    fields = parse_fields(field, prompt_field, response_field)
    staging = StagingDirectory(Path(out))
    _check_target(Path(out))
    files = find_input_files(inputs, exclude=[staging.out, staging.path])
    check_fields(files, fields, is_explicit=field is not None)
    given = load_tokenizer(spec) if spec.is_from_file else None
    job = _PrepareJob(files, plan_partitions(files), fields, spec, given, val_fraction, shard_tokens)
    present = _find_existing_dataset(Path(out), job)
    if present is not None and not staging.path.exists():  # else what is left over is removed below
        return present
    executor = _choose_executor(engine, workers, address, job)
    try:
        with staging.lock():
            return _prepare_locked(Path(out), job, staging, executor, progress)
    except WorkersLostError as error:
        raise DataError(f"{out}: {error}; the same command goes on with what is finished") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{out}: cannot be written ({reason}); the same command goes on with what is finished, in {staging.path}"
        ) from error


def _prepare_locked(
    out: Path, job: _PrepareJob, staging: StagingDirectory, executor: Executor, progress: ProgressCallback | None
) -> Manifest:
    present = _find_existing_dataset(out, job)
    if present is not None:  # whoever had the lock before wrote it
        staging.remove()
        return present
    try:
        staging.initialize(job.plan)
        return _build_dataset(job, staging, executor, progress)
    except DataError:  # something must be changed first: nothing of this can be gone on with
        staging.remove()
        raise


def _build_dataset(
    job: _PrepareJob, staging: StagingDirectory, executor: Executor, progress: ProgressCallback | None
) -> Manifest:
    survey = job.spec.kind == "char"
    tick = _ProgressMeter((3 if survey else 2) * sum(file.nbytes for file in job.files), progress)
    tokenizer = _resolve_tokenizer(job, staging, executor, tick)
    dtype = choose_token_dtype(tokenizer.vocab_size)
    reports = read_reports(staging.chunks_dir)
    for index in reports:
        tick(job.partitions[index].nbytes)
    encode = EncodeTask(staging.chunks_dir, staging.tokenizer_path, job.fields, dtype)
    missing = [piece for piece in job.partitions if piece.index not in reports]
    for piece, found in executor.run(encode, missing):
        reports[piece.index] = report_from_json(found)
        tick(piece.nbytes)
    ordered = [reports[piece.index] for piece in job.partitions]
    sizes = compute_split_sizes(sum(report.tokens for report in ordered), job.val_fraction)
    assembly = ShardAssembler(staging, sizes, dtype, job.shard_tokens, masked=job.fields.has_pairs)
    splits = assembly.run(ordered, lambda index: tick(job.partitions[index].nbytes))
    manifest = Manifest(
        tokenizer=tokenizer.to_json(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        masked=job.fields.has_pairs,
        characters=None if isinstance(tokenizer, ByteTokenizer) else sum(report.characters for report in ordered),
        settings=job.settings,
        inputs=_build_input_records(job.partitions, [report.checksums for report in ordered]),
        splits=splits,
        empty_documents=sum(report.empty for report in ordered),
    )
    staging.publish(manifest)
    return manifest


def _resolve_tokenizer(
    job: _PrepareJob, staging: StagingDirectory, executor: Executor, on_bytes: Callable[[int], None]
) -> Tokenizer:
    """The tokenizer that was asked for, stored where those who encode find it. Made from the input where needed."""
    stored = staging.read_tokenizer()
    if stored is not None:
        if job.spec.kind == "char":
            on_bytes(sum(piece.nbytes for piece in job.partitions))
        return tokenizer_from_json(stored)
    built: Tokenizer
    if job.file_tokenizer is not None:
        built = job.file_tokenizer
    elif job.spec.kind == "byte":
        built = ByteTokenizer()
    elif job.spec.kind == "char":
        seen: set[str] = set()
        for piece, characters in executor.run(CollectCharactersTask(job.fields), job.partitions):
            seen.update(characters)
            on_bytes(piece.nbytes)
        built = CharTokenizer(seen)
    else:
        built = train_tokenizer(_sample_texts(job.partitions, job.fields), int(job.spec.argument))
    write_json_atomically(staging.tokenizer_path, built.to_json())
    return built


def _sample_texts(partitions: Sequence[InputPartition], fields: TextFields) -> Iterator[str]:
    """At most 16 Mi characters: the beginnings of at most 64 pieces, spread evenly over the input."""
    chosen = min(len(partitions), _SAMPLE_PARTITIONS)
    for index in range(chosen):
        left = _SAMPLE_CHARS // chosen
        for text in _read_texts(partitions[index * len(partitions) // chosen], fields):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _read_texts(partition: InputPartition, fields: TextFields) -> Iterator[str]:
    for part in partition.ranges:
        yield from (stretch.text for stretch in DocumentReader(part, fields).read_spans())


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
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST_FILE).exists():
        raise DataError(f"{out}: holds other files and is no dataset; choose another directory to write to")


def _choose_executor(engine: str, workers: int | None, address: str | None, job: _PrepareJob) -> Executor:
    total = sum(file.nbytes for file in job.files)
    address = address or os.environ.get("RAY_ADDRESS")
    if engine == "ray" or (engine == "auto" and (address or total > RAY_MIN_BYTES)):
        from raytrain_hpc.data.preprocess.ray_executor import RayDataExecutor  # Ray takes a second to import

        return RayDataExecutor(address, workers)
    if workers is None:
        workers = 1 if total < _SINGLE_PROCESS_MAX_BYTES.get(job.spec.kind, 8 << 20) else count_cpus()
    return SerialExecutor() if min(workers, len(job.partitions)) == 1 else MultiprocessExecutor(workers)


def _find_existing_dataset(out: Path, job: _PrepareJob) -> Manifest | None:
    """The manifest of the dataset at `out` if it is the one asked for; None if nothing is there; else DataError.

    A tokenizer made from the input is the same if the input is.
    """
    if not (out / MANIFEST_FILE).exists():
        return None
    manifest = load_manifest(out)
    same = manifest.settings == job.settings and (
        job.file_tokenizer is None or manifest.tokenizer == job.file_tokenizer.to_json()
    )
    same = same and [(i.name, i.bytes) for i in manifest.inputs] == [(f.name, f.nbytes) for f in job.files]
    if not same or manifest.inputs != _hash_inputs(job.partitions):
        raise DataError(f"{out}: holds a dataset of other inputs or settings; delete it or choose another directory")
    verify_shards(out, manifest, limit_bytes=0)
    return manifest


def _hash_inputs(partitions: Sequence[InputPartition]) -> tuple[InputRecord, ...]:
    """The inputs as they are now."""
    with ThreadPoolExecutor(count_cpus()) as threads:
        checksums = threads.map(compute_checksum, [part for piece in partitions for part in piece.ranges])
        return _build_input_records(partitions, [tuple(islice(checksums, len(piece.ranges))) for piece in partitions])


def _build_input_records(
    partitions: Sequence[InputPartition], checksums: Iterable[Sequence[str]]
) -> tuple[InputRecord, ...]:
    files = combine_checksums(zip(partitions, checksums, strict=True))
    return tuple(InputRecord(file.name, file.nbytes, digest) for file, digest in files)


class _ProgressMeter:
    """Adds up bytes and passes them on to a progress callback."""

    def __init__(self, total: int, progress: ProgressCallback | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)
