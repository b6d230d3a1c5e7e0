"""Files under cluster/, checked by the tools for their formats."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from raytrain_hpc.config.loader import load_config

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("cluster/*.sh"), *ROOT.glob("examples/*.sh")])
INSTRUCTIONS = {"ARG", "FROM", "ENV", "COPY", "RUN", "USER", "WORKDIR", "CMD"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_passes(script: Path) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    process = subprocess.run([str(checker), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stdout


def load_rayjob() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster/kuberay.yaml").read_text())
    return document


def load_groups() -> list[dict[str, Any]]:
    cluster = load_rayjob()["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_rayjob_pods_are_valid() -> None:
    """Validate the pod templates, which KubeRay passes to Kubernetes. Its own schema is not available here."""
    for group in load_groups():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)
        mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod | {"spec": {"container": []}}, "1.30", strict=True)


def test_rayjob_matches_ray_and_the_command_line() -> None:
    job = load_rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    known_keys = {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
    assert job["spec"].keys() <= known_keys
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray[default]=={version.rpartition('.')[0]}.*" in (ROOT / "cluster/Containerfile").read_text()
    oldest = re.search(r'"ray\[.*\]>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and tuple(map(int, version.split("."))) >= tuple(map(int, oldest[1].split(".")))
    program, verb, config, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("raytrain-hpc", "train")
    loaded = load_config(str(ROOT / Path(config).relative_to("/opt/raytrain_hpc")), words)
    assert loaded.run.dir.startswith("/shared/")
    options = subprocess.run(
        [str(Path(sys.executable).with_name("ray")), "start", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for group in load_groups():
        assert all(f"--{name}" in options for name in group["rayStartParams"])


def test_containerfile_copies_existing_files() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "cluster/Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
