"""A whole service in one process: the real driver, workers, links and ports, without Ray.

Workers run the fake executor unless the configuration names another. `InProcessWorkers.kill` is a process that dies.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from microtome.actors.config import ServiceConfig, read_config
from microtome.actors.crew import StartOrder
from microtome.actors.driver import DriverHost
from microtome.actors.link import WorkerEndpoint, WorkerSpec
from microtome.actors.remains import Remains
from microtome.actors.worker import WorkerProcess
from microtome.planner.errors import BatchingError, WorkerLost
from microtome.planner.types import WorkerId
from microtome.v1 import generation_pb2_grpc as rpc

SECRET = "5ec2e7" * 10 + "5ec2"
FAKE_EXECUTOR = "tests.support.fake_executor:build_executor"


def fake_config(model: str = "fake", **settings: object) -> ServiceConfig:
    """A service of fake workers; `settings` with dots as double underscores: `workers__count=2`."""
    layer = {name.replace("__", "."): value for name, value in settings.items()}
    defaults = {
        "model": model,
        "runtime.model": model,
        "workers.executor": FAKE_EXECUTOR,
        "service.port": 0,
        "link.reconnect_timeout_s": 0.3,
    }
    return read_config(defaults, layer)


class InProcessWorkers:
    """A `WorkerStarter` whose workers live on the test's own event loop."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self.processes: dict[WorkerId, WorkerProcess] = {}
        self._ended: dict[WorkerId, Callable[[str], None]] = {}
        self.started: list[WorkerId] = []
        self.ended: list[WorkerId] = []
        self.examined: list[WorkerId] = []
        self.found: dict[WorkerId, Remains] = {}  # the test says what is found of a lost one
        self.hold_starts: asyncio.Event | None = None  # no worker finds a place before it is set
        self.places_taken: set[WorkerId] = set()  # the test says whose, and how soon
        self.places_taken_in_s: float | None = None

    async def start(self, order: StartOrder) -> WorkerEndpoint:
        config, worker = self._config, order.worker
        if self.hold_starts is not None:
            await self.hold_starts.wait()
        order.placed()
        spec = WorkerSpec(
            worker=worker,
            secret=SECRET,
            runtime=order.runtime,
            revision=order.revision,
            executor=config.workers.executor,
            link=config.link,
            hang_timeout_s=config.workers.hang_timeout_s,
            orphan_timeout_s=config.workers.orphan_timeout_s,
        )
        process = WorkerProcess(spec, lambda cause: self._ended[worker](cause))
        self.processes[worker], self._ended[worker] = process, order.ended
        self.started.append(worker)
        try:
            return await process.start()
        except BatchingError:
            raise
        except Exception as error:  # as Ray would hand it on
            raise WorkerLost(f"{type(error).__name__}: {error}") from error

    async def living(self, ended: Callable[[WorkerId, str], None]) -> Sequence[WorkerEndpoint]:
        for worker in self.processes:
            self._ended[worker] = lambda cause, worker=worker: ended(worker, cause)
        return [process.endpoint for process in self.processes.values() if process.endpoint is not None]

    async def leaving(self) -> Mapping[WorkerId, float | None]:
        return dict.fromkeys(self.places_taken, self.places_taken_in_s)

    async def remains(self, worker: WorkerId) -> Remains | None:
        self.examined.append(worker)
        return self.found.get(worker)

    async def end(self, worker: WorkerId) -> None:
        process = self.processes.pop(worker, None)
        self.ended.append(worker)
        if process is not None:
            await process.stop()

    async def kill(self, worker: WorkerId) -> None:
        """The worker dies, and whoever watches its process is told."""
        await self.processes.pop(worker).stop()
        self.say_ended(worker)

    def say_ended(self, worker: WorkerId) -> None:
        """Whoever watches its process is told that it died; the worker itself does not notice."""
        self._ended[worker]("killed by the test")

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end(worker) for worker in tuple(self.processes)))


class Service:
    """A running one, as a test sees it."""

    def __init__(self, host: DriverHost, workers: InProcessWorkers, stub: Any) -> None:
        self.host, self.workers, self.stub = host, workers, stub

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.host.port}"


@asynccontextmanager
async def in_process(config: ServiceConfig) -> AsyncIterator[Service]:
    """A service that is ready, and a client's stub for it."""
    broken: list[BaseException] = []
    workers = InProcessWorkers(config)
    host = DriverHost(config, SECRET, workers, failed=broken.append)
    await host.start()
    try:
        await host.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{host.port}") as channel:
            yield Service(host, workers, rpc.GenerationStub(channel))
    finally:
        await host.stop()
        await workers.end_all()
    assert not broken, broken
