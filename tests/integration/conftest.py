"""One Ray for all integration tests, on loopback; each service in a namespace of its own, gone when its test is."""

import uuid
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """Of these tests alone: those of other folders count on a process that no Ray is connected to."""
    ray.init(
        address="local",
        num_cpus=8,  # of the scheduler's counting, not of the machine
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 * 2**20,
        namespace="tests",
    )
    yield
    ray.shutdown()


@pytest.fixture
def service_name(ray_session: None) -> Iterator[str]:
    """A name that no other test uses; whatever is still up under it afterwards is ended."""
    from microtome.actors import cluster

    name = f"t-{uuid.uuid4().hex[:8]}"
    yield name
    cluster.down(name)
