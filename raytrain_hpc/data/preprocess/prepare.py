"""Dataset preparation: plan partitions, encode each into a chunk in parallel, then assemble shards in order.

The inputs form one stream of documents, file after file and row after row. Its beginning is the training split, the
rest the validation split. The dataset directory appears atomically. Its bytes do not depend on executor, number of
workers or interruptions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from raytrain_hpc.cpu_limits import count_usable_cpus
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
    check_main_guard,
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
)
from raytrain_hpc.data.tokenizer.bpe import train_tokenizer
from raytrain_hpc.data.tokenizer.registry import load_tokenizer, tokenizer_from_json
from raytrain_hpc.errors import DataError

ENGINES = ("auto", "local", "ray")
RAY_MIN_BYTES = 64 << 20
_SAMPLE_CHARS, _SAMPLE_PARTITIONS = 16 << 20, 64
# Below this size, starting processes takes longer than encoding. Bytes and characters encode at hundreds of MB/s.
_SINGLE_PROCESS_MAX_BYTES = {"byte": 256 << 20, "char": 128 << 20}
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class _PrepareJob:
    """Settings and inputs of one preparation. `file_tokenizer`: tokenizer loaded from a file, if one was given."""

    files: Sequence[InputFile]
    partitions: Sequence[InputPartition]
    fields: TextFields
    spec: TokenizerSpec
    file_tokenizer: Tokenizer | None
    val_fraction: float
    shard_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings recorded in the manifest: all that determine the tokens besides inputs and tokenizer."""
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
        """Identity of a staging directory, as JSON values."""
        files = [(str(file.path), file.name, file.nbytes, file.mtime_ns) for file in self.files]
        tokenizer = None if self.file_tokenizer is None else self.file_tokenizer.to_json()
        sizes = [partition.nbytes for partition in self.partitions]
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
    """Write a dataset to `out` from files, folders (searched recursively, sorted by relative path) and patterns.

    A text file is one document. In .jsonl and .parquet files, each row is a document: its `field` (default "text"),
    or its `prompt_field` and `response_field`, of which only responses count as targets. .gz and .zst are
    decompressed; binary files (with NUL bytes) are refused. The last `val_fraction` of the tokens becomes the
    validation split.

    `engine` is local (`workers` processes), ray (Ray Data, on the cluster at `address`) or auto; it does not affect
    the output. `progress(done, total)` counts bytes over all passes. An existing dataset at `out` is returned if it
    has the same inputs and settings; nothing is ever overwritten. An interrupted preparation is resumed by the same
    call. Raises DataError for unusable inputs, settings or target, and ClusterError if Ray is unavailable.
    """
    check_main_guard("prepare")
    spec = parse_tokenizer_spec(tokenizer)
    _check_settings(val_fraction, shard_tokens, engine, workers)
    fields = parse_fields(field, prompt_field, response_field)
    staging = StagingDirectory(Path(out))
    _check_target(staging.out)
    files = find_input_files(inputs, exclude=[staging.out, staging.path])
    check_fields(files, fields, is_explicit=field is not None)
    file_tokenizer = load_tokenizer(spec) if spec.is_from_file else None
    job = _PrepareJob(files, plan_partitions(files), fields, spec, file_tokenizer, val_fraction, shard_tokens)
    existing = _find_existing_dataset(Path(out), job)
    if existing is not None and not staging.path.exists():  # otherwise remove leftovers below
        return existing
    executor = _choose_executor(engine, workers, address, job)
    try:
        with staging.lock():
            return _prepare_locked(Path(out), job, staging, executor, progress)
    except WorkersLostError as error:
        raise DataError(f"{out}: {error}; repeat the same command to resume") from error
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{out}: cannot be written ({reason}); repeat the same command to resume from {staging.path}"
        ) from error


def _prepare_locked(
    out: Path, job: _PrepareJob, staging: StagingDirectory, executor: Executor, progress: ProgressCallback | None
) -> Manifest:
    existing = _find_existing_dataset(out, job)
    if existing is not None:  # written by the previous holder of the lock
        staging.remove()
        return existing
    try:
        staging.initialize(job.plan)
        return _build_dataset(job, staging, executor, progress)
    except DataError:  # inputs or settings must change, so the leftovers are useless
        staging.remove()
        raise


