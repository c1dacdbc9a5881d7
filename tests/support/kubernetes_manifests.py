"""Kubernetes manifests checked without a cluster.

Parts that are Kubernetes' own (pods, services, config maps) are read by the official client's models, which know every
field and its type. Parts that are KubeRay's are compared with the field tables below, taken from the `ray.io/v1` types
of KubeRay 1.6 and 1.7.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from pydantic import ValidationError

TEXT_MAP = dict[str, str]

# Field → type. A string names another table here, or a Kubernetes model.
RAY_CLUSTER: Mapping[str, Any] = {
    "rayVersion": str,
    "authOptions": "AUTH",
    "suspend": bool,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": "AUTOSCALER",
    "headServiceAnnotations": TEXT_MAP,
    "headGroupSpec": "HEAD",
    "workerGroupSpecs": ["WORKERS"],
}
AUTH: Mapping[str, Any] = {"mode": {"disabled", "token"}, "secretName": str}
AUTOSCALER: Mapping[str, Any] = {
    "version": {"v1", "v2"},
    "idleTimeoutSeconds": int,
    "upscalingMode": {"Default", "Aggressive", "Conservative"},
    "resources": "V1ResourceRequirements",
    "env": ["V1EnvVar"],
}
HEAD: Mapping[str, Any] = {"rayStartParams": TEXT_MAP, "template": "V1PodTemplateSpec", "serviceType": str}
WORKERS: Mapping[str, Any] = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "idleTimeoutSeconds": int,
    "rayStartParams": TEXT_MAP,
    "template": "V1PodTemplateSpec",
}
RAY_JOB: Mapping[str, Any] = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode"},
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "rayClusterSpec": "RAY_CLUSTER",
}
TABLES = {
    "RAY_CLUSTER": RAY_CLUSTER,
    "AUTH": AUTH,
    "AUTOSCALER": AUTOSCALER,
    "HEAD": HEAD,
    "WORKERS": WORKERS,
    "RAY_JOB": RAY_JOB,
}
REQUIRED = {
    "RAY_CLUSTER": {"headGroupSpec"},
    "HEAD": {"template", "rayStartParams"},
    "WORKERS": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "RAY_JOB": {"entrypoint", "rayClusterSpec"},
}
KINDS = {
    ("ray.io/v1", "RayCluster"): "RAY_CLUSTER",
    ("ray.io/v1", "RayJob"): "RAY_JOB",
    ("v1", "Service"): "V1Service",
    ("v1", "ConfigMap"): "V1ConfigMap",
}


def load(path: Path) -> list[dict[str, Any]]:
    """The file's documents, in order."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def flaws(document: Mapping[str, Any]) -> list[str]:
    """What the API server would refuse or silently drop, as `path: reason`."""
    kind = KINDS[document["apiVersion"], document["kind"]]
    if kind not in TABLES:
        return list(_flaws_of_model(document, kind, document["kind"]))
    found = list(_flaws_of_model(document["metadata"], "V1ObjectMeta", "metadata"))
    if extra := document.keys() - {"apiVersion", "kind", "metadata", "spec"}:
        found.append(f"{document['kind']}: no fields {sorted(extra)}")
    return [*found, *_flaws(document["spec"], kind, "spec")]


def _flaws(value: Any, kind: Any, path: str) -> Iterator[str]:
    match kind:
        case str() if kind in TABLES:
            if not isinstance(value, dict):
                yield f"{path}: {value!r} is no mapping"
                return
            table = TABLES[kind]
            yield from (f"{path}.{name}: missing" for name in sorted(REQUIRED.get(kind, set()) - value.keys()))
            for name, part in value.items():
                if name in table:
                    yield from _flaws(part, table[name], f"{path}.{name}")
                else:
                    yield f"{path}.{name}: no such field"
        case str():
            yield from _flaws_of_model(value, kind, path)
        case list():
            for index, part in enumerate(value):
                yield from _flaws(part, kind[0], f"{path}[{index}]")
        case set():
            if value not in kind:
                yield f"{path}: {value!r} is none of {sorted(kind)}"
        case _ if kind == TEXT_MAP:
            if not isinstance(value, dict) or not all(isinstance(part, str) for part in value.values()):
                yield f"{path}: {value!r} is no mapping of text to text"
        case _:
            if type(value) is not kind:
                yield f"{path}: {value!r} is no {kind.__name__}"


def _flaws_of_model(value: Any, model: str, path: str) -> Iterator[str]:
    try:
        getattr(client, model).model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        for flaw in error.errors(include_url=False, include_context=False):
            where = ".".join(map(str, (path, *flaw["loc"])))
            yield f"{where}: {flaw['msg']}"
