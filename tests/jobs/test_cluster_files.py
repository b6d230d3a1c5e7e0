"""Files under cluster/, checked by the tools for their formats."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import botocore.session
import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from botocore.validate import ParamValidator

from raytrain_hpc.config.loader import load_config
from tests.docs.documents import list_program_calls
from tests.docs.test_commands import check_command
from tests.jobs.kuberay_fields import find_field_problems

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("cluster/*.sh"), *ROOT.glob("examples/*.sh")])
MANIFESTS = sorted(ROOT.glob("cluster/kuberay*.yaml"))
LAUNCHERS = sorted(set(ROOT.glob("cluster/*.yaml")) - set(MANIFESTS))
INSTRUCTIONS = {"ARG", "FROM", "ENV", "COPY", "RUN", "USER", "WORKDIR", "CMD"}
CONTAINER_CONFIGS = "/opt/raytrain_hpc/conf"
OBJECT_STORES = ("s3://", "gs://", "az://")


def get_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("script", SCRIPTS, ids=get_name)
def test_shellcheck_passes(script: Path) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    process = subprocess.run([str(checker), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stdout


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def get_cluster(path: Path) -> dict[str, Any]:
    """Return the RayClusterSpec of a RayJob or RayCluster."""
    spec: dict[str, Any] = load(path)["spec"]
    return spec.get("rayClusterSpec", spec)


def get_groups(path: Path) -> list[dict[str, Any]]:
    cluster = get_cluster(path)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def list_containers(path: Path) -> list[dict[str, Any]]:
    return [container for group in get_groups(path) for container in group["template"]["spec"]["containers"]]


def list_header_commands(path: Path) -> Iterator[str]:
    """Yield the commands of the comment at the head of a file: its indented lines, with continuations joined."""
    header = "\n".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#"))
    for line in re.sub(r" *\\\n +", " ", header).splitlines():
        if line.startswith("   "):
            yield line.strip()


@pytest.mark.parametrize("path", MANIFESTS, ids=get_name)
def test_kuberay_documents_every_field(path: Path) -> None:
    document = load(path)
    assert document["apiVersion"] == "ray.io/v1" and document["kind"] in ("RayJob", "RayCluster")
    assert not list(find_field_problems(document["spec"], f"{document['kind']}Spec"))
    for group in get_cluster(path)["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_fields_that_kuberay_does_not_document_are_found() -> None:
    wrong = {"rayVersion": 2.6, "enableInTreeAutoscaling": "true", "workerGroupSpecs": [{"minReplica": 1}]}
    wrong["headGroupSpec"] = {"rayStartParams": {"num-gpus": 0}}
    assert list(find_field_problems(wrong, "RayClusterSpec")) == [
        "spec.rayVersion=2.6 is not of type str",
        "spec.enableInTreeAutoscaling='true' is not of type bool",
        "spec.workerGroupSpecs[0].minReplica is not a field of WorkerGroupSpec",
        "spec.headGroupSpec.rayStartParams is not a mapping from text to text",
    ]


@pytest.mark.parametrize("path", MANIFESTS, ids=get_name)
def test_pods_are_valid(path: Path) -> None:
    """Validate the pod templates, which KubeRay passes to Kubernetes."""
    for group in get_groups(path):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)
        mounted = {mount["name"] for mount in pod["spec"]["containers"][0].get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod["spec"].get("volumes", ())}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod | {"spec": {"container": []}}, "1.30", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=get_name)
def test_manifests_match_ray_and_the_image(path: Path, ray_options: dict[str, set[str]]) -> None:
    version = get_cluster(path)["rayVersion"]
    assert f"ray[default]=={version.rpartition('.')[0]}.*" in (ROOT / "cluster/Containerfile").read_text()
    oldest = re.search(r'"ray\[.*\]>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and tuple(map(int, version.split("."))) >= tuple(map(int, oldest[1].split(".")))
    for group in get_groups(path):
        assert {f"--{name}" for name in group["rayStartParams"]} <= ray_options["start"]


@pytest.mark.parametrize("path", [path for path in MANIFESTS if load(path)["kind"] == "RayJob"], ids=get_name)
def test_entrypoints_are_commands_of_this_version(path: Path) -> None:
    program, verb, config, *words = shlex.split(load(path)["spec"]["entrypoint"])
    assert (program, verb) == ("raytrain-hpc", "train")
    loaded = load_config(str(ROOT / "conf" / Path(config).relative_to(CONTAINER_CONFIGS)), words)
    assert loaded.cluster.address == "auto"
    (run_dir,) = (word.removeprefix("run.dir=") for word in words if word.startswith("run.dir="))
    volumes = json.dumps(load(path)["spec"]["rayClusterSpec"])
    assert run_dir.startswith("/shared/" if "persistentVolumeClaim" in volumes else OBJECT_STORES)


AUTOSCALED = [path for path in MANIFESTS if get_cluster(path).get("enableInTreeAutoscaling")]


@pytest.mark.parametrize("path", AUTOSCALED, ids=get_name)
def test_autoscaled_clusters_share_no_volume_and_read_credentials_from_a_secret(path: Path) -> None:
    text = path.read_text()
    assert "persistentVolumeClaim" not in text
    for group in get_cluster(path)["workerGroupSpecs"]:
        assert group["minReplicas"] < group["maxReplicas"]
    for container in list_containers(path):
        assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
        assert not [variable for variable in container.get("env", ()) if variable["name"].startswith("AWS_")]
    (create,) = (command for command in list_header_commands(path) if "create secret" in command)
    assert shlex.split(create)[:5] == ["kubectl", "create", "secret", "generic", "object-store"]
    keys = set(re.findall(r"--from-literal=(\w+)=", create))
    assert keys == {"AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


@pytest.mark.parametrize("path", LAUNCHERS, ids=get_name)
def test_cluster_launcher_files_match_the_schema_of_ray(path: Path, ray_options: dict[str, set[str]]) -> None:
    (package,) = find_spec("ray").submodule_search_locations or ()  # type: ignore[union-attr]
    schema = json.loads((Path(package) / "autoscaler/ray-schema.json").read_text())
    config = load(path)
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"min_worker": 1}, schema)
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    workers = {name: kind for name, kind in types.items() if name != config["head_node_type"]}
    assert sum(kind["max_workers"] for kind in workers.values()) <= config["max_workers"]
    for command in [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]:
        words = [word for word in shlex.split(command) if not re.match(r"RAY_\w+=", word)]
        assert words[0] == "ray" and set(words[1:2]) <= ray_options.keys()
        assert {word.partition("=")[0] for word in words[2:]} <= ray_options[words[1]]


def test_instances_of_aws_match_the_schema_of_ec2() -> None:
    """The fields of node_config are passed to EC2's RunInstances."""
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for kind in load(ROOT / "cluster/aws.yaml")["available_node_types"].values():
        arguments = {**kind["node_config"], "MinCount": 1, "MaxCount": 1}
        assert not ParamValidator().validate(arguments, shape).has_errors()
        assert arguments.keys() <= shape.members.keys()
        assert ParamValidator().validate({**arguments, "InstanceMarketOptions": "spot"}, shape).has_errors()


