"""`raytrain-hpc run SCRIPT [CONFIG words] -- ARGS`: which words the script gets, and which ones configure the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_hpc.cli.main import main
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import Script
from raytrain_hpc.training.factory import build_rank_trainer
from tests.warm_pool import make_worker_spec

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
    settings = [f"run.dir={tmp_path}/run", "train.steps=2", "train.global_batch_size=4", "cluster.workers=0"]
    settings += ["logging.tensorboard=false", "lr_scheduler.warmup_steps=1"]
    main(["run", str(script), *settings, *words], standalone_mode=False)
    assert json.loads(out.read_text()) == [str(script), *expected]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_words_of_the_script_before_the_dashes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "script.py", "--batch-size", "8"])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and line.startswith("error: --batch-size: ")


def test_code_after_the_loop_is_not_run_after_a_stop_between_generations(tmp_path: Path) -> None:
    """A generation that only saves, or that ends before train.steps, is not the end of the script."""
    script, out = tmp_path / "script.py", tmp_path / "argv.json"
    script.write_text(SCRIPT.replace("OUT", repr(str(out))).replace("steps(2)", "steps(4)") + "1 / 0\n")
    settings = ["train.steps=4", "train.global_batch_size=4", "data.path=synthetic", "model.vocab_size=2"]
    config = load_config(None, [f"run.dir={tmp_path}/run", *settings])
    spec = replace(make_worker_spec(config, 1, steps_to=2), custom=Script(str(script)))
    channel = ControlChannel()
    trainer = build_rank_trainer(spec, 0, torch.device("cpu"), None, channel)
    assert trainer.run(spec.start_step, spec.end_step) == "done"
    assert [record["metrics"]["step"] for record in channel.drain() if record["type"] == "step"] == [1, 2]
