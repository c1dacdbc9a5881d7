"""A Ray of this process that does not come up is told in one sentence, whatever class Ray raises."""

from typing import NoReturn

import pytest
import ray

from microtome.actors import cluster
from microtome.actors.config import read_config
from microtome.planner.errors import BadConfig


@pytest.mark.parametrize("kind", [Exception, RuntimeError, ConnectionError, AssertionError])
def test_a_ray_that_does_not_come_up_is_a_sentence(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def init(**_: object) -> NoReturn:
        raise kind("a page of logs\nThe current node timed out during startup.")

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # set by the call, and put back after the test
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setattr(cluster, "_keep_to_loopback", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    config = read_config({"model": "toy", "service.port": 0})
    with pytest.raises(BadConfig) as told:
        cluster.up(config)
    assert str(told.value) == "Ray cannot be started on this machine: The current node timed out during startup."
