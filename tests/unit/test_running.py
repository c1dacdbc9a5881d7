"""What leaving a service's block tells when its Ray has died before."""

import io
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray
from ray.exceptions import RpcError
from rich.console import Console

from microtome import local
from microtome.actors.config import read_config


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    def down(*_: object, **__: object) -> NoReturn:
        raise RpcError("CANCELLED", rpc_code=1)

    cluster = SimpleNamespace(up=lambda *_, **__: "endpoint", down=down)
    monkeypatch.setattr(local, "server_part", lambda name: cluster)
    monkeypatch.setattr(local, "_check_model_is_here", lambda config: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return SimpleNamespace(service=SimpleNamespace(name="toy", ray_namespace="toy"))


def test_a_ray_of_its_own_that_died_first_hides_no_exit(config: Any) -> None:
    with pytest.raises(SystemExit) as left, local.running(config):
        raise SystemExit(143)
    assert left.value.code == 143


def test_a_ray_of_somebody_else_that_died_is_told(config: Any) -> None:
    with pytest.raises(RpcError), local.running(config, "127.0.0.1:6379"):
        pass


def test_a_ray_that_was_connected_before_and_died_is_told(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RpcError), local.running(config):
        pass


@pytest.mark.parametrize(
    ("settings", "ready", "idle"),
    [
        ({}, "1 worker on cpu", False),
        ({"workers.count": 2}, "2 workers on cpu", False),
        ({"workers.min": 0}, "1 worker on cpu", True),
        ({"workers.count": 0}, "no worker yet: the first call starts one on cpu", True),
    ],
)
def test_that_workers_come_with_calls_is_said(
    settings: dict[str, object], ready: str, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = SimpleNamespace(address="127.0.0.1:1")
    cluster = SimpleNamespace(up=lambda *_, **__: endpoint, down=lambda *_, **__: None, is_up=lambda *_, **__: False)
    monkeypatch.setattr(local, "server_part", lambda name: cluster)
    monkeypatch.setattr(local, "_check_model_is_here", lambda config: None)
    output = io.StringIO()
    service = read_config({"model": "m"}, settings)
    local.serve(service, None, Console(file=output, width=200), Console(file=io.StringIO()))
    assert f"ready: m at 127.0.0.1:1, {ready}, after " in output.getvalue()
    assert ("idle  no worker after 300 s, until the next call\n" in output.getvalue()) == idle
