"""Finding a service by its name on Ray: for jobs that run on the service's own cluster."""

from typing import Any

from microtome.client import Client
from microtome.local import server_part

__all__ = ["connect"]


def connect(
    service: str = "microtome", *, namespace: str = "", ray_address: str | None = "auto", **options: Any
) -> Client:
    """A client of the service that is up under this name on the Ray cluster at `ray_address`.

    `namespace` empty: the service's name. `ray_address` None: the Ray that this process is connected to; "auto": that
    one, or the one this machine belongs to. `options` are those of `Client`. The process stays connected to Ray.
    Raises BadConfig when there is no such Ray or no such service.
    """
    address = server_part("actors.cluster").address_of(service, namespace=namespace, ray_address=ray_address)
    return Client(address, **options)
