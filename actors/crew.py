"""The workers of a service: starts them, joins them, ends them, and puts another in a lost one's place.

Owns each worker's link and state. Decides nothing about work: it posts `WorkerJoined`, the links post what comes back,
and it is told by the driver which workers to give up or release. How a process is started is a `WorkerStarter`'s
business. All on the driver's event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from microtome.actors.config import ServiceConfig
from microtome.actors.link import WorkerEndpoint
from microtome.actors.worker_client import WorkerClient
from microtome.planner.errors import BadConfig, BatchingError
from microtome.planner.events import StepDone, StepFailed, WorkerDraining, WorkerGone, WorkerJoined
from microtome.planner.types import Capability, Incarnation, StepPlan, WorkerId

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 60.0  # between tries to start a worker; doubled from try to try
SOUND_AFTER_US = 30_000_000  # a worker that lived this long was no failed try
REMEMBERED = 8  # lost workers that status still shows

Post = Callable[[WorkerJoined | WorkerDraining | WorkerGone | StepDone | StepFailed], None]


class WorkerStarter(Protocol):
    """Gives workers a process and a place."""

    async def start(
        self, worker: WorkerId, ended: Callable[[str], None], waits: Callable[[str], None]
    ) -> WorkerEndpoint:
        """Start it and wait until it is ready. `ended(cause)` is called once if the process ends by itself later;
        `waits(what)` now and again meanwhile, with what it waits for, empty when that is over.

        Raises `BadConfig` when it can never work as configured, `WorkerLost` when this try failed. What was begun is
        the caller's to `end`.
        """

    async def living(self, ended: Callable[[WorkerId, str], None]) -> Sequence[WorkerEndpoint]:
        """Workers of an earlier life of the driver that are ready. Those that are not are ended."""

    async def leaving(self) -> Collection[WorkerId]:
        """Workers whose places will be taken from them soon: their nodes are draining."""

    async def end(self, worker: WorkerId) -> None:
        """End the process and give its place back. Idempotent; returns when both are gone or as good as gone."""


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One worker, as status shows it."""

    worker: WorkerId
    state: State
    since_us: int
    cause: str = ""
    client: WorkerClient | None = None
    capability: Capability | None = None

    @property
    def endpoint(self) -> WorkerEndpoint | None:
        return None if self.client is None else self.client.endpoint


