"""The client for asyncio. One client is one connection, used from one event loop; any number of tasks may share it.

What both clients know lies in `call`, `sampling` and `answers`; here is only the waiting.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.answers import Completion, Model, ServiceStatus, Update, completion_of, model_of, status_of
from microtome.call import CLOSED, CLOSED_MEANWHILE, Call, Readiness, channel_options
from microtome.errors import Cancelled, ClientClosed
from microtome.retry import Retry
from microtome.sampling import GenerateOptions, Message, positive_seconds, request_of, timeout_of
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc

__all__ = ["AsyncClient", "AsyncGeneration"]


class AsyncClient:
    """A connection to a service at `address`, "host:port"; it is dialled by the first call, in the loop of that call.

    `credentials`: of `grpc.ssl_channel_credentials(...)` for TLS; None: plain text. `call_timeout_s` limits every call
    but `generate` and `complete`, which take a `timeout_s` of their own.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retry: Retry | None = None,
        call_timeout_s: float = 10.0,
    ) -> None:
        self.address = address
        self._options = channel_options(address)
        self._credentials = credentials
        self._retry = Retry() if retry is None else retry
        self._call_timeout_s = positive_seconds("call_timeout_s", call_timeout_s)
        self._closed = False
        self._channel: grpc.aio.Channel | None = None  # made by the first call: a channel belongs to a loop

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "AsyncGeneration":
        """Start generating after a prompt: text, chat messages or token ids. Iterate over the answer for its updates.

        Called in a running loop, without await; the call is on its way when this returns. `options` are those of
        `GenerateOptions`: max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids, ignore_eos,
        generation_id, priority, timeout_s.

        Leaving the iteration before its end, however, ends the generation on the service.

        Raises InvalidRequest for what cannot be sent; the iteration raises what the service refuses or fails with.
        """
        request = request_of(prompt, messages, token_ids, options)
        call = Call(self.address, self._retry, timeout_of(options))
        stub = generation_pb2_grpc.GenerationStub(self._connection())
        return AsyncGeneration(stub.Generate, request, call)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, waited for and joined."""
        async with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            return completion_of([update async for update in generation])

    async def cancel(self, generation_id: str) -> None:
        """End a generation, whoever started it. Raises NotFound when no such generation is running."""
        await self._unary("Cancel", pb.CancelRequest(generation_id=generation_id))

    async def model(self) -> Model:
        """What is served."""
        return model_of(await self._unary("GetModel", pb.GetModelRequest()))

    async def status(self) -> ServiceStatus:
        """How the service is: workers, load, counters."""
        return status_of(await self._unary("Status", pb.StatusRequest()))

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service says that it serves. Raises DeadlineExceeded with the last reason why not."""
        readiness = Readiness(self.address, positive_seconds("timeout_s", timeout_s))
        request = health_pb2.HealthCheckRequest()
        while True:
            stub: Any = health_pb2_grpc.HealthStub(self._connection())
            try:
                answer = await stub.Check(request, timeout=readiness.check_timeout_s())
            except grpc.RpcError as failure:
                wait_s = readiness.failed(failure)
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                wait_s = readiness.not_serving()
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Close the connection; what is under way is cancelled. May be called twice."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, name: str, request: Any) -> Any:
        call = Call(self.address, self._retry, self._call_timeout_s)
        while True:
            method = getattr(generation_pb2_grpc.GenerationStub(self._connection()), name)
            try:
                return await method(request, timeout=call.remaining_s())
            except grpc.RpcError as failure:
                wait_s = call.failed(failure)
            except asyncio.CancelledError as cancelled:
                if _task_is_cancelled():
                    raise
                raise Cancelled(CLOSED_MEANWHILE, "CANCELLED") from cancelled
            except grpc.aio.UsageError as error:
                raise ClientClosed(CLOSED) from error
            await asyncio.sleep(wait_s)

    def _connection(self) -> grpc.aio.Channel:
        if self._closed:
            raise ClientClosed(CLOSED)
        if self._channel is None:
            asyncio.get_running_loop()  # a plain RuntimeError outside of a loop; gRPC would take some other loop
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, self._options)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, self._options)
        return self._channel


class AsyncGeneration(AsyncIterator[Update]):
    """The updates of one generation, in order. Closing it, or letting go of it, ends the generation.

    One task iterates; `close` may be called from any task of the loop.
    """

    def __init__(self, method: Callable[..., Any], request: pb.GenerateRequest, call: Call) -> None:
        self._method, self._request, self._call = method, request, call
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._start()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        while not self._closed.is_set():
            try:
                return self._call.received(await anext(self._messages))
            except StopAsyncIteration:
                self._closed.set()
                self._call.ended()
            except grpc.RpcError as failure:
                if self._closed.is_set() or self._call.finished:  # we hung up; or the last message had come
                    break
                await self._try_again(failure)
            except asyncio.CancelledError as cancelled:
                if _task_is_cancelled():
                    self.close()
                    raise
                if self._closed.is_set():
                    break
                self._closed.set()
                raise Cancelled(CLOSED_MEANWHILE, "CANCELLED") from cancelled
            except BaseException:
                self.close()
                raise
        raise StopAsyncIteration

    def close(self) -> None:
        """End the generation, if it has not ended. Nothing comes after it."""
        self._closed.set()
        self._rpc.cancel()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run in any thread; and a loop that is closed has taken its calls along.
        if hasattr(self, "_rpc") and not self._rpc.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rpc.cancel)

    def _start(self) -> None:
        try:
            self._rpc = self._method(self._request, timeout=self._call.remaining_s())
        except grpc.aio.UsageError as error:
            self._closed.set()
            raise ClientClosed(CLOSED) from error
        self._messages = aiter(self._rpc)

    async def _try_again(self, failure: grpc.RpcError) -> None:
        try:
            wait_s = self._call.failed(failure)
        except BaseException:
            self._closed.set()
            raise
        try:
            await asyncio.wait_for(self._closed.wait(), wait_s)
        except TimeoutError:
            self._start()


def _task_is_cancelled() -> bool:
    """Tells a cancelled task from a cancelled call: for both, gRPC raises CancelledError in the task that waits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
