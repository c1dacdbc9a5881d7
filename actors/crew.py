"""The workers of a service: starts them, joins them, ends them.

Owns each worker's link and state. Decides nothing: it is told by the driver which workers to start, drain, give up and
release, and posts how that went; the links post what comes back. How a process is started is a `WorkerStarter`'s
business. All on the driver's event loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from microtome.actors.config import ServiceConfig
from microtome.actors.link import WorkerEndpoint
from microtome.actors.remains import Loss, Remains
from microtome.actors.stages import Stage
from microtome.actors.worker_client import WorkerClient
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig, BatchingError, WorkerLost
from microtome.planner.events import (
    StepDone,
    StepFailed,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
)
from microtome.planner.types import Capability, Incarnation, StepPlan, WorkerId

log = logging.getLogger(__name__)

REMEMBERED = 8  # workers that are gone and that status still shows, at most
LOOK_S = 2.0  # for another node to tell of a process that may live, before it is ended
START_LOOK_S = 10.0  # the same, of a start that failed
LEAVE_EARLY_S = 5.0  # before a node's deadline a worker has to be empty

Post = Callable[
    [WorkerJoined | WorkerDraining | WorkerGone | WorkerPlaced | WorkerStartFailed | StepDone | StepFailed], None
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """What a starter is told of one worker. It calls back on the event loop."""

    worker: WorkerId
    revision: int  # of the settings
    runtime: RuntimeOptions
    waits: Callable[[str], None]  # now and again while it has no place, with what is missing
    placed: Callable[[], None]  # once, when it has one
    tells: Callable[[Stage], None]  # now and again while it starts there, with what it is about
    ended: Callable[[str], None]  # once, with the cause, if the process ends by itself after it was ready


class WorkerStarter(Protocol):
    """Gives workers a process and a place."""

    async def start(self, order: StartOrder) -> WorkerEndpoint:
        """Start it and wait until it is ready.

        Raises `BadConfig` when it can never work as configured, `WorkerLost` when this try failed. What was begun is
        the caller's to `end`.
        """

    async def living(self, ended: Callable[[WorkerId, str], None]) -> Sequence[WorkerEndpoint]:
        """Workers of an earlier life of the driver that are ready. Those that are not are ended."""

    async def leaving(self) -> Mapping[WorkerId, float | None]:
        """Workers whose places will be taken from them, as their nodes drain: in how many seconds, if that is known."""

    async def remains(self, worker: WorkerId) -> Remains | None:
        """What has become of the process of a worker that is lost; called once, before `end`. None: nobody knows.

        Takes less than a second, or up to a minute where the worker's node is another one and does not answer.
        """

    async def end(self, worker: WorkerId) -> None:
        """End the process and give its place back. Idempotent; returns when both are gone or as good as gone."""


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"  # in order
    LOST = "lost"


GONE = (State.ENDED, State.LOST)


@dataclass(slots=True)
class Member:
    """One worker, as status shows it."""

    worker: WorkerId
    state: State
    since_us: int
    cause: str = ""
    loss: Loss | None = None  # how it was lost, once it is
    compiles: bool = False  # while it starts: no limit counts that
    client: WorkerClient | None = None
    capability: Capability | None = None
    revision: int = 0  # of the settings it was started with
    left: bool = False  # its node drains, and `Control` knows
    looked_for: bool = False  # what has become of its process, or was said not to matter
    starting: "asyncio.Task[None] | None" = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # process and place are gone

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
        self._runtimes = {0: config.runtime}  # by revision
        self._members: dict[WorkerId, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: asyncio.Future[Capability] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._failure: BatchingError | None = None
        self._stopping = False
        self._most_ready = 0  # at once, so far
        self._losses: Counter[tuple[Loss, str]] = Counter()

    # --- what others see ---

    @property
    def members(self) -> Sequence[Member]:
        """Those that are gone are among them for a while."""
        forgotten_us = self._now_us() - int(self._config.workers.gone_s * 1e6)
        return tuple(m for m in self._members.values() if m.state not in GONE or m.since_us > forgotten_us)

    @property
    def losses(self) -> Mapping[tuple[Loss, str], int]:
        """Workers lost by this driver: how, and what ended the process where that is known ("SIGKILL", "exit 3")."""
        return self._losses

    @property
    def ready(self) -> int:
        return sum(member.state is State.READY for member in self._members.values())

    @property
    def starting(self) -> Sequence[Stage]:
        """What the workers that start are about, each with its worker's name."""
        return tuple(
            Stage(f"{member.worker}: {member.cause or 'its process'}", member.compiles)
            for member in self._members.values()
            if member.state is State.STARTING
        )

    async def capability(self) -> Capability:
        """What the service's workers are; waits for the first one that ever joined."""
        return await asyncio.shield(self._first)

    async def wait_ready(self, count: int) -> None:
        """Until so many workers have been ready at once. Raises what the first failed try raised."""
        while self._most_ready < count:
            if self._failure is not None:
                raise self._failure
            self._ready.clear()
            await self._ready.wait()

    # --- the life of the crew ---

    def learn(self, revision: int, runtime: RuntimeOptions) -> None:
        """The settings of workers of this revision."""
        self._runtimes[revision] = runtime

    async def adopt(self) -> int:
        """Take over the workers of an earlier life of the driver, with what they hold; how many."""
        endpoints = await self._starter.living(self._ended)
        for endpoint in sorted(endpoints, key=lambda endpoint: _number(endpoint.worker)):
            member = Member(endpoint.worker, State.STARTING, self._now_us(), revision=endpoint.revision)
            self._members[endpoint.worker] = member
            try:
                await self._join(member, endpoint)
            except BatchingError as error:
                self._lose(member, Loss.LINK, str(error))
                await self._retire(member)
        return self.ready

    def begin(self, worker: WorkerId, revision: int) -> None:
        """Start it. What comes of it is posted."""
        if self._stopping:
            return
        log.info("%s is started, with settings of revision %d", worker, revision)
        member = self._members[worker] = Member(worker, State.STARTING, self._now_us(), revision=revision)
        member.starting = self._spawn(self._begin(member))

    def send(self, worker: WorkerId, plan: StepPlan) -> None:
        """Pass the plan to its worker; one that is gone, or in another life, gets nothing."""
        member = self._members.get(worker)
        if member is not None and member.client is not None and member.client.endpoint.incarnation == plan.incarnation:
            member.client.send(plan)

    def drain(self, worker: WorkerId, cause: str, left_s: float | None = None) -> Member | None:
        """Have it drained, within `left_s` if that is known. None: no such worker is ready, or drains."""
        member = self._members.get(worker)
        if member is None or member.state not in (State.READY, State.DRAINING):
            return None
        now_us = self._now_us()
        deadline_us = None if left_s is None else now_us + int(max(0.0, left_s - LEAVE_EARLY_S) * 1e6)
        self.drains(worker, cause)
        self._post(WorkerDraining(at_us=now_us, worker=worker, deadline_us=deadline_us))
        return member

    def drains(self, worker: WorkerId, cause: str) -> None:
        """It takes no more work; what it has moves away."""
        member = self._members.get(worker)
        if member is not None and member.state is State.READY:
            member.state, member.cause = State.DRAINING, cause
            log.info("%s drains: %s", worker, cause)

    async def drain_leaving(self) -> None:
        """Have the workers drained whose places will be taken from them."""
        for worker, left_s in (await self._starter.leaving()).items():
            member = self._members.get(worker)
            if member is not None and not member.left:
                member.left = self.drain(worker, "its node is draining", left_s) is not None

    def lost(self, worker: WorkerId, incarnation: Incarnation, cause: str) -> None:
        """This life of the worker is over: fence it and end the process."""
        member = self._members.get(worker)
        if member is None or member.endpoint is None or member.endpoint.incarnation != incarnation:
            return
        if member.state not in GONE:
            log.warning("%s (pid %d) is lost: %s", worker, member.endpoint.pid, cause)
            self._lose(member, Loss.LINK if member.client is None else member.client.loss, cause)
            self._spawn(self._retire(member))

    def released(self, worker: WorkerId) -> None:
        """A drained worker holds nothing any more, or one that was asked for is not wanted: end it.

        One that has become ready meanwhile is left alone: `Control` hears of it next.
        """
        member = self._members.get(worker)
        if member is None or member.state not in (State.DRAINING, State.STARTING):
            return
        drained = member.state is State.DRAINING
        self._mark(member, State.ENDED, f"drained: {member.cause}" if drained else "it was not wanted any more")
        self._spawn(self._retire(member))

    async def stop(self) -> None:
        """End every worker. Nothing is posted afterwards."""
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        members = tuple(self._members.values())
        for member in members:
            if member.state not in GONE:
                self._mark(member, State.ENDED, "the service stops")
        await asyncio.gather(*(self._retire(member) for member in members), return_exceptions=True)

    async def leave(self) -> None:
        """Close the links and leave the workers running, for the driver's next life."""
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(m.client.close() for m in self.members if m.client is not None))

    # --- one worker ---

    async def _begin(self, member: Member) -> None:
        worker = member.worker
        try:
            if member.revision not in self._runtimes:
                raise WorkerLost(f"the settings of revision {member.revision} are known no more")
            order = StartOrder(
                worker=worker,
                revision=member.revision,
                runtime=self._runtimes[member.revision],
                waits=lambda missing: self._waits(member, missing),
                placed=lambda: self._placed(member),
                tells=lambda stage: self._tells(member, stage),
                ended=lambda cause: self._ended(worker, cause),
            )
            endpoint = await self._starter.start(order)
            await self._join(member, endpoint)
        except BatchingError as error:
            self._lose(member, Loss.NOT_STARTED, str(error))
            member.looked_for = True
            if isinstance(error, BadConfig):  # which its own process has found, and is no worse for it
                self._explain(member, None)
            else:
                self._explain(member, await _within(self._starter.remains(worker), START_LOOK_S))
                error = WorkerLost(member.cause)
            log.error("%s did not start: %s", worker, error)
            self._failure = self._failure or error
            self._ready.set()
            await self._retire(member)
            self._post(WorkerStartFailed(at_us=self._now_us(), worker=worker, cause=str(error)))
        finally:
            member.starting = None

    async def _join(self, member: Member, endpoint: WorkerEndpoint) -> None:
        """Connect and tell `Control`. Raises `WorkerLost`."""
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
        member.capability, member.state, member.since_us = capability, State.READY, self._now_us()
        member.cause = ""
        if not self._first.done():
            self._first.set_result(capability)
        log.info("%s is ready: %s, pid %d", endpoint.worker, capability.device, endpoint.pid)
        self._post(replace(joined, revision=member.revision))
        self._most_ready = max(self._most_ready, self.ready)
        self._ready.set()

    def _mark(self, member: Member, state: State, cause: str) -> None:
        member.state, member.cause, member.since_us = state, cause, self._now_us()

    def _lose(self, member: Member, loss: Loss, cause: str) -> None:
        self._mark(member, State.LOST, cause)
        member.loss = loss

    def _explain(self, member: Member, found: Remains | None) -> None:
        """Add to the cause what has become of the process."""
        assert member.loss is not None
        if found is not None:
            if member.loss in (Loss.LINK, Loss.DIED):
                # One that ended itself said why, although its end may be noticed before its answer is read.
                member.loss = Loss.FAILED if found.cause else Loss.LINK if found.lives else Loss.DIED
            if found.cause and found.cause in member.cause:
                found = replace(found, cause="")  # said once
            # How it was noticed matters less than what had happened, unless that is the reason for it.
            ended_first = not found.lives and (found.cause or member.loss in (Loss.DIED, Loss.NOT_STARTED))
            member.cause = f"{found} (noticed: {member.cause})" if ended_first else f"{member.cause}; {found}"
            log.warning("%s is lost, %s: %s", member.worker, member.loss.value, member.cause)
        self._losses[member.loss, "" if found is None else found.how] += 1

    async def _retire(self, member: Member) -> None:
        """Close the link first: whatever the process still answers is dropped from then on."""
        starting = member.starting
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()
            await asyncio.wait([starting])  # what it was making is there to be ended then
        if member.client is not None:
            await member.client.close()
        look: asyncio.Task[Remains | None] | None = None
        if member.loss is not None and not member.looked_for:
            member.looked_for = True
            if member.loss is Loss.DIED:
                # What is left of it does not change any more, and its place is wanted: nobody waits for the look.
                look = asyncio.create_task(self._starter.remains(member.worker))
            else:
                self._explain(member, await _within(self._starter.remains(member.worker), LOOK_S))
        await self._starter.end(member.worker)
        member.ended.set()
        if look is not None:
            try:
                self._explain(member, await look)
            finally:
                look.cancel()
        gone = [m.worker for m in self._members.values() if m.state in GONE]
        for worker in gone[:-REMEMBERED]:
            del self._members[worker]

    def _waits(self, member: Member, missing: str) -> None:
        if not member.cause:
            log.warning("%s waits: %s", member.worker, missing)
        member.cause = missing

    def _placed(self, member: Member) -> None:
        member.cause = ""
        self._post(WorkerPlaced(at_us=self._now_us(), worker=member.worker))

    def _tells(self, member: Member, stage: Stage) -> None:
        if member.state is State.STARTING:
            if member.cause != stage.name:
                log.info("%s starts: %s", member.worker, stage.name)
            member.cause, member.compiles = stage.name, stage.compiles

    def _ended(self, worker: WorkerId, cause: str) -> None:
        member = self._members.get(worker)
        if member is not None and member.client is not None:
            member.client.process_ended(cause)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)


async def _within(looking: Coroutine[Any, Any, Remains | None], limit_s: float) -> Remains | None:
    """None as well when it takes too long."""
    try:
        return await asyncio.wait_for(looking, limit_s)
    except TimeoutError:
        return None


def _number(worker: WorkerId) -> int:
    return int(worker.rpartition("-")[2])