def _build_dataset(
    job: _PrepareJob, staging: StagingDirectory, executor: Executor, progress: ProgressCallback | None
) -> Manifest:
    has_vocabulary_pass = job.spec.kind == "char"
    on_bytes = _ProgressMeter((3 if has_vocabulary_pass else 2) * sum(file.nbytes for file in job.files), progress)
    tokenizer = _resolve_tokenizer(job, staging, executor, on_bytes)
    dtype = choose_token_dtype(tokenizer.vocab_size)
    reports = read_reports(staging.chunks_dir)
    for index in reports:
        on_bytes(job.partitions[index].nbytes)
    encode = EncodeTask(staging.chunks_dir, staging.tokenizer_path, job.fields, dtype)
    missing = [partition for partition in job.partitions if partition.index not in reports]
    for partition, report_data in executor.run(encode, missing):
        reports[partition.index] = report_from_json(report_data)
        on_bytes(partition.nbytes)
    chunk_reports = [reports[partition.index] for partition in job.partitions]
    sizes = compute_split_sizes(sum(report.tokens for report in chunk_reports), job.val_fraction)
    assembler = ShardAssembler(staging, sizes, dtype, job.shard_tokens, masked=job.fields.has_pairs)
    splits = assembler.run(chunk_reports, lambda index: on_bytes(job.partitions[index].nbytes))
    manifest = Manifest(
        tokenizer=tokenizer.to_json(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        masked=job.fields.has_pairs,
        characters=None if isinstance(tokenizer, ByteTokenizer) else sum(report.characters for report in chunk_reports),
        settings=job.settings,
        inputs=_build_input_records(job.partitions, [report.checksums for report in chunk_reports]),
        splits=splits,
        empty_documents=sum(report.empty for report in chunk_reports),
    )
    staging.publish(manifest)
    return manifest


def _resolve_tokenizer(
    job: _PrepareJob, staging: StagingDirectory, executor: Executor, on_bytes: Callable[[int], None]
) -> Tokenizer:
    """Load or build the tokenizer, and store it in the staging directory for the encode tasks."""
    stored_json = staging.read_tokenizer()
    if stored_json is not None:
        if job.spec.kind == "char":
            on_bytes(sum(partition.nbytes for partition in job.partitions))
        return tokenizer_from_json(stored_json)
    tokenizer: Tokenizer
    if job.file_tokenizer is not None:
        tokenizer = job.file_tokenizer
    elif job.spec.kind == "byte":
        tokenizer = ByteTokenizer()
    elif job.spec.kind == "char":
        vocabulary: set[str] = set()
        for partition, characters in executor.run(CollectCharactersTask(job.fields), job.partitions):
            vocabulary.update(characters)
            on_bytes(partition.nbytes)
        tokenizer = CharTokenizer(vocabulary)
    else:
        tokenizer = train_tokenizer(_sample_texts(job.partitions, job.fields), int(job.spec.argument))
    write_json_atomically(staging.tokenizer_path, tokenizer.to_json())
    return tokenizer


def _sample_texts(partitions: Sequence[InputPartition], fields: TextFields) -> Iterator[str]:
    """Yield at most 16 Mi characters: the beginnings of at most 64 partitions, spread evenly over the input."""
    num_sampled = min(len(partitions), _SAMPLE_PARTITIONS)
    for index in range(num_sampled):
        remaining = _SAMPLE_CHARS // num_sampled
        for text in _read_texts(partitions[index * len(partitions) // num_sampled], fields):
            yield text[:remaining]
            remaining -= len(text)
            if remaining <= 0:
                break


def _read_texts(partition: InputPartition, fields: TextFields) -> Iterator[str]:
    for file_range in partition.ranges:
        yield from (span.text for span in DocumentReader(file_range, fields).read_spans())


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
        raise DataError(f"{out}: is a file; choose another directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST_FILE).exists():
        raise DataError(f"{out}: contains other files and is not a dataset; choose another directory")
    if os.path.ismount(out) and not (out / MANIFEST_FILE).exists():
        raise DataError(
            f"{out}: is a mount point, which a finished dataset cannot replace; choose a directory below it"
        )


def _choose_executor(engine: str, workers: int | None, address: str | None, job: _PrepareJob) -> Executor:
    total_bytes = sum(file.nbytes for file in job.files)
    address = address or os.environ.get("RAY_ADDRESS")
    if engine == "ray" or (engine == "auto" and (address or total_bytes > RAY_MIN_BYTES)):
        from raytrain_hpc.data.preprocess.ray_executor import RayDataExecutor  # Ray takes a second to import

        return RayDataExecutor(address, workers)
    if workers is None:
        workers = 1 if total_bytes < _SINGLE_PROCESS_MAX_BYTES.get(job.spec.kind, 8 << 20) else count_usable_cpus()
    return SerialExecutor() if min(workers, len(job.partitions)) == 1 else MultiprocessExecutor(workers)


def _find_existing_dataset(out: Path, job: _PrepareJob) -> Manifest | None:
    """Return the manifest of the dataset at `out` if it has the same inputs and settings; None if there is none.

    A tokenizer built from the input is the same if the input is. Raises DataError if the dataset differs.
    """
    if not (out / MANIFEST_FILE).exists():
        return None
    manifest = load_manifest(out)
    matches = manifest.settings == job.settings and (
        job.file_tokenizer is None or manifest.tokenizer == job.file_tokenizer.to_json()
    )
    matches = matches and [(i.name, i.bytes) for i in manifest.inputs] == [(f.name, f.nbytes) for f in job.files]
    if not matches or manifest.inputs != _hash_inputs(job.partitions):
        raise DataError(f"{out}: contains a dataset of other inputs or settings; delete it or choose another directory")
    verify_shards(out, manifest, limit_bytes=0)
    return manifest


def _hash_inputs(partitions: Sequence[InputPartition]) -> tuple[InputRecord, ...]:
    """Hash the current inputs."""
    with ThreadPoolExecutor(count_usable_cpus()) as threads:
        checksums = threads.map(
            compute_checksum, [file_range for partition in partitions for file_range in partition.ranges]
        )
        return _build_input_records(
            partitions, [tuple(islice(checksums, len(partition.ranges))) for partition in partitions]
        )


def _build_input_records(
    partitions: Sequence[InputPartition], checksums: Iterable[Sequence[str]]
) -> tuple[InputRecord, ...]:
    files = combine_checksums(zip(partitions, checksums, strict=True))
    return tuple(InputRecord(file.name, file.nbytes, digest) for file, digest in files)


class _ProgressMeter:
    """Counter of processed bytes that reports to a progress callback."""

    def __init__(self, total: int, progress: ProgressCallback | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)
