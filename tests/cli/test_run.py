"""`raytrain-hpc run SCRIPT [CONFIG words] -- ARGS`: which words the script gets, and which ones configure the run."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from raytrain_hpc.cli.main import main

SCRIPT = """
import json, sys
import torch
import raytrain_hpc as rt

with open(OUT, "w") as file:
    json.dump(sys.argv, file)
model = torch.nn.Linear(2, 1)
run = rt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(2):
    run.backward(model(run.local_batch(torch.ones(4, 2))).mean())
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--"], []),
        (["--", "--lr", "0.1", "data.path=mine", "--", "-h"], ["--lr", "0.1", "data.path=mine", "--", "-h"]),
    ],
)
def test_script_gets_the_words_after_two_dashes(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    script, out = tmp_path / "script.py", tmp_path / "argv.json"
    script.write_text(SCRIPT.replace("OUT", repr(str(out))))
    settings = [f"run.dir={tmp_path}/run", "train.steps=2", "train.global_batch=4", "cluster.workers=0"]
    settings += ["observe.tensorboard=false", "train.warmup=1"]
    main(["run", str(script), *settings, *words], standalone_mode=False)
    assert json.loads(out.read_text()) == [str(script), *expected]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_words_of_the_script_before_the_dashes_are_refused() -> None:
    with pytest.raises(click.NoSuchOption):
        main(["run", "script.py", "--lr", "0.1"], standalone_mode=False)
