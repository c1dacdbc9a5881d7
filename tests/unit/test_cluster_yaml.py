"""The cluster-launcher files are what Ray accepts, and what Ray's schema lets pass by mistake is looked at too."""

import copy
from typing import Any

import pytest
from jsonschema.exceptions import ValidationError

from tests.support.cluster_launcher import check, load, nodes_launched_for
from tests.support.stubs import ROOT

WORKER = {"CPU": 1.0, "GPU": 1.0}  # what one GPU worker asks for
FILES = ["cluster.yaml", "deploy/local.yaml"]


@pytest.fixture
def cloud() -> dict[str, Any]:
    return load(ROOT / "cluster.yaml")


@pytest.mark.parametrize("name", FILES)
def test_launcher_file_passes_rays_schema_and_ours(name: str) -> None:
    assert check(load(ROOT / name))["cluster_name"] == "microtome"


def test_one_worker_starts_one_gpu_node_from_zero(cloud: dict[str, Any]) -> None:
    assert nodes_launched_for(check(cloud), [WORKER]) == ({"gpu": 1}, 0)


def test_nodes_grow_with_the_workers_up_to_eight(cloud: dict[str, Any]) -> None:
    prepared = check(cloud)
    assert nodes_launched_for(prepared, [WORKER] * 8) == ({"gpu": 8}, 0)
    assert nodes_launched_for(prepared, [WORKER] * 9) == ({"gpu": 8}, 1)


def test_driver_needs_no_node_beside_the_head(cloud: dict[str, Any]) -> None:
    types = check(cloud)["available_node_types"]
    assert types["head"]["resources"]["CPU"] >= 1
    assert types["head"]["resources"]["GPU"] == 0
    assert types["head"]["max_workers"] == 0
    assert types["gpu"]["min_workers"] == 0


def test_cluster_limit_lets_every_gpu_node_start(cloud: dict[str, Any]) -> None:
    assert cloud["max_workers"] >= cloud["available_node_types"]["gpu"]["max_workers"]


def test_images_carry_the_ray_that_the_package_requires(cloud: dict[str, Any]) -> None:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    for image in (cloud["docker"]["head_image"], cloud["docker"]["worker_image"]):
        assert image.startswith(f"rayproject/ray:{pinned.removeprefix('ray==')}-py311")


def test_every_ray_of_the_cloud_cluster_asks_for_a_token(cloud: dict[str, Any]) -> None:
    assert "--env RAY_AUTH_MODE=token" in cloud["docker"]["run_options"]
    assert cloud["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_every_ray_of_the_local_cluster_asks_for_a_token() -> None:
    config = load(ROOT / "deploy/local.yaml")
    starts = [
        c for key in ("head_start_ray_commands", "worker_start_ray_commands") for c in config[key] if "start" in c
    ]
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", FILES)
def test_dashboard_is_on_loopback_and_nothing_of_a_nightly_is_installed(name: str) -> None:
    prepared = check(load(ROOT / name))
    commands = [c for key, value in prepared.items() if key.endswith("_commands") for c in value]
    assert any("--dashboard-host=127.0.0.1" in command for command in commands)
    assert not any("0.0.0.0" in command or "nightly" in command for command in commands)


@pytest.mark.parametrize("name", FILES)
def test_mounted_files_are_in_the_repository_or_made_by_make(name: str) -> None:
    for source in load(ROOT / name)["file_mounts"].values():
        assert source in {"dist", "~/.ray/auth_token"} or (ROOT / source).is_file()


def test_local_machines_are_all_kept() -> None:
    config = load(ROOT / "deploy/local.yaml")
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])


def test_local_provider_cannot_start_a_gpu_node_by_demand() -> None:
    # docs/cluster.md says so; if a later Ray can, the page and the file's min_workers want changing.
    _, unmet = nodes_launched_for(check(load(ROOT / "deploy/local.yaml")), [WORKER])
    assert unmet == 1


def broken(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *parents, last = path.split("/")
    at = changed
    for parent in parents:
        at = at[parent]
    at[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("no_such_key", 1),
        ("idle_timeout_minutes", "5"),
        ("available_node_types/gpu/resources", {"GPU": "1"}),
        ("available_node_types/gpu/no_such_key", 1),
        ("docker", {"image": "rayproject/ray:2.60.0"}),  # container_name is missing
        ("provider/regoin", "eu-west-1"),
        ("available_node_types/gpu/min_workers", 9),
        ("head_start_ray_commands", ["ray start --head"]),
        ("head_node_type", "nothing"),
    ],
)
def test_broken_file_is_noticed(cloud: dict[str, Any], path: str, value: object) -> None:
    with pytest.raises((ValidationError, AssertionError, ValueError, RuntimeError)):
        check(broken(cloud, path, value))


def test_gpu_type_that_names_no_gpu_is_noticed(cloud: dict[str, Any]) -> None:
    prepared = check(broken(cloud, "available_node_types/gpu/resources", {"CPU": 8}))
    assert nodes_launched_for(prepared, [WORKER]) == ({}, 1)
