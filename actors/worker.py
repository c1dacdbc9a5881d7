"""A worker process: builds the executor on its one step thread, serves `Worker` to the driver, ends when it must.

`WorkerProcess` needs no Ray; `WorkerActor` is the same thing as a Ray actor and adds nothing but its address.

It ends by itself in three cases, each with a sentence: the device's state is unknown after a failed step or probe (the
answer is sent first); no driver was heard for `orphan_timeout_s`; or it was told to. A hung step does not end it: the
thread cannot be stopped, so the driver, who sees it, has the process killed.
"""

import asyncio
import importlib
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.actors.connection import bind
from microtome.actors.health import StepHealth
from microtome.actors.last_words import LastWords
from microtome.actors.link import WorkerEndpoint, WorkerSpec
from microtome.actors.mailbox import Mailbox
from microtome.actors.remains import Trace
from microtome.actors.stages import Stage, StageListener
from microtome.actors.step_runner import StepRunner
from microtome.actors.step_thread import StepThread
from microtome.actors.worker_service import SecretInterceptor, WorkerService
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig
from microtome.planner.protocols import Executor
from microtome.planner.types import Capability
from microtome.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
LAST_WORDS_S = 1.0  # for the answer that tells of a failure to reach the driver before the process ends
BYTES_PER_TOKEN = 10  # of a sequence in a snapshot: its cell and id as varints


