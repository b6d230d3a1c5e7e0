"""Check random combinations of features: `python -m tests.combinations SEED COUNT [FIRST]`.

Prints one line per combination that is not equal to one process, and a summary. With --table, writes the table of
docs/compatibility.md from the results that earlier calls have appended to --results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.combinations.check import check_combination, write_documents
from tests.combinations.draw import draw_combination
from tests.warm_pool import WarmPool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    pool, kinds, started = WarmPool(), Counter[str](), time.monotonic()
    dataset = tempfile.mkdtemp(prefix="documents-")
    write_documents(Path(dataset))
    for number in range(arguments.first, arguments.first + arguments.count):
        combination = draw_combination(arguments.seed, number)
        outcome = check_combination(pool, combination, dataset)
        kinds[outcome.kind] += 1
        if outcome.kind != "equal":
            print(f"{arguments.seed}/{number} {outcome.kind} {outcome.difference:.2e} {outcome.detail[-1500:]}")
            print(
                "   ", *combination.words, *(f"\n    {' '.join(e.words)}" for e in combination.executions), flush=True
            )
        if arguments.results:
            row = {"seed": arguments.seed, "number": number, "kind": outcome.kind, "difference": outcome.difference}
            row["features"] = [sorted(features) for features in combination.all_features]
            with arguments.results.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    pool.close()
    shutil.rmtree(dataset)
    print(f"seed {arguments.seed}: {dict(kinds)} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
