"""Input files: which files `prepare` reads, in which order, their formats and text fields."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytrain_hpc.errors import DataError

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
_FORMATS = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class InputFile:
    """Input file at the time of discovery. Size and modification time reveal later changes.

    `format` is text, jsonl or parquet; `compression` is gzip, zstd or "".
    """

    path: Path
    name: str
    nbytes: int
    mtime_ns: int
    format: str
    compression: str

    @property
    def has_fields(self) -> bool:
        """Whether documents are rows with named fields rather than the file itself."""
        return self.format != TEXT


@dataclass(frozen=True)
class TextFields:
    """Fields of a row that hold its text: one field, or a prompt and its response."""

    text: str = "text"
    prompt: str | None = None
    response: str | None = None

    @property
    def has_pairs(self) -> bool:
        """Whether rows are prompt-response pairs, of which only responses count as targets."""
        return self.prompt is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Fields to read, in order."""
        return (self.prompt, self.response) if self.prompt and self.response else (self.text,)


def find_input_files(inputs: Iterable[Path | str], exclude: Sequence[Path] = ()) -> list[InputFile]:
    """Find the files that `inputs` name, in the given order; files of a folder or pattern are sorted by path.

    Folders are searched without the paths below `exclude`. Empty files inside a folder are kept. Raises DataError for
    a missing or empty file, a folder or pattern without files, and if all files are empty.
    """
    files: list[InputFile] = []
    excluded = [path.resolve() for path in exclude]
    for item in inputs:
        for path in _expand_input(item):
            if path.is_dir():
                root = path.resolve()
                candidates = [(p.relative_to(path).as_posix(), p) for p in path.rglob("*") if p.is_file()]
                included = [
                    (name, p)
                    for name, p in candidates
                    if not any((root / name).is_relative_to(folder) for folder in excluded)
                ]
                if not included:
                    raise DataError(f"{path}: the folder has no files")
                files += [stat_input_file(p, name) for name, p in sorted(included)]
            else:
                files.append(stat_input_file(path, path.name))
                if not files[-1].nbytes:
                    raise DataError(f"{path}: the file is empty")
    if not sum(file.nbytes for file in files):
        raise DataError("nothing to prepare: the inputs hold no text")
    return files


def _expand_input(item: Path | str) -> Iterator[Path]:
    path = Path(item)
    if path.exists():
        yield path
    elif any(c in str(item) for c in "*?["):
        matches = sorted(glob.glob(str(item), recursive=True))
        if not matches:
            raise DataError(f"{item}: no file matches the pattern")
        # A pattern that ends in ** matches folders and the files below them: keep the files only.
        folders = [Path(match) for match in matches]
        yield from [p for p in folders if p.is_file()] or folders
    else:
        raise DataError(f"{item}: no such file or folder")


def stat_input_file(path: Path, name: str) -> InputFile:
    """Stat a file and detect its format. Raises DataError if it is unreadable or a compressed Parquet file."""
    inner = path
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    if compression:
        inner = path.with_suffix("")
    file_format = _FORMATS.get(inner.suffix.lower(), TEXT)
    if file_format == PARQUET and compression:
        raise DataError(f"{path}: Parquet compresses its own columns; decompress the file first")
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return InputFile(path.absolute(), name, stat.st_size, stat.st_mtime_ns, file_format, compression)


def check_unchanged(file: InputFile) -> None:
    """Raise DataError if the size or modification time of a file has changed since its discovery."""
    current = stat_input_file(file.path, file.name)
    if (current.nbytes, current.mtime_ns) != (file.nbytes, file.mtime_ns):
        raise DataError(f"{file.path}: changed while it was prepared; prepare again")


def parse_fields(field: str | None, prompt: str | None, response: str | None) -> TextFields:
    """Build the fields from options, None if not given. Raises DataError for half a pair or conflicting options."""
    if (prompt is None) != (response is None):
        raise DataError("prompt_field and response_field belong together; set both")
    if prompt is not None and field is not None:
        raise DataError(f"field={field}: conflicts with prompt_field and response_field; leave field out")
    if "" in (field, prompt, response):
        raise DataError("field='': must not be empty")
    return TextFields(field or "text", prompt, response)


def check_fields(files: Sequence[InputFile], fields: TextFields, is_explicit: bool) -> None:
    """Raise DataError if fields were set explicitly (`is_explicit`) for inputs without fields."""
    plain_file = next((file for file in files if not file.has_fields), None)
    if fields.has_pairs and plain_file is not None:
        raise DataError(f"{plain_file.path}: text has no fields; pairs are read from .jsonl and .parquet files only")
    if is_explicit and not any(file.has_fields for file in files):
        raise DataError(f"field={fields.text}: none of the inputs has fields; only .jsonl and .parquet files have")
