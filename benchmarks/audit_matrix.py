"""Table of the faults that audits find: surface, by layout, each with several bits.

    python benchmarks/audit_matrix.py

Runs the tests that flip one bit on a surface in an audited step. A flip counts if it was found, if the rank and what
went wrong were named right, and, where no rank has to be replaced, if the state after the last step has the same bits
as without it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

TESTS = ["tests/training/test_step_audits.py", "tests/training/test_state_audits.py"]
SELECTION = "transient_fault or state_that_changes_in_memory"
CASE = re.compile(r"\[(?P<layout>.+)-(?P<surface>[a-z_]+)-\d+\]$")
REPLACED = {"bitflip_weight": "weight", "bitflip_moment": "moment", "bitflip": "updated weight"}  # the rank is


def main() -> None:
    """Run the tests and print the table: of each layout and surface, how many flips of how many are right."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        options = ["--extended", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", "-k", SELECTION]
        subprocess.run([sys.executable, "-m", "pytest", *TESTS, *options], stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(results).iter("testcase"))
    right, total = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
    layouts, surfaces = dict[str, None](), dict[str, None]()
    for case in cases:
        if (match := CASE.search(case.attrib["name"])) is None:
            continue
        place = layout, surface = match["layout"], REPLACED.get(match["surface"], match["surface"])
        layouts[layout], surfaces[surface] = None, None
        total[place] += 1
        right[place] += len(case) == 0  # no failure, error or skip
    print("| layout | " + " | ".join(surfaces) + " |\n|" + " --- |" * (len(surfaces) + 1))
    for layout in layouts:
        cells = [f"{right[layout, s]} of {total[layout, s]}" if total[layout, s] else "-" for s in surfaces]
        print(f"| {layout} | {' | '.join(cells)} |")
    print(f"\n{sum(right.values())} of {sum(total.values())} flips")


if __name__ == "__main__":
    main()