class Crew:
    def __init__(
        self,
        config: ServiceConfig,
        secret: str,
        starter: WorkerStarter,
        *,
        post: Post,
        now_us: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`failed`: something broke that is no worker's failure."""
        self._config, self._secret, self._starter = config, secret, starter
        self._post, self._now_us, self._broken = post, now_us, failed
        self._members: dict[WorkerId, Member] = {}
        scaling = config.workers.scaling
        self._wanted = max(scaling.min_workers, min(config.workers.count, scaling.max_workers))
        self._last_number = 0
        self._failures = 0  # tries in a row that failed; what the next try waits for grows with them
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: asyncio.Future[Capability] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._failure: BatchingError | None = None
        self._stopping = False
        self.start_us: int | None = None  # from asking for the newest worker to its being ready

    # --- what others see ---

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members.values())

    @property
    def ready(self) -> int:
        return sum(member.state is State.READY for member in self._members.values())

    @property
    def wanted(self) -> int:
        """How many workers there should be."""
        return self._wanted

    @property
    def starting(self) -> int:
        return sum(member.state is State.STARTING for member in self._members.values())

    @property
    def known(self) -> Capability | None:
        """What the service's workers are; None while none has ever joined."""
        return self._first.result() if self._first.done() else None

    async def capability(self) -> Capability:
        """What the service's workers are; waits for the first one that ever joined."""
        return await asyncio.shield(self._first)

    async def wait_ready(self) -> None:
        """Until as many workers are ready as are wanted. Raises what the first failed try raised."""
        while self.ready < self._wanted:
            if self._failure is not None:
                raise self._failure
            self._ready.clear()
            await self._ready.wait()

    # --- the life of the crew ---

    async def adopt(self) -> None:
        """Take over the workers of an earlier life of the driver, with what they hold."""
        endpoints = await self._starter.living(self._ended)
        for endpoint in sorted(endpoints, key=lambda endpoint: _number(endpoint.worker)):
            self._last_number = max(self._last_number, _number(endpoint.worker))
            member = Member(endpoint.worker, State.STARTING, self._now_us())
            self._members[endpoint.worker] = member
            try:
                await self._join(member, endpoint)
            except BatchingError as error:
                self._mark_lost(member, str(error))
                await self._retire(member)
        self._wanted = max(self._wanted, min(self.ready, self._config.workers.scaling.max_workers))

    def scale(self, wanted: int, victims: Sequence[WorkerId]) -> None:
        """Have `wanted` workers: more are started, too many are drained, `victims` in their order. None that starts."""
        self._wanted = wanted
        surplus = self.ready + self.starting - wanted
        for worker in victims[: max(0, surplus)]:
            self.drain(worker, "fewer workers are wanted")
        self.fill()

    async def drain_leaving(self) -> None:
        """Drain the workers whose places will be taken from them, and start others."""
        for worker in await self._starter.leaving():
            self.drain(worker, "its node is draining")

    def fill(self) -> None:
        """Start as many workers as are missing."""
        if self._stopping:
            return
        alive = sum(member.state in (State.STARTING, State.READY) for member in self._members.values())
        for _ in range(self._wanted - alive):
            self._last_number += 1
            worker = WorkerId(f"worker-{self._last_number}")
            member = self._members[worker] = Member(worker, State.STARTING, self._now_us())
            self._spawn(self._begin(member, self._retry_s()))

    def send(self, worker: WorkerId, plan: StepPlan) -> None:
        """Pass the plan to its worker; one that is gone, or in another life, gets nothing."""
        member = self._members.get(worker)
        if member is not None and member.client is not None and member.client.endpoint.incarnation == plan.incarnation:
            member.client.send(plan)

    def drain(self, worker: WorkerId, cause: str) -> bool:
        """Take it out of service; another starts in its place if it is missed. False: no such worker is ready."""
        member = self._members.get(worker)
        if member is None or member.state is not State.READY:
            return False
        member.state, member.cause = State.DRAINING, cause
        log.info("%s drains: %s", worker, cause)
        self._post(WorkerDraining(at_us=self._now_us(), worker=worker))
        self.fill()
        return True

    def lost(self, worker: WorkerId, incarnation: Incarnation, cause: str) -> None:
        """This life of the worker is over: fence it, end the process, and start another."""
        member = self._members.get(worker)
        if member is None or member.endpoint is None or member.endpoint.incarnation != incarnation:
            return
        if member.state is not State.LOST:
            log.warning("%s (pid %d) is lost: %s", worker, member.endpoint.pid, cause)
            self._failures = 0 if self._now_us() - member.since_us > SOUND_AFTER_US else self._failures + 1
            self._mark_lost(member, cause)
            self._spawn(self._retire(member))
            self.fill()

    def released(self, worker: WorkerId) -> None:
        """A drained worker holds nothing any more: end it."""
        member = self._members.get(worker)
        if member is not None and member.state is not State.LOST:
            self._mark_lost(member, f"drained: {member.cause}")
            self._spawn(self._retire(member))

    async def stop(self) -> None:
        """End every worker. Nothing is posted afterwards."""
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            if member.state is not State.LOST:
                self._mark_lost(member, "the service stops")
        await asyncio.gather(*(self._retire(member) for member in self.members), return_exceptions=True)

    async def leave(self) -> None:
        """Close the links and leave the workers running, for the driver's next life."""
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(m.client.close() for m in self.members if m.client is not None))

    # --- one worker ---

    async def _begin(self, member: Member, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        worker, begun_us = member.worker, self._now_us()
        try:
            endpoint = await self._starter.start(
                worker, lambda cause: self._ended(worker, cause), lambda what: self._waits(member, what)
            )
            await self._join(member, endpoint)
            self.start_us = self._now_us() - begun_us
        except BatchingError as error:
            log.error("%s did not start: %s", worker, error)
            self._failures += 1
            self._mark_lost(member, str(error))
            self._failure = self._failure or error
            self._ready.set()
            await self._retire(member)
            self.fill()

    async def _join(self, member: Member, endpoint: WorkerEndpoint) -> None:
        """Connect and tell `Control`. Raises `WorkerLost`, or `BadConfig` for a worker that serves something else."""
        client = WorkerClient(
            endpoint,
            self._secret,
            link=self._config.link,
            hang_timeout_s=self._config.workers.hang_timeout_s,
            post=self._post,
            now_us=self._now_us,
        )
        member.client = client
        joined = await client.connect()
        capability = joined.capability
        if self._first.done() and self._first.result().fingerprint != capability.fingerprint:
            raise BadConfig(
                f"{endpoint.worker} serves a model of fingerprint {capability.fingerprint[:16]}, "
                f"the others {self._first.result().fingerprint[:16]}"
            )
        member.capability, member.state, member.since_us = capability, State.READY, self._now_us()
        member.cause = ""
        self._failures = 0
        if not self._first.done():
            self._first.set_result(capability)
        log.info("%s is ready: %s, pid %d", endpoint.worker, capability.device, endpoint.pid)
        self._post(joined)
        self._ready.set()

    def _mark_lost(self, member: Member, cause: str) -> None:
        member.state, member.cause, member.since_us = State.LOST, cause, self._now_us()

    async def _retire(self, member: Member) -> None:
        """Close the link first: whatever the process still answers is dropped from then on."""
        if member.client is not None:
            await member.client.close()
        await self._starter.end(member.worker)
        lost = [m.worker for m in self._members.values() if m.state is State.LOST]
        for worker in lost[:-REMEMBERED]:
            del self._members[worker]

    def _waits(self, member: Member, what: str) -> None:
        if what and not member.cause:
            log.warning("%s waits: %s", member.worker, what)
        member.cause = what

    def _ended(self, worker: WorkerId, cause: str) -> None:
        member = self._members.get(worker)
        if member is not None and member.client is not None:
            member.client.process_ended(cause)

    def _retry_s(self) -> float:
        return 0.0 if not self._failures else min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (self._failures - 1))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)


def _number(worker: WorkerId) -> int:
    return int(worker.rpartition("-")[2])
