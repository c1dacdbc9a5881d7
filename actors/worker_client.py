"""The driver's end of one worker's link: sends plans, posts what comes back as events, says when the worker is gone.

One per incarnation. All calls on the driver's event loop; none but `connect` and `close` waits.

Posts through `post`, in step order: `StepDone` and `StepFailed`; then, once and last, `WorkerGone` with the cause.
After that, or after `close`, it posts nothing more, so a fenced incarnation's late answers are dropped here.

A broken stream is opened again under the same incarnation, and the steps without an answer are sent again, by their
numbers: the worker answers those it has run from their stored results. A worker is gone when the stream cannot be had
back within `reconnect_timeout_s` or breaks again before it brought an answer; when the worker ends it with a status;
when a step failed on it; when the process behind it is known to be dead (`process_ended`); and when it hangs: no result
within `hang_timeout_s` beside the step's predicted time.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from microtome.actors.connection import open_channel
from microtome.actors.link import INCARNATION_KEY, SECRET_KEY, TAKEN_OVER, LinkSettings, WorkerEndpoint
from microtome.actors.remains import Loss
from microtome.actors.wire import (
    Snapshot,
    StepFault,
    answer_from_message,
    capability_from_message,
    plan_to_message,
    snapshot_from_messages,
)
from microtome.planner.errors import BadInput, WorkerLost
from microtome.planner.events import StepDone, StepFailed, WorkerGone, WorkerJoined
from microtome.planner.types import Capability, StepNumber, StepPlan
from microtome.v1 import worker_pb2 as pb
from microtome.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05  # between tries to get a stream back

# What gRPC says of a broken connection, depending on what was under way. A worker that means it says ABORTED.
BROKEN_LINK = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)

StepsCall = grpc.aio.StreamStreamCall[pb.StepPlan, pb.StepResult]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A plan without an answer. The message is kept: it may have to be sent again.

    `refusal`: why it was not sent; it waits for its turn to be posted as refused.
    """

    plan: StepPlan
    message: pb.StepPlan
    at_s: float
    predicted_s: float
    refusal: str | None = None


class _Broken(Exception):
    """The stream ended. `final`: the worker meant it, or there is nobody to try again with."""

    def __init__(self, cause: str, *, final: bool, loss: Loss = Loss.LINK) -> None:
        super().__init__(cause)
        self.final, self.loss = final, loss


