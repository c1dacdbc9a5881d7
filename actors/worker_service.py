"""The worker's end of the link: converts, hands to the step thread, converts back. Decides nothing.

All on the event loop but `StepRunner`, which is the step thread's. Plans of a stream are decoded as they come and wait
at the step thread, so that step n + 1 is there when step n ends; answers leave in the order of the plans.

A stream that breaks changes nothing: plans that were accepted still run, and their results are kept for the repeat.
A newer stream ends the older one, so two drivers never take turns.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from microtome.actors.health import StepHealth
from microtome.actors.link import INCARNATION_KEY, SECRET_KEY, TAKEN_OVER, LinkSettings
from microtome.actors.mailbox import Mailbox
from microtome.actors.step_runner import StepRunner
from microtome.actors.step_thread import StepThread
from microtome.actors.wire import (
    StepFault,
    answer_to_message,
    capability_to_message,
    plan_from_message,
    snapshot_to_messages,
)
from microtome.planner.errors import BadInput
from microtome.planner.types import Incarnation, StepNumber, StepResult
from microtome.v1 import worker_pb2 as pb
from microtome.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets a call through when it carries the secret; `heard` is called for each that does. No method is exempt."""

    def __init__(self, secret: str, heard: Callable[[], None]) -> None:
        self._secret = secret.encode()
        self._heard = heard
        # One handler for every kind of method: it answers with a status before reading anything.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == SECRET_KEY]
        presented = given[0] if len(given) == 1 else b""
        presented = presented.encode() if isinstance(presented, str) else presented
        if not hmac.compare_digest(presented, self._secret):
            logger.warning("call refused method=%s cause=secret", handler_call_details.method)
            return self._refusal
        self._heard()
        return await continuation(handler_call_details)


async def _refuse(requests: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this worker answers to its own driver only")


@dataclass(frozen=True, slots=True)
class _Close:
    """Put among a stream's answers: there are no more. `cause` None: the driver has closed its side, all is well.

    With a cause the stream ends with ABORTED, which no broken link does: the driver takes it as meant.
    """

    cause: str | None = None


class _Stream:
    """One open `Steps` call. Answers wait here until they are written; nobody waits for a stream that is gone."""

    def __init__(self, max_accepted: int) -> None:
        self.answers: asyncio.Queue[StepResult | StepFault | _Close] = asyncio.Queue()
        self.room = asyncio.Semaphore(max_accepted)  # plans read and not yet answered


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`failed` is called, on the loop, when the device's state is unknown: the process has to end."""

    def __init__(
        self,
        runner: StepRunner,
        steps: StepThread,
        health: StepHealth,
        mailbox: Mailbox,
        link: LinkSettings,
        failed: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._steps = steps
        self._health = health
        self._link = link
        self._failed = failed
        self._mailbox = mailbox
        self._description = capability_to_message(runner.capability)
        self._stream: _Stream | None = None

    @property
    def has_stream(self) -> bool:
        """Is a driver's step stream open?"""
        return self._stream is not None

    def close(self, cause: str) -> None:
        """End the open stream, if any, behind the answers that are there."""
        if self._stream is not None:
            self._stream.answers.put_nowait(_Close(cause))

    # --- the calls ---

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return self._description

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> AsyncIterator[pb.SnapshotResponse]:
        snapshot = await self._steps.call(self._runner.snapshot)
        for message in snapshot_to_messages(snapshot, self._link.max_message_bytes):
            yield message

    async def Steps(self, requests: AsyncIterator[pb.StepPlan], context: Context) -> None:
        # One more than the driver may have unanswered: the next is decoded before the oldest is answered.
        stream = _Stream(self._link.max_unanswered_steps + 1)
        older, self._stream = self._stream, stream
        if older is not None:
            older.answers.put_nowait(_Close(TAKEN_OVER))
        logger.info("steps opened peer=%s", context.peer())
        reading = asyncio.create_task(self._read(requests, stream))
        try:
            await context.send_initial_metadata(((INCARNATION_KEY, self._runner.capability.incarnation),))
            await self._write(stream, context)
        finally:
            reading.cancel()
            if self._stream is stream:
                self._stream = None
            logger.info("steps closed peer=%s", context.peer())

    # --- a stream's two directions ---

    async def _read(self, requests: AsyncIterator[pb.StepPlan], stream: _Stream) -> None:
        try:
            while True:
                await stream.room.acquire()
                message = await anext(requests, None)
                if message is None or stream is not self._stream:
                    break
                self._accept(message, stream)
        finally:
            # Behind the answers still to come; without it the writer would wait for ever.
            self._steps.submit(lambda: self._post(stream, _Close()))

    async def _write(self, stream: _Stream, context: Context) -> None:
        while True:
            answer = await stream.answers.get()
            if isinstance(answer, _Close):
                if answer.cause is not None:
                    await context.abort(grpc.StatusCode.ABORTED, answer.cause)
                return
            await context.write(answer_to_message(answer))
            stream.room.release()
            if isinstance(answer, StepFault) and not answer.refused:
                return

    def _accept(self, message: pb.StepPlan, stream: _Stream) -> None:
        try:
            plan = plan_from_message(message)
        except BadInput as error:
            fault = StepFault(
                incarnation=Incarnation(message.incarnation.hex()),
                step=StepNumber(message.step),
                refused=True,
                message=str(error),
            )
            self._steps.submit(lambda: self._post(stream, fault))
            return

        def run() -> None:
            answer = self._runner.run(plan)
            self._post(stream, answer, time.monotonic())
            if self._runner.failure is not None:
                self._mailbox.post(self._failed, self._runner.failure)

        self._steps.submit(run)

    # --- from the step thread back to the loop ---

    def _post(self, stream: _Stream, answer: StepResult | StepFault | _Close, finished_s: float | None = None) -> None:
        self._mailbox.post(self._deliver, stream, answer, finished_s)

    def _deliver(self, stream: _Stream, answer: StepResult | StepFault | _Close, finished_s: float | None) -> None:
        if finished_s is not None:
            self._health.finished(finished_s)
        stream.answers.put_nowait(answer)
