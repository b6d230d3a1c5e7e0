"""Text for benchmarks without a download: the standard library's source files, drawn at random until it is enough."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

_PART_BYTES = 32 << 20


def write_corpus(folder: Path, size: int) -> list[Path]:
    """Write at least `size` bytes of JSONL to `folder`, one source file per line; deterministic per Python version."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in root.rglob("*.py") if not path.is_relative_to(root / "site-packages"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources if path.stat().st_size]
    folder.mkdir()
    files: list[Path] = []
    num_written, rng = 0, random.Random(0)
    while num_written < size:
        files.append(folder / f"part-{len(files):04d}.jsonl")
        start = num_written
        with files[-1].open("w", encoding="utf-8") as file:
            while num_written < size and num_written - start < _PART_BYTES:
                text = rng.choice(texts)
                line = json.dumps({"text": text}) + "\n"
                file.write(line)
                num_written += len(line)
    return files