class WorkerClient:
    def __init__(
        self,
        endpoint: WorkerEndpoint,
        secret: str,
        *,
        link: LinkSettings,
        hang_timeout_s: float,
        post: Callable[[StepDone | StepFailed | WorkerGone], None],
        now_us: Callable[[], int],
    ) -> None:
        self._endpoint = endpoint
        self._metadata = ((SECRET_KEY, secret),)
        self._link = link
        self._hang_timeout_s = hang_timeout_s
        self._post = post
        self._now_us = now_us
        self._capability: Capability | None = None
        self._channel: grpc.aio.Channel | None = None
        self._unanswered: deque[_Sent] = deque()  # oldest first
        self._outbox: asyncio.Queue[pb.StepPlan] | None = None  # None while there is no stream
        self._answered_s = 0.0  # when the newest answer came, on the loop's clock
        self._answers = 0
        self._hang_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._gone: str | None = None
        self._loss = Loss.LINK
        self._closed = False

    @property
    def endpoint(self) -> WorkerEndpoint:
        return self._endpoint

    @property
    def gone(self) -> str | None:
        """Why it is gone; None while it is not."""
        return self._gone

    @property
    def loss(self) -> Loss:
        """How it went, once it is gone: as far as this end of the link can tell."""
        return self._loss

    async def connect(self) -> WorkerJoined:
        """Describe, open the step stream (which ends any other driver's), take the snapshot.

        The event is returned, not posted. Raises `WorkerLost` naming address and cause, with nothing left
        open, and `BadConfig` for a TLS file that cannot be read.
        """
        assert self._channel is None, "one client connects once"
        self._channel = open_channel(self._endpoint.address, self._link)
        try:
            capability = await self._describe(self._channel)
            call = await self._open(self._channel, self._link.call_timeout_s)
            try:
                snapshot = await self._snapshot()
            except BaseException:
                call.cancel()
                raise
        except (grpc.aio.AioRpcError, _Broken, BadInput, TimeoutError) as error:
            await self.close()
            raise WorkerLost(f"worker {self._endpoint.worker} at {self._endpoint.address}: {_cause(error)}") from error
        except BaseException:
            await self.close()
            raise
        self._capability = capability
        self._task = asyncio.create_task(self._run(self._channel, call))
        return WorkerJoined(
            at_us=self._now_us(),
            worker=self._endpoint.worker,
            capability=capability,
            held=snapshot.sequences,
            last_step=snapshot.last_step,
        )

    def send(self, plan: StepPlan) -> None:
        """Put the plan on the stream, behind those before it. Never blocks; a worker that is gone gets nothing.

        A plan over the link's message limit is not sent: it is posted as refused.
        """
        if self._gone is not None or self._closed:
            return
        message = plan_to_message(plan)
        size, limit = message.ByteSize(), self._link.max_message_bytes
        refusal = None if size <= limit else f"the plan takes {size} bytes, max_message_bytes is {limit}"
        self._unanswered.append(_Sent(plan, message, self._loop_s(), self._predicted_s(plan), refusal))
        if refusal is not None:
            # Not from here: the caller is in the middle of carrying out instructions.
            asyncio.get_running_loop().call_soon(self._refuse_unsent)
        elif self._outbox is not None:
            self._outbox.put_nowait(message)
        if self._hang_timer is None:
            self._watch_for_hang()

    def process_ended(self, cause: str) -> None:
        """The process behind it is known to be dead: gone at once, without waiting for a time-out."""
        self._lose(cause, Loss.DIED)

    async def close(self) -> None:
        """Close stream and channel; post nothing more. Idempotent. The worker itself lives on."""
        self._closed = True
        self._let_go()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    # --- the calls ---

    async def _describe(self, channel: grpc.aio.Channel) -> Capability:
        stub = worker_pb2_grpc.WorkerStub(channel)
        message = await stub.Describe(pb.DescribeRequest(), timeout=self._link.call_timeout_s, metadata=self._metadata)
        capability = capability_from_message(message)
        if capability.incarnation != self._endpoint.incarnation:
            raise _Broken(f"incarnation {capability.incarnation} answers, not {self._endpoint.incarnation}", final=True)
        return capability

    async def _snapshot(self) -> Snapshot:
        # A connection of its own: a full pool's transcripts are megabytes, and plans must not wait behind them.
        async with open_channel(self._endpoint.address, self._link) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.Snapshot(pb.SnapshotRequest(), timeout=self._link.call_timeout_s, metadata=self._metadata)
            snapshot = snapshot_from_messages([message async for message in call])
        if snapshot.incarnation != self._endpoint.incarnation:
            raise _Broken(f"incarnation {snapshot.incarnation} answers, not {self._endpoint.incarnation}", final=True)
        return snapshot

    async def _open(self, channel: grpc.aio.Channel, timeout_s: float) -> StepsCall:
        """An accepted step stream. Raises `_Broken`."""
        call: StepsCall = worker_pb2_grpc.WorkerStub(channel).Steps(metadata=self._metadata)
        try:
            async with asyncio.timeout(timeout_s):
                metadata = dict(await call.initial_metadata())
        except TimeoutError as error:
            call.cancel()
            raise _Broken(f"it accepts no step stream within {timeout_s:g} s", final=False) from error
        except BaseException:
            call.cancel()
            raise
        if INCARNATION_KEY not in metadata:
            raise await _ending(call)
        if metadata[INCARNATION_KEY] != self._endpoint.incarnation:
            call.cancel()
            raise _Broken(
                f"incarnation {metadata[INCARNATION_KEY]!r} answers, not {self._endpoint.incarnation}", final=True
            )
        return call

    # --- while it is connected ---

    async def _run(self, channel: grpc.aio.Channel, call: StepsCall) -> None:
        answers_at_break = -1
        while True:
            broken = await self._pump(call)
            # A stream that breaks twice over the same step would do so for ever.
            again = bool(self._unanswered) and answers_at_break == self._answers
            if broken.final or again:
                self._lose(str(broken), broken.loss)
                return
            answers_at_break = self._answers
            logger.warning("stream broken worker=%s cause=%r", self._endpoint.worker, str(broken))
            try:
                call = await self._reopen(channel)
            except _Broken as still:
                self._lose(f"{broken}; then {still}", still.loss)
                return
            logger.info("stream reopened worker=%s unanswered=%d", self._endpoint.worker, len(self._unanswered))

    async def _reopen(self, channel: grpc.aio.Channel) -> StepsCall:
        deadline_s = self._loop_s() + self._link.reconnect_timeout_s
        while True:
            try:
                return await self._open(channel, max(0.0, deadline_s - self._loop_s()))
            except _Broken as broken:
                # Nobody listens where it did: its process has ended, and waiting will not bring it back.
                refused = "Connection refused" in str(broken)
                if refused:
                    raise _Broken(str(broken), final=True, loss=Loss.DIED) from broken
                if broken.final or self._loop_s() + RETRY_PAUSE_S >= deadline_s:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _pump(self, call: StepsCall) -> _Broken:
        """Send and receive until the stream ends; returns how it did."""
        outbox: asyncio.Queue[pb.StepPlan] = asyncio.Queue()
        for sent in self._unanswered:
            if sent.refusal is None:
                outbox.put_nowait(sent.message)
        self._outbox = outbox
        writing = asyncio.create_task(_write(call, outbox))
        try:
            while True:
                message = await call.read()
                if not isinstance(message, pb.StepResult):  # grpc.aio.EOF
                    return await _ending(call)
                broken = self._take(message)
                if broken is not None:
                    return broken
        except grpc.aio.AioRpcError:
            return await _ending(call)
        finally:
            self._outbox = None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            call.cancel()

    def _take(self, message: pb.StepResult) -> _Broken | None:
        """Post the answer. Returns why there can be no other, if so."""
        try:
            answer = answer_from_message(message)
        except BadInput as error:
            return _Broken(f"an answer cannot be read: {error}", final=True)
        expected = self._unanswered[0].plan if self._unanswered else None
        if expected is None or (answer.incarnation, answer.step) != (expected.incarnation, expected.step):
            waited = "none" if expected is None else f"step {expected.step} of {expected.incarnation}"
            return _Broken(f"it answers step {answer.step} of {answer.incarnation}, {waited} was due", final=True)
        self._unanswered.popleft()
        self._answered_s = self._loop_s()
        self._answers += 1
        if isinstance(answer, StepFault):
            if not answer.refused:
                self._loss = Loss.FAILED  # before the driver hears of it, and gives the worker up
            self._post_failed(answer.step, answer.refused, answer.message)
            if not answer.refused:
                return _Broken(f"step {answer.step} failed: {answer.message}", final=True, loss=Loss.FAILED)
        else:
            self._post(StepDone(at_us=self._now_us(), worker=self._endpoint.worker, result=answer))
        self._refuse_unsent()
        return None

    def _refuse_unsent(self) -> None:
        """Post the refusals whose turn it is."""
        while self._unanswered and (refusal := self._unanswered[0].refusal) is not None:
            self._post_failed(self._unanswered.popleft().plan.step, True, refusal)

    def _post_failed(self, step: StepNumber, refused: bool, message: str) -> None:
        self._post(
            StepFailed(
                at_us=self._now_us(),
                worker=self._endpoint.worker,
                incarnation=self._endpoint.incarnation,
                step=step,
                refused=refused,
                message=message,
            )
        )

    # --- hangs, and the end ---

    def _predicted_s(self, plan: StepPlan) -> float:
        """What the worker's own measured costs say the step takes; 0 where nothing was measured."""
        assert self._capability is not None, "a plan is sent before `connect`"
        methods, microseconds = self._capability.table.methods, 0.0
        for method, length in zip(plan.slice_methods, plan.slice_lengths, strict=True):
            if method < len(methods):
                microseconds += methods[method].cost_us + methods[method].cost_ns_per_token * length / 1000
        return microseconds / 1e6

    def _watch_for_hang(self) -> None:
        """Look at the oldest step without an answer now, and again when it would be overdue."""
        self._hang_timer = None
        if not self._unanswered or self._gone is not None or self._closed:
            return
        oldest = self._unanswered[0]
        # It begins when it is there and the step before has ended.
        due_s = max(oldest.at_s, self._answered_s) + self._hang_timeout_s + oldest.predicted_s
        now_s = self._loop_s()
        if now_s >= due_s:
            waited_s = now_s - max(oldest.at_s, self._answered_s)
            self._lose(f"hung: step {oldest.plan.step} has no result after {waited_s:.1f} s", Loss.HUNG)
            return
        self._hang_timer = asyncio.get_running_loop().call_later(due_s - now_s, self._watch_for_hang)

    def _lose(self, cause: str, loss: Loss) -> None:
        if self._gone is not None or self._closed:
            return
        self._gone, self._loss = cause, loss
        logger.warning("worker gone worker=%s cause=%r", self._endpoint.worker, cause)
        self._let_go()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._channel is not None:
            self._closing = asyncio.create_task(self._channel.close(None))
        self._post(
            WorkerGone(
                at_us=self._now_us(),
                worker=self._endpoint.worker,
                incarnation=self._endpoint.incarnation,
                cause=cause,
            )
        )

    def _let_go(self) -> None:
        self._outbox = None
        self._unanswered.clear()
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()


async def _write(call: StepsCall, outbox: asyncio.Queue[pb.StepPlan]) -> None:
    # How the stream ended is the reader's to say.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.get())


async def _ending(call: StepsCall) -> _Broken:
    """How a stream that is over ended."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        return _Broken("it closed the step stream", final=True)
    failed = code is grpc.StatusCode.ABORTED and details != TAKEN_OVER
    loss = Loss.FAILED if failed else Loss.LINK
    return _Broken(f"{code.name}: {details}", final=code not in BROKEN_LINK, loss=loss)


def _cause(error: Any) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no answer in time"