@pytest.mark.parametrize("path", LAUNCHERS, ids=get_name)
def test_workers_of_cluster_launcher_files_are_spot_instances_and_the_head_is_not(path: Path) -> None:
    config = load(path)
    for name, kind in config["available_node_types"].items():
        assert ("spot" in json.dumps(kind["node_config"]).lower()) is (name != config["head_node_type"])


@pytest.mark.parametrize("path", [*MANIFESTS, *LAUNCHERS], ids=get_name)
def test_commands_in_headers_exist(path: Path, ray_options: dict[str, set[str]]) -> None:
    commands = list(list_header_commands(path))
    assert any(str(path.relative_to(ROOT)) in command for command in commands)
    for command in commands:
        check_command(command)
        words = shlex.split(command, comments=True)
        if words[0] == "ray":
            verb = " ".join(words[1:3]) if words[1] == "job" else words[1]
            own = words[: words.index("--")] if "--" in words else words
            assert {word for word in own if word.startswith("--")} <= ray_options[verb]
        for _, *arguments in list_program_calls(command):
            (run_dir,) = (word for word in arguments if word.startswith("run.dir="))
            assert run_dir.removeprefix("run.dir=").startswith(OBJECT_STORES)


@pytest.fixture(scope="module")
def ray_options() -> dict[str, set[str]]:
    """The options of each command of Ray's command line."""
    from ray.dashboard.modules.job.cli import job_cli_group
    from ray.scripts.scripts import cli

    commands = {**cli.commands, **{f"job {name}": command for name, command in job_cli_group.commands.items()}}
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
        if isinstance(command, click.Command)
    }


def test_containerfile_copies_existing_files() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "cluster/Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
