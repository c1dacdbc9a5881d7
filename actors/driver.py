"""The driver: one event queue, and one dull loop around `Control`. Decides nothing.

`DriverHost` needs no Ray: what starts and ends workers is an argument. Everything runs on one event loop, text apart.
Its `start` does everything again after a restart: workers of an earlier life are adopted, with what they hold.

What is told to `Control` comes from here, from the front end and from the workers' links. What it answers is carried
out at once, plans first; delivery to clients follows when every event that waited has been handled, and behind that the
journal, if one is kept.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, assert_never

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from microtome.actors.admin import ADMIN, Admin
from microtome.actors.config import ServiceConfig
from microtome.actors.crew import Crew, WorkerStarter
from microtome.actors.frontend import FrontEnd
from microtome.actors.journal_file import JournalFile
from microtome.actors.link import DEFAULT_EXECUTOR
from microtome.actors.metrics import Metrics, Observation
from microtome.actors.report import status_response
from microtome.actors.requests import ServedModel
from microtome.actors.revisions import Revisions, RevisionStore
from microtome.actors.stages import Stage
from microtome.actors.text import ModelText, load_model_text
from microtome.actors.unreadable import UnreadableRequests
from microtome.actors.whereabouts import listed
from microtome.planner.control import Control
from microtome.planner.errors import BadConfig, BatchingError, UnknownId, WorkerLost, WrongState
from microtome.planner.events import (
    CallersWait,
    CloneSession,
    CloseSession,
    Deliver,
    DeliverPrompt,
    DeliverStep,
    DrainBegun,
    Event,
    GiveUpWorker,
    Instruction,
    OpenSession,
    ReleaseWorker,
    Restored,
    RunStep,
    Scale,
    SessionAnswer,
    SessionEvent,
    StartWorker,
    Tick,
    UpdateEnded,
    UpdateWorkers,
    WorkerGone,
    WorkerJoined,
)
from microtome.planner.replay import described
from microtome.planner.sessions import LAST_LIFE
from microtome.planner.status import Whereabouts
from microtome.planner.types import Capability, GenerationId, WorkerId
from microtome.v1 import admin_pb2
from microtome.v1 import admin_pb2_grpc as admin_rpc
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc

log = logging.getLogger(__name__)

TICK_S = 0.1
NODES_S = 1.0  # between two looks at which nodes drain
SCRAPE_TIMEOUT_S = 5.0
BIND_TRIES, BIND_PAUSE_S = 20, 0.25  # a restarted driver waits for its own port
GENERATION = pb.DESCRIPTOR.services_by_name["Generation"].full_name


class DriverHost:
    """One service's driver, on the running event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        secret: str,
        starter: WorkerStarter,
        *,
        failed: Callable[[BaseException], None],
        ray_address: str = "",
        store: RevisionStore | None = None,
    ) -> None:
        """`failed` is called once if the loop itself breaks: the driver is of no use then, and is to be ended.

        `store` None: what an update changed is forgotten with this driver.
        """
        self._config = config
        self._store = store
        self._revisions = Revisions(config)
        self._scaling = config.workers.scaling
        self._models: dict[str, tuple[Capability, int]] = {}  # by fingerprint: what serves it, and which settings
        self._update: asyncio.Future[None] | None = None  # the one under way
        self._failed = failed
        self._ray_address = ray_address
        self._control = Control(config.planner)
        file = config.journal.file(config.service.name)
        self._journal = JournalFile(file, config.journal.max_bytes) if file is not None else None
        self._unwritten: list[tuple[Event, list[Instruction]]] = []  # what is still to be recorded
        self._crew = Crew(config, secret, starter, post=self.post, now_us=self.now_us, failed=self._break)
        self.front_end = FrontEnd(
            self,
            self._text_loader(config),
            retain_s=config.service.retain_s,
            retain_tokens=config.service.retain_tokens,
        )
        self.metrics = Metrics(self._observe_from_elsewhere)
        self.front_end.on_end = lambda stream: self.metrics.generation_ended(stream, self.now_us())
        self._end_metrics: Callable[[], None] | None = None
        self._event_loop = asyncio.get_running_loop()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._server: grpc.aio.Server | None = None
        self._events: deque[Event] = deque()
        self._posted = asyncio.Event()
        self._quiet = asyncio.Event()  # every event has been handled
        self._quiet.set()
        self._settled = asyncio.Event()  # nothing of an earlier driver is still to be taken over
        self._tasks: list[asyncio.Task[None]] = []
        self._began_us = self.now_us()
        self._callers = 0  # calls that wait for the first worker there ever was
        self._life = 1 + secrets.randbelow(LAST_LIFE)
        self._asked: dict[int, asyncio.Future[SessionAnswer]] = {}  # by ticket
        self._tickets = 0
        self.loop_us = 0  # spent handling events, in all
        self.port = 0

    # --- life ---

    async def start(self, *, restarted: bool = False) -> None:
        """Serve. Workers start behind it: see `wait_ready`.

        Raises `BadConfig` when the port cannot be had, or the journal cannot be written; but after a restart the
        service goes on without a journal.
        """
        service = self._config.service
        if self._journal is not None:
            await self._begin_journal(self._journal, restarted)
        if service.metrics_port is not None:
            self._end_metrics = self.metrics.serve(service.host, service.metrics_port)
        await self._serve(tries=BIND_TRIES if restarted else 1)
        self._tasks = [self._task(self._loop()), self._task(self._tick()), self._task(self._watch_health())]
        if self._store is not None:
            await self._recall(self._store, restarted)
        adopted = await self._crew.adopt()
        await self._quiet.wait()  # the loop has taken in what was adopted
        self._settled.set()
        count = adopted if restarted else self._config.first_workers
        self.post(Scale(at_us=self.now_us(), scaling=self._scaling, count=count))
        self._tasks.append(self._task(self._watch_nodes()))

    async def _begin_journal(self, journal: JournalFile, restarted: bool) -> None:
        try:
            await asyncio.to_thread(journal.open, self._config.planner, version("microtome"))
        except BadConfig as error:
            if not restarted:
                raise
            log.warning("%s; the service goes on without it", error)

    async def _recall(self, store: RevisionStore, restarted: bool) -> None:
        """Go on with the settings that an earlier driver was updated to."""
        if not restarted:
            await store.save(b"")
        elif kept := await store.load():
            self._revisions.restore(kept)
            if self._revisions.bounds is not None:
                least, most = self._revisions.bounds
                self._scaling = replace(self._scaling, min_workers=least, max_workers=most)
            if current := self._revisions.current:
                self._crew.learn(current, self._revisions[current].runtime)
                self.front_end.load(current, self._text_loader(self._revisions[current]))
                self.post(UpdateWorkers(at_us=self.now_us(), revision=current, tried=True))

    async def wait_ready(self) -> None:
        """Until as many workers as configured can take work. Raises what kept the first one from starting."""
        await self.front_end.text()
        await self._crew.wait_ready(self._config.first_workers)

    @property
    def starting(self) -> Sequence[Stage]:
        """What the workers that start are about."""
        return self._crew.starting

    async def stop(self, grace_s: float = 0.0) -> None:
        """End the service: clients first, then the loop, then the workers."""
        if self._server is not None:
            await self._server.stop(grace_s)
        await self._end_tasks()
        await self._crew.stop()
        await self._close()

    async def leave(self) -> None:
        """Stop serving and leave the workers as they are, as a driver that dies does."""
        if self._server is not None:
            await self._server.stop(0)
        await self._end_tasks()
        await self._crew.leave()
        await self._close()

    # --- what the front end needs ---

    def post(self, event: Event) -> None:
        self._events.append(event)
        self._posted.set()
        self._quiet.clear()

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    async def settled(self) -> None:
        await self._settled.wait()

    async def where(self, generations: Sequence[GenerationId]) -> dict[GenerationId, Whereabouts]:
        await self._quiet.wait()
        return self._control.places(generations)

    async def generations(self, limit: int) -> admin_pb2.ListGenerationsResponse:
        """Those that have not ended, `limit` at most: in line, in their order, then the others."""
        await self._quiet.wait()
        found, status, now = self._control.listed(limit), self._control.status(), self.now_us()
        return admin_pb2.ListGenerationsResponse(
            generations=[listed(one, self.front_end.streams.stream(one.generation), now) for one in found],
            total=status.running + status.waiting,
        )

    async def drain(self, worker: WorkerId) -> None:
        """Take the worker out of service without hurting a stream; returns when its process is gone.

        Raises `UnknownId` when no such worker is ready. Goes on if nobody waits any more.
        """
        member = self._crew.drain(worker, "an operator asked for it")
        if member is None:
            raise UnknownId(f"no worker {worker!r} is ready")
        await member.ended.wait()

    async def scale(self, least: int | None = None, most: int | None = None) -> tuple[int, int]:
        """Keep between so many workers from now on; None: as it is. The bounds in force. Raises `BadConfig`."""
        least = self._scaling.min_workers if least is None else least
        most = self._scaling.max_workers if most is None else most
        self._scaling = replace(self._scaling, min_workers=least, max_workers=most)
        self.post(Scale(at_us=self.now_us(), scaling=self._scaling, count=self._crew.ready))
        self._revisions.bounds = least, most
        log.info("between %d and %d workers from now on", least, most)
        if self._store is not None:
            await self._store.save(self._revisions.encode(self._revisions.current))
        return least, most

    async def update(self, settings: Mapping[str, str], surge: bool) -> int:
        """Replace every worker by one with these settings; returns the new revision when the last old one is gone.

        Raises `BadConfig` for settings that cannot be, `WrongState` while another update is under way, and `WorkerLost`
        when no worker starts with them: then nothing has changed. Goes on if nobody waits any more.
        """
        if self._update is not None:
            raise WrongState("an update is under way")
        revision = self._revisions.propose(settings)
        self._update = asyncio.get_running_loop().create_future()
        try:
            await self.front_end.prepare(revision, self._text_loader(self._revisions[revision]))
        except BatchingError:
            self._update = None
            raise
        self._crew.learn(revision, self._revisions[revision].runtime)
        self.post(UpdateWorkers(at_us=self.now_us(), revision=revision, surge=surge))
        await asyncio.shield(self._update)
        return revision

    async def model(self) -> ServedModel:
        self._count_callers(1)
        try:
            first = await self._crew.capability()
        finally:
            self._count_callers(-1)
        fingerprint = self._control.fingerprint or first.fingerprint
        capability, revision = self._models.get(fingerprint, (first, self._revisions.current))
        text = await self.front_end.text(fingerprint)
        limit = self._config.planner.max_session_tokens
        return ServedModel(
            name=self._revisions[revision].model,
            fingerprint=capability.fingerprint,
            vocab_size=capability.vocab_size,
            context_tokens=min(capability.max_session_tokens, limit or capability.max_session_tokens),
            end_token_ids=() if text is None else text.end_token_ids,
            has_chat_template=text is not None and text.tokenizer.has_chat_template,
            architecture="" if text is None else text.architecture,
        )

    def _count_callers(self, change: int) -> None:
        """Calls that wait for the first worker there ever was are a reason to start one."""
        self._callers += change
        if self._control.fingerprint is None:
            self.post(CallersWait(at_us=self.now_us(), count=self._callers))

    async def ask(self, question: SessionEvent) -> SessionAnswer:
        self._tickets += 1
        answer = self._asked[self._tickets] = self._event_loop.create_future()
        question = replace(question, ticket=self._tickets)
        if isinstance(question, OpenSession | CloneSession):
            question = replace(question, life=self._life)
        self.post(question)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if isinstance(question, OpenSession | CloneSession):
                answer.add_done_callback(self._close_unclaimed)
            raise

    def _answered(self, answer: SessionAnswer) -> None:
        asked = self._asked.pop(answer.ticket, None)
        if asked is not None:
            asked.set_result(answer)

    def _close_unclaimed(self, answer: "asyncio.Future[SessionAnswer]") -> None:
        """Whoever asked for the session has hung up, and nobody else knows it."""
        session = answer.result().session
        if session is not None:
            self.post(CloseSession(at_us=self.now_us(), ticket=0, session=session))

    # --- the loop ---

    async def _loop(self) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            begin = time.perf_counter_ns()
            deliveries: list[Deliver] = []
            while self._events:
                event = self._events.popleft()
                if isinstance(event, WorkerJoined):
                    self._joins(event)
                for instruction in self._decide(event):
                    self._carry_out(instruction, deliveries)
                if isinstance(event, WorkerGone):
                    self._crew.lost(event.worker, event.incarnation, event.cause)
            if deliveries:
                self.front_end.deliver(deliveries)
            if self._unwritten:  # behind the tasks that send plans and tokens, which are ready now
                self._event_loop.call_soon(self._write_down)
            self._quiet.set()
            self.loop_us += (time.perf_counter_ns() - begin) // 1000

    def _decide(self, event: Event) -> list[Instruction]:
        if self._journal is None or not self._journal.recording:
            return self._control.handle(event)
        try:
            instructions = self._control.handle(event)
        except Exception as error:
            self._write_down()
            self._journal.broke(event, described(error))
            raise
        self._unwritten.append((event, instructions))
        return instructions

    def _write_down(self) -> None:
        calls, self._unwritten = self._unwritten, []
        if self._journal is not None:
            self._journal.add(calls)

    def _carry_out(self, instruction: Instruction, deliveries: list[Deliver]) -> None:
        match instruction:
            case RunStep(worker=worker, plan=plan):
                self._crew.send(worker, plan)
            case Deliver():
                deliveries.append(instruction)
            case DeliverStep():
                deliveries += instruction.deliveries()
            case DeliverPrompt():
                self.front_end.deliver_prompt(instruction)
            case GiveUpWorker(worker=worker, incarnation=incarnation, cause=cause):
                self._crew.lost(worker, incarnation, cause)
            case ReleaseWorker(worker=worker):
                self._crew.released(worker)
            case StartWorker(worker=worker, revision=revision):
                self._crew.begin(worker, revision)
            case DrainBegun(worker=worker, cause=cause):
                self._crew.drains(worker, cause)
            case UpdateEnded():
                self._update_ended(instruction)
            case Restored():
                self.front_end.restore(instruction)
            case SessionAnswer():
                self._answered(instruction)
            case _:
                assert_never(instruction)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self.now_us()
            self.post(Tick(at_us=now))
            self.front_end.tick(now)

    def _joins(self, event: WorkerJoined) -> None:
        """Before `Control` hears of it: what it says next may need the model's text."""
        fingerprint, revision = event.capability.fingerprint, event.revision
        newest = max(revision, self._models[fingerprint][1]) if fingerprint in self._models else revision
        if newest in self._revisions:
            self._models[fingerprint] = (event.capability, newest)
            self.front_end.learn(fingerprint, newest)
        if revision > self._revisions.current and revision in self._revisions:
            self._keep(revision)

    def _keep(self, revision: int) -> None:
        """From now on a restarted driver goes on with this revision."""
        self._revisions.current = revision
        if self._store is not None:
            self._tasks.append(self._task(self._store.save(self._revisions.encode(revision))))

    def _update_ended(self, ended: UpdateEnded) -> None:
        if ended.error is None:
            log.info("every worker has the settings of revision %d", ended.revision)
            if self._revisions.current < ended.revision:
                self._keep(ended.revision)  # there was no worker to bring it
        else:
            log.error("the update to revision %d is taken back: %s", ended.revision, ended.error)
            self.front_end.forget(ended.revision)
        waiting, self._update = self._update, None
        if waiting is not None and not waiting.done():
            if ended.error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(WorkerLost(ended.error))
                waiting.exception()  # nobody may be waiting any more

    async def _watch_nodes(self) -> None:
        while True:
            await self._crew.drain_leaving()
            await asyncio.sleep(NODES_S)

    async def _watch_health(self) -> None:
        """Serving means: a worker can take work, or the service may be without any and a call will start one.

        Otherwise a service at rest would be told to nobody behind a readiness check, and never be called back to life.
        """
        shown = None
        while True:
            serving = self._crew.ready > 0 or (self._settled.is_set() and not self._scaling.min_workers)
            if serving is not shown:
                shown = serving
                status = (
                    health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
                )
                for service in ("", GENERATION):
                    await self._health.set(service, status)
            await asyncio.sleep(TICK_S)

    # --- serving ---

    async def _serve(self, tries: int) -> None:
        service = self._config.service
        for left in reversed(range(tries)):
            server = grpc.aio.server(
                interceptors=(UnreadableRequests(),),
                options=(
                    ("grpc.so_reuseport", 0),  # a port in use is refused, not shared
                    ("grpc.max_receive_message_length", service.max_request_bytes),
                    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                    ("grpc.http2.max_ping_strikes", 0),
                    ("grpc.keepalive_permit_without_calls", 1),
                ),
            )
            rpc.add_GenerationServicer_to_server(self.front_end, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names = [GENERATION, health.SERVICE_NAME, reflection.SERVICE_NAME]
            if service.admin:
                admin_rpc.add_AdminServicer_to_server(Admin(self), server)
                names.append(ADMIN)
            reflection.enable_server_reflection(names, server)
            try:
                self.port = server.add_insecure_port(f"{service.host}:{service.port}")
            except RuntimeError as error:
                if not left:
                    raise BadConfig(f"port {service.port} on {service.host} cannot be bound: it is in use") from error
                await asyncio.sleep(BIND_PAUSE_S)
                continue
            await server.start()
            self._server = server
            return

    def _text_loader(self, config: ServiceConfig) -> Callable[[], ModelText] | None:
        """Our own executor needs a checkpoint; another one's model may be no file at all, and has no text then."""
        model = config.runtime.model
        if config.workers.executor != DEFAULT_EXECUTOR and not Path(model).exists():
            return None
        return lambda: load_model_text(model)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        log.critical("the driver broke", exc_info=error)
        self._failed(error)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close(self) -> None:
        self.front_end.close()
        if self._journal is not None:
            self._write_down()
            await asyncio.to_thread(self._journal.close)
        if self._end_metrics is not None:
            await asyncio.to_thread(self._end_metrics)  # a scrape that is under way waits for this loop

    # --- status ---

    def status(self) -> pb.StatusResponse:
        return status_response(
            self._control.status(),
            self._crew.members,
            service=self._config.service.name,
            version=version("microtome"),
            uptime_ms=(self.now_us() - self._began_us) // 1000,
            ray_address=self._ray_address,
        )

    def _observe_from_elsewhere(self) -> Observation:
        """On the thread of a scrape: `Control` is looked at on its own loop."""

        async def observe() -> Observation:
            return Observation(
                self._control.status(),
                self._crew.members,
                self.loop_us * 1e-6,
                self.front_end.text_us * 1e-6,
                dict(self._crew.losses),
                self._journal,
            )

        return asyncio.run_coroutine_threadsafe(observe(), self._event_loop).result(SCRAPE_TIMEOUT_S)
