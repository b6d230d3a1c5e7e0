"""Which files are read, in which order, and what is in them: a function of the words on the command line."""

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
    """An input file as it was found; a change under our feet is noticed by size and time.

    `format` is text, jsonl or parquet; `compression` gzip, zstd or "".
    """

    path: Path
    name: str
    nbytes: int
    mtime_ns: int
    format: str
    compression: str

    @property
    def has_fields(self) -> bool:
        """Whether its documents are rows with named fields, and not the file itself."""
        return self.format != TEXT


@dataclass(frozen=True)
class TextFields:
    """Where the text of a row is: in one field, or in a prompt and the response to it."""

    text: str = "text"
    prompt: str | None = None
    response: str | None = None

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs, of which only responses count as targets."""
        return self.prompt is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read, in order."""
        return (self.prompt, self.response) if self.prompt and self.response else (self.text,)


def find_input_files(inputs: Iterable[Path | str], exclude: Sequence[Path] = ()) -> list[InputFile]:
    """The files that `inputs` name, in the order given; those of a folder or a pattern sorted by path.

    Nothing below `leave_out` is found in a folder. DataError for a missing or empty file, a folder or pattern without
    files, or nothing at all. Empty files inside a folder are ordinary and kept.
    """
    files: list[InputFile] = []
    hidden = [path.absolute() for path in exclude]
    for item in inputs:
        for path in _expand_input(item):
            if path.is_dir():
                below = [(p.relative_to(path).as_posix(), p) for p in path.rglob("*") if p.is_file()]
                kept = [(name, p) for name, p in below if not any(p.absolute().is_relative_to(h) for h in hidden)]
                if not kept:
                    raise DataError(f"{path}: the folder has no files")
                files += [stat_input_file(p, name) for name, p in sorted(kept)]
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
        # A pattern that ends in ** names a folder and everything below it: the files are enough.
        folders = [Path(match) for match in matches]
        yield from [p for p in folders if p.is_file()] or folders
    else:
        raise DataError(f"{item}: no such file or folder")


def stat_input_file(path: Path, name: str) -> InputFile:
    """A file as it is now. DataError where it cannot be looked at, or is compressed in a way that is not read."""
    inner = path
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    if compression:
        inner = path.with_suffix("")
    layout = _FORMATS.get(inner.suffix.lower(), TEXT)
    if layout == PARQUET and compression:
        raise DataError(f"{path}: Parquet compresses its own columns; decompress the file first")
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return InputFile(path.absolute(), name, stat.st_size, stat.st_mtime_ns, layout, compression)


def check_unchanged(file: InputFile) -> None:
    """DataError where a file is not any more what was found at the start."""
    now = stat_input_file(file.path, file.name)
    if (now.nbytes, now.mtime_ns) != (file.nbytes, file.mtime_ns):
        raise DataError(f"{file.path}: changed while it was prepared; prepare again")


def parse_fields(field: str | None, prompt: str | None, response: str | None) -> TextFields:
    """The fields that were asked for; `field` is None where nothing was. DataError for half a pair, or both kinds."""
    if (prompt is None) != (response is None):
        raise DataError("prompt_field and response_field belong together: give both")
    if prompt is not None and field is not None:
        raise DataError(f"field={field}: pairs are read from prompt_field and response_field; leave field out")
    if "" in (field, prompt, response):
        raise DataError("field='': a field needs a name")
    return TextFields(field or "text", prompt, response)


def check_fields(files: Sequence[InputFile], fields: TextFields, is_explicit: bool) -> None:
    """DataError where fields were `named` for inputs that have none."""
    without = next((file for file in files if not file.has_fields), None)
    if fields.has_pairs and without is not None:
        raise DataError(f"{without.path}: text has no fields; pairs are read from .jsonl and .parquet files only")
    if is_explicit and not any(file.has_fields for file in files):
        raise DataError(f"field={fields.text}: none of the inputs has fields; only .jsonl and .parquet files have")
