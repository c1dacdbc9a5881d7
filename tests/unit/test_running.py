"""What leaving a service's block tells when its Ray has died before."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray
from ray.exceptions import RpcError

from microtome import local


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    def down(*_: object, **__: object) -> NoReturn:
        raise RpcError("CANCELLED", rpc_code=1)

    cluster = SimpleNamespace(up=lambda *_, **__: "endpoint", down=down)
    monkeypatch.setattr(local, "server_part", lambda name: cluster)
    monkeypatch.setattr(local, "_check_model_is_here", lambda config: None)
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
