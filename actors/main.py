"""Wiring: builds the real objects and hands them to each other. No logic."""

import asyncio
import logging
import os
import sys

import ray

from microtome.actors.cluster import RaySettings, RayWorkers
from microtome.actors.config import ServiceConfig
from microtome.actors.driver import DriverHost
from microtome.actors.stages import Stage
from microtome.planner.errors import BadConfig

BROKEN = 70  # exit code of a driver whose loop broke: Ray starts it anew


class DriverActor:
    """The driver as a Ray actor. `__init__` is all that runs again after a restart, so it does everything."""

    async def __init__(self, config: ServiceConfig, secret: str) -> None:  # type: ignore[misc]  # Ray awaits it
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        context = ray.get_runtime_context()
        restarted = context.was_current_actor_reconstructed
        self._config = config
        self._refusal: BadConfig | None = None
        self._host = DriverHost(
            config,
            secret,
            RayWorkers(config, secret),
            failed=lambda error: os._exit(BROKEN),
            ray_address=context.gcs_address,
            store=RaySettings(config),
        )
        try:
            await self._host.start(restarted=restarted)
        except BadConfig as error:
            if restarted:
                raise  # nobody waits for an answer; the actor is dead for good, with this as the reason
            self._refusal = error

    async def wait_ready(self) -> str:
        """The address, once the first workers can take work. Raises what keeps the service from it."""
        if self._refusal is not None:
            raise self._refusal
        await self._host.wait_ready()
        return await self.address()

    async def starting(self) -> tuple[Stage, ...]:
        """What the workers that start are about."""
        return tuple(self._host.starting)

    async def address(self) -> str:
        """ "host:port" for clients: the node's own address where the port is bound to every one."""
        host = self._config.service.host
        if host in ("0.0.0.0", "::", "[::]"):
            host = await asyncio.to_thread(ray.util.get_node_ip_address)
        return f"{host}:{self._config.service.port}"

    async def pid(self) -> int:
        return os.getpid()
