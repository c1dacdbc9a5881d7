"""The Kubernetes manifests hold only fields that exist, and hang together."""

import copy
import re
import subprocess
from typing import Any

import pytest
import yaml

from microtome.actors.config import read_config
from tests.support.kubernetes_manifests import flaws, load
from tests.support.stubs import ROOT

FOLDER = ROOT / "deploy" / "kuberay"
HEAD = "spec/headGroupSpec/template/spec/containers/0"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))


@pytest.fixture
def documents() -> dict[str, dict[str, Any]]:
    """Of raycluster.yaml, by kind."""
    return {document["kind"]: document for document in load(FOLDER / "raycluster.yaml")}


@pytest.fixture
def cluster(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return documents["RayCluster"]


def clusters() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name in FILES:
        for document in load(FOLDER / name):
            if document["kind"] == "RayCluster":
                found.append((name, document["spec"]))
            if document["kind"] == "RayJob":
                found.append((name, document["spec"]["rayClusterSpec"]))
    return found


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only


def test_there_is_a_cluster_and_a_job() -> None:
    assert FILES == ["raycluster.yaml", "rayjob.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_every_field_exists_and_is_of_its_kind(name: str) -> None:
    assert [flaw for document in load(FOLDER / name) for flaw in flaws(document)] == []


@pytest.mark.parametrize(
    ("path", "value", "flaw"),
    [
        ("spec/autoscalerOptoins", {}, "spec.autoscalerOptoins: no such field"),
        ("spec/workerGroupSpecs/0/maxReplicas", "8", "spec.workerGroupSpecs[0].maxReplicas: '8' is no int"),
        ("spec/authOptions/mode", "tokens", "spec.authOptions.mode: 'tokens' is none of"),
        ("spec/headGroupSpec/rayStartParams/num-gpus", 0, "is no mapping of text to text"),
        ("spec/headGroupSpec/serviceType", "Loadbalancer", "spec.headGroupSpec.serviceType: 'Loadbalancer' is none of"),
        ("spec/gcsFaultToleranceOptions", {"redisUsername": {}}, "gcsFaultToleranceOptions.redisAddress: missing"),
        ("spec/workerGroupSpecs/0/scaleStrategy", {"workersToDelete": [1]}, "workersToDelete[0]: 1 is no str"),
        (
            "spec/headGroupSpec/template/spec/containers/0/readinesProbe",
            {},
            "readinesProbe: Extra inputs are not permitted",
        ),
        (
            "spec/headGroupSpec/template/spec/containers/0/readinessProbe/grpc",
            {},
            "readinessProbe.grpc.port: Field required",
        ),
        (
            "spec/headGroupSpec/template/spec/containers/0/ports/0/containerPort",
            "6379",
            "containerPort: Input should be a valid integer",
        ),
        ("metadata/annotation", {}, "metadata.annotation: Extra inputs are not permitted"),
    ],
)
def test_wrong_field_is_noticed(cluster: dict[str, Any], path: str, value: object, flaw: str) -> None:
    changed = copy.deepcopy(cluster)
    *parents, last = path.split("/")
    at: Any = changed
    for parent in parents:
        at = at[int(parent) if isinstance(at, list) else parent]
    at[last] = value
    (found,) = flaws(changed)
    assert flaw in found


@pytest.mark.parametrize(("name", "spec"), clusters())
def test_ray_is_the_version_that_is_pinned_and_asks_for_a_token(name: str, spec: dict[str, Any]) -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert spec["authOptions"] == {"mode": "token", "secretName": "microtome-ray"}


@pytest.mark.parametrize(("name", "spec"), clusters())
def test_gpu_pods_scale_from_zero_and_each_has_one_gpu(name: str, spec: dict[str, Any]) -> None:
    (group,) = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"] is True
    assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


@pytest.mark.parametrize(("name", "spec"), clusters())
def test_every_pod_is_limited_to_what_it_requests(name: str, spec: dict[str, Any]) -> None:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        resources = container(group)["resources"]
        assert resources["requests"] == resources["limits"]


@pytest.mark.parametrize(("name", "spec"), clusters())
def test_every_mounted_volume_is_declared_and_models_lie_at_one_path_in_all_pods(
    name: str, spec: dict[str, Any]
) -> None:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        assert mounts.keys() <= volumes
        assert mounts["models"] == "/models"


def test_service_settings_are_ones_that_microtome_reads(documents: dict[str, dict[str, Any]]) -> None:
    settings = yaml.safe_load(documents["ConfigMap"]["data"]["service.yaml"])
    config = read_config(settings, {"model": "/models/my-model"})
    assert config.runtime.device == "cuda"
    head = container(documents["RayCluster"]["spec"]["headGroupSpec"])
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (config.service.port, config.service.metrics_port) == (ports["grpc"], ports["metrics"])
    assert head["readinessProbe"]["grpc"]["port"] == head["startupProbe"]["grpc"]["port"] == config.service.port


def test_clients_service_leads_to_the_heads_ports(documents: dict[str, dict[str, Any]]) -> None:
    spec = documents["Service"]["spec"]
    head = container(documents["RayCluster"]["spec"]["headGroupSpec"])
    assert {port["targetPort"] for port in spec["ports"]} <= {port["containerPort"] for port in head["ports"]}
    assert spec["selector"]["ray.io/cluster"] == documents["RayCluster"]["metadata"]["name"]


def test_settings_reach_the_head_pod(documents: dict[str, dict[str, Any]]) -> None:
    template = documents["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = [volume for volume in template["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]


def test_heads_command_is_sound_shell_and_starts_both_ray_and_the_service(cluster: dict[str, Any]) -> None:
    (script,) = container(cluster["spec"]["headGroupSpec"])["args"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "$KUBERAY_GEN_RAY_START_CMD" in script
    assert "microtome serve" in script
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
