"""Text for benchmarks that need no download: the standard library's source files, over and over in another order."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

_PART_BYTES = 32 << 20


def write_corpus(folder: Path, size: int) -> list[Path]:
    """At least `size` bytes of JSONL below `folder`, a source file a document; the same for the same Python."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in root.rglob("*.py") if not path.is_relative_to(root / "site-packages"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources if path.stat().st_size]
    folder.mkdir()
    files: list[Path] = []
    written, order = 0, random.Random(0)
    while written < size:
        files.append(folder / f"part-{len(files):04d}.jsonl")
        begun = written
        with files[-1].open("w", encoding="utf-8") as file:
            while written < size and written - begun < _PART_BYTES:
                text = order.choice(texts)
                line = json.dumps({"text": text}) + "\n"
                file.write(line)
                written += len(line)
    return files
