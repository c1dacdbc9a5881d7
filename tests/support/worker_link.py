"""A worker in this process and the driver's end of its link, on loopback, for tests that watch both."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from microtome.actors.link import LinkSettings, WorkerEndpoint, WorkerSpec
from microtome.actors.worker import WorkerProcess
from microtome.actors.worker_client import WorkerClient
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.events import StepDone, StepFailed, WorkerGone, WorkerJoined
from microtome.planner.types import StepPlan, StepResult, WorkerId
from tests.support.fake_executor import FakeExecutor

SECRET = "5e" * 32
LinkEvent = StepDone | StepFailed | WorkerGone


class GatedExecutor(FakeExecutor):
    """A fake executor whose steps wait at a gate while it is shut."""

    def __init__(self, **settings: object) -> None:
        super().__init__(keep_plans=True, **settings)  # type: ignore[arg-type]
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        self.begun.release()
        assert self.gate.wait(30), "a test left the gate shut"
        return super().run(plan)

    @property
    def steps_run(self) -> list[int]:
        return [int(plan.step) for plan in self.seen or ()]


def worker_spec(
    model: str = "fake",
    *,
    link: LinkSettings | None = None,
    hang_timeout_s: float = 30.0,
    orphan_timeout_s: float = 60.0,
    executor: str = "tests.support.fake_executor:build_executor",
    host: str = "127.0.0.1",
) -> WorkerSpec:
    return WorkerSpec(
        worker=WorkerId("worker-0"),
        secret=SECRET,
        runtime=RuntimeOptions(model=model),
        executor=executor,
        host=host,
        link=link or LinkSettings(),
        hang_timeout_s=hang_timeout_s,
        orphan_timeout_s=orphan_timeout_s,
    )


@dataclass
class RunningWorker:
    endpoint: WorkerEndpoint
    executor: GatedExecutor
    ended: list[str] = field(default_factory=list)  # the causes for which it would have ended its process


@asynccontextmanager
async def running_worker(
    executor: GatedExecutor | None = None, spec: WorkerSpec | None = None
) -> AsyncIterator[RunningWorker]:
    executor = executor or GatedExecutor()
    ended: list[str] = []
    process = WorkerProcess(spec or worker_spec(), ended.append, lambda _: executor)
    try:
        yield RunningWorker(await process.start(), executor, ended)
    finally:
        executor.gate.set()
        await process.stop()


class Driver:
    """One `WorkerClient` and everything it posted."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        *,
        address: str | None = None,
        secret: str = SECRET,
        link: LinkSettings | None = None,
        hang_timeout_s: float = 30.0,
    ) -> None:
        self.events: list[LinkEvent] = []
        self._changed = asyncio.Event()
        self.client = WorkerClient(
            replace(endpoint, address=address or endpoint.address),
            secret,
            link=link or LinkSettings(),
            hang_timeout_s=hang_timeout_s,
            post=self._post,
            now_us=lambda: time.monotonic_ns() // 1000,
        )
        self.joined: WorkerJoined | None = None

    async def __aenter__(self) -> "Driver":
        self.joined = await self.client.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    def _post(self, event: LinkEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, true: Callable[[], bool], timeout_s: float = 20) -> None:
        async with asyncio.timeout(timeout_s):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    async def answered(self, count: int) -> list[int]:
        """Wait for so many results; the step numbers of all of them, as they came."""
        await self.until(lambda: len(self.steps_done) >= count)
        return self.steps_done

    async def lost(self, timeout_s: float = 20) -> str:
        """Wait until the worker is gone; the cause."""
        await self.until(lambda: self.client.gone is not None, timeout_s)
        gone = self.events[-1]
        assert isinstance(gone, WorkerGone), "gone is posted last"
        return gone.cause

    @property
    def steps_done(self) -> list[int]:
        return [int(e.result.step) for e in self.events if isinstance(e, StepDone)]

    @property
    def failures(self) -> list[StepFailed]:
        return [e for e in self.events if isinstance(e, StepFailed)]


async def eventually(true: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - what is waited for happens on another thread
            await asyncio.sleep(0.005)