class WorkerProcess:
    """On the running event loop. `end` is called once, on it, with the cause: whoever gave it ends the process.

    `build` makes the executor, on the step thread; None: the function that `spec.executor` names. `words`: where it
    says what it is about and why it ends; None: nowhere.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        end: Callable[[str], None],
        build: Callable[[RuntimeOptions], Executor] | None = None,
        words: LastWords | None = None,
    ) -> None:
        self._spec = spec
        self._end = end
        self._build = build
        self._words = words
        self._steps = StepThread(f"step-{spec.worker}")
        self._server: grpc.aio.Server | None = None
        self._service: WorkerService | None = None
        self._mailbox: Mailbox | None = None
        self._endpoint: WorkerEndpoint | None = None
        self._starting: asyncio.Task[WorkerEndpoint] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._heard_s = time.monotonic()

    @property
    def endpoint(self) -> WorkerEndpoint | None:
        """None while it is not ready."""
        return self._endpoint

    async def start(self) -> WorkerEndpoint:
        """Load, capture, bind, serve. Takes as long as the model does. A second call returns the same endpoint.

        Raises `BadConfig` when the model, the device or the address cannot be used; then only `stop` is left to call.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port and let the step thread end. Idempotent."""
        tasks = [task for task in (self._watching, self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)
        self._steps.stop()
        if self._mailbox is not None:
            self._mailbox.close()

    async def _start(self) -> WorkerEndpoint:
        spec, began_s = self._spec, time.monotonic()
        logger.info("worker starts worker=%s pid=%d model=%s", spec.worker, os.getpid(), spec.runtime.model)
        self._steps.start()
        runner = await self._steps.call(self._make_runner)
        _check_limits(runner.capability, spec.link.max_message_bytes)
        health = StepHealth(spec.hang_timeout_s, time.monotonic())
        self._mailbox = mailbox = Mailbox(asyncio.get_running_loop())
        service = WorkerService(runner, self._steps, health, mailbox, spec.link, self._fail)
        serving = grpc_health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        interceptor = SecretInterceptor(spec.secret, self._hear)
        server = grpc.aio.server(interceptors=(interceptor,), options=spec.link.server_options)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(serving, server)
        try:
            address = bind(server, spec.host, spec.link)
        except BadConfig as error:
            raise BadConfig(f"worker {spec.worker}: {error}") from error
        await server.start()
        self._server, self._service = server, service
        self._endpoint = WorkerEndpoint(
            worker=spec.worker,
            address=address,
            incarnation=runner.capability.incarnation,
            pid=os.getpid(),
            device=runner.capability.device,
            revision=spec.revision,
        )
        self._hear()
        self._watching = asyncio.create_task(self._watch(runner, service, health, serving.set))
        logger.info(
            "worker ready worker=%s address=%s incarnation=%s device=%s usable_cells=%d start_s=%.1f",
            spec.worker,
            self._endpoint.address,
            self._endpoint.incarnation,
            self._endpoint.device,
            runner.capability.usable_cells,
            time.monotonic() - began_s,
        )
        return self._endpoint

    def _make_runner(self) -> StepRunner:
        build = self._build or load_executor_factory(self._spec.executor)
        kept_results = self._spec.link.max_unanswered_steps
        return StepRunner(build(self._spec.runtime), kept_results, words=self._words)

    # --- while it serves ---

    def _hear(self) -> None:
        self._heard_s = time.monotonic()

    async def _watch(
        self,
        runner: StepRunner,
        service: WorkerService,
        health: StepHealth,
        show: Callable[[str, health_pb2.HealthCheckResponse.ServingStatus], Awaitable[None]],
    ) -> None:
        spec = self._spec
        period_s = max(0.01, min(1.0, spec.hang_timeout_s / 10, spec.orphan_timeout_s / 10))
        shown: bool | None = None
        while True:
            now_s = time.monotonic()
            if health.wants_probe(now_s):
                self._probe(runner, health)
            if shown is not (is_serving := health.serving(now_s)):
                shown = is_serving
                status = health_pb2.HealthCheckResponse.SERVING if shown else health_pb2.HealthCheckResponse.NOT_SERVING
                for name in ("", SERVICE_NAME):
                    await show(name, status)
                if not shown:
                    logger.warning("no step finishes worker=%s within_s=%g", spec.worker, spec.hang_timeout_s)
            if service.has_stream:
                self._hear()
            elif now_s - self._heard_s > spec.orphan_timeout_s:
                self._fail(f"no driver was heard for {spec.orphan_timeout_s:g} s")
                return
            await asyncio.sleep(period_s)

    def _probe(self, runner: StepRunner, health: StepHealth) -> None:
        mailbox = self._mailbox
        assert mailbox is not None

        def probe() -> None:
            if runner.probe():
                mailbox.post(health.probed, time.monotonic())
            elif runner.failure is not None:
                mailbox.post(self._fail, runner.failure)

        self._steps.submit(probe)

    def _fail(self, cause: str) -> None:
        if self._ending is None:
            logger.error("worker ends worker=%s cause=%r", self._spec.worker, cause)
            if self._words is not None:
                self._words.say(cause)
            self._ending = asyncio.create_task(self._finish(cause))

    async def _finish(self, cause: str) -> None:
        # Stopping lets an open stream write the answer that tells of the failure; it ends behind that answer.
        if self._service is not None:
            self._service.close(cause)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(LAST_WORDS_S)
        self._steps.stop()
        self._end(cause)


class WorkerActor:
    """The Ray actor: `ray.remote(WorkerActor).options(lifetime="detached", max_restarts=0, …).remote(spec)`.

    An async actor whose constructor is cheap. `max_restarts=0`: the driver supervises; a new life is a new actor.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            logger.info("niceness %d: others go first; RAY_worker_niceness=0 where Ray is started ends that", niceness)
        self._stages = StageListener()
        logging.getLogger("microtome.runtime").addHandler(self._stages)
        self._spec = spec
        self._process: WorkerProcess | None = None
        self._words = _begin_words(spec)

    async def trace(self) -> Trace:
        """Where to look for what becomes of this process."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return Trace(node=node, pid=os.getpid(), words="" if self._words is None else str(self._words.path))

    async def start(self) -> WorkerEndpoint:
        """Load, capture, bind, serve. Takes as long as the model does. A second call returns the same endpoint.

        Raises `BadConfig` with nothing left behind but this actor, which can only be killed. An empty `spec.host`
        binds to the node's address.
        """
        if self._process is None:
            spec = replace(self._spec, host=self._spec.host or _node_address())
            self._process = WorkerProcess(spec, _exit, words=self._words)
        return await self._process.start()

    async def endpoint(self) -> WorkerEndpoint | None:
        """None while it is not ready: for a driver that has restarted and looks for its workers by name."""
        return None if self._process is None else self._process.endpoint

    async def stage(self) -> Stage | None:
        """What `start` is about; None: nothing that takes time yet."""
        return self._stages.newest

    async def life(self) -> None:
        """Never returns: the call fails when the process ends, which is how Ray tells the driver of it."""
        await asyncio.Event().wait()


def load_executor_factory(name: str) -> Callable[[RuntimeOptions], Executor]:
    """The function that "module:function" names. Raises `BadConfig` when there is none."""
    module, _, function = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadConfig(f"executor {name!r} cannot be loaded: {error}") from error
    return cast(Callable[[RuntimeOptions], Executor], factory)


def _check_limits(capability: Capability, max_message_bytes: int) -> None:
    sequence_bytes = BYTES_PER_TOKEN * capability.max_session_tokens
    if sequence_bytes > max_message_bytes:
        raise BadConfig(
            f"max_message_bytes {max_message_bytes} is below the {sequence_bytes} that a sequence of "
            f"max_session_tokens {capability.max_session_tokens} can take in a snapshot"
        )


def _begin_words(spec: WorkerSpec) -> LastWords | None:
    """Beside the logs of this node. A worker that cannot write any works all the same."""
    from microtome.actors import ray_private  # here, so that a worker without Ray needs none

    try:
        words = LastWords(ray_private.logs_folder() / f"{spec.worker}-{os.getpid()}.last-words")
    except OSError as error:
        logger.warning("no last words are kept worker=%s cause=%r", spec.worker, str(error))
        return None
    words.heed_crashes()
    return words


def _node_address() -> str:
    import ray  # here, so that a worker without Ray needs none

    return str(ray.util.get_node_ip_address())


def _exit(cause: str) -> None:
    """End the process now: a device in an unknown state must not be touched by an orderly exit."""
    logging.shutdown()
    os._exit(1)
