"""Fields of KubeRay's API ray.io/v1 that the manifests may use, from its API reference (KubeRay 1.3 and later)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

INTEGER, TEXT, FLAG, TEXTS, ANY = int, str, bool, "texts", "any"
# Type -> its fields -> the type of the field: one of this table, or a list of one; `any` for types of Kubernetes.
FIELDS: dict[str, dict[str, Any]] = {
    "RayJobSpec": {
        "entrypoint": TEXT,
        "entrypointNumCpus": INTEGER,
        "runtimeEnvYAML": TEXT,
        "submissionMode": TEXT,
        "backoffLimit": INTEGER,
        "activeDeadlineSeconds": INTEGER,
        "shutdownAfterJobFinishes": FLAG,
        "ttlSecondsAfterFinished": INTEGER,
        "suspend": FLAG,
        "clusterSelector": TEXTS,
        "rayClusterSpec": "RayClusterSpec",
    },
    "RayClusterSpec": {
        "rayVersion": TEXT,
        "enableInTreeAutoscaling": FLAG,
        "autoscalerOptions": "AutoscalerOptions",
        "gcsFaultToleranceOptions": "GcsFaultToleranceOptions",
        "headGroupSpec": "HeadGroupSpec",
        "workerGroupSpecs": ["WorkerGroupSpec"],
        "suspend": FLAG,
    },
    "AutoscalerOptions": {
        "upscalingMode": TEXT,
        "idleTimeoutSeconds": INTEGER,
        "image": TEXT,
        "resources": ANY,
        "env": ANY,
        "envFrom": ANY,
    },
    "GcsFaultToleranceOptions": {"redisAddress": TEXT, "externalStorageNamespace": TEXT, "redisPassword": ANY},
    "HeadGroupSpec": {"serviceType": TEXT, "rayStartParams": TEXTS, "template": ANY},
    "WorkerGroupSpec": {
        "groupName": TEXT,
        "replicas": INTEGER,
        "minReplicas": INTEGER,
        "maxReplicas": INTEGER,
        "idleTimeoutSeconds": INTEGER,
        "numOfHosts": INTEGER,
        "rayStartParams": TEXTS,
        "scaleStrategy": ANY,
        "template": ANY,
    },
}


def find_field_problems(value: Any, kind: Any, path: str = "spec") -> Iterator[str]:
    """Yield a line for every field that KubeRay does not document, or whose value has another type."""
    if kind == ANY:
        return
    if isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{path} is not a list"
            return
        for number, item in enumerate(value):
            yield from find_field_problems(item, kind[0], f"{path}[{number}]")
    elif kind == TEXTS:
        if not isinstance(value, dict) or not all(type(item) is str for pair in value.items() for item in pair):
            yield f"{path} is not a mapping from text to text"
    elif isinstance(kind, str):
        for key, item in value.items():
            if key in FIELDS[kind]:
                yield from find_field_problems(item, FIELDS[kind][key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is not a field of {kind}"
    elif type(value) is not kind:
        yield f"{path}={value!r} is not of type {kind.__name__}"
