"""A service's life on a Ray cluster: the only file that names Ray resources, placement groups and restarts.

A service is one Ray namespace with a detached driver actor named after it, and one detached actor per worker, each in
a detached placement group of its own. Everything of a service carries its name, so that `down` finds it all by name.

`up` and `down` are for whoever manages services (the command line, a Ray job): blocking calls, any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microtome.actors.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a running service answers."""

    service: str
    address: str  # "host:port" for gRPC clients
    ray_address: str  # "host:port" of the Ray cluster's head
    joined: bool  # the service was up already, and nothing was started


@dataclass(frozen=True, slots=True, kw_only=True)
class Downed:
    """What `down` ended."""

    service: str
    actors: tuple[str, ...]
    placement_groups: tuple[str, ...]
    pids: tuple[int, ...]


def up(config: ServiceConfig, *, ray_address: str | None = None, join: bool = False) -> Endpoint:
    """Start the service and wait until its first workers can take work.

    `ray_address` None: a Ray of its own on this machine, loopback only, which ends with this process. Raises
    `BadConfig` (with nothing left behind) for a service name or port in use, a model that cannot be loaded, or
    resources that no node has; a service of that name is joined instead of refused when `join`.
    """
    raise NotImplementedError


def down(service: str, *, ray_address: str | None = None) -> Downed:
    """End the service: afterwards no actor, placement group, process or port of it is left. Idempotent.

    `ray_address` None: the Ray this process is connected to. Raises `BadConfig` when there is no such Ray.
    """
    raise NotImplementedError


def is_up(service: str) -> bool:
    """Whether the service's driver is there, or being restarted, on the Ray this process is connected to.

    False once `down` has been called, by anybody; also when that Ray itself is gone. For who runs a service in the
    foreground and must notice that it was ended elsewhere. Cheap enough to ask twice a second.
    """
    raise NotImplementedError
