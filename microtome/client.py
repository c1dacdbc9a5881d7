"""The client for plain code. One client is one connection; any number of threads may share it.

What both clients know lies in `call`, `sampling` and `answers`; here is only the waiting.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.answers import Completion, Model, ServiceStatus, Update, completion_of, model_of, status_of
from microtome.call import CLOSED, Call, Readiness, channel_options
from microtome.errors import ClientClosed
from microtome.retry import Retry
from microtome.sampling import GenerateOptions, Message, positive_seconds, request_of, timeout_of
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc

__all__ = ["Client", "Generation"]

_Answer = TypeVar("_Answer")


class Client:
    """A connection to a service at `address`, "host:port"; it is dialled by the first call.

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
        self._retry = Retry() if retry is None else retry
        self._call_timeout_s = positive_seconds("call_timeout_s", call_timeout_s)
        self._closed = threading.Event()
        options = channel_options(address)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "Generation":
        """Start generating after a prompt: text, chat messages or token ids. Iterate over the answer for its updates.

        The call is on its way when this returns. `options` are those of `GenerateOptions`: max_new_tokens, temperature,
        top_k, top_p, min_p, seed, stop_token_ids, ignore_eos, generation_id, priority, timeout_s.

        Leaving the iteration before its end, however, ends the generation on the service.

        Raises InvalidRequest for what cannot be sent; the iteration raises what the service refuses or fails with.
        """
        request = request_of(prompt, messages, token_ids, options)
        call = Call(self.address, self._retry, timeout_of(options))
        self._refuse_if_closed()
        return Generation(self._stub.Generate, request, call)

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, waited for and joined."""
        with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            return completion_of(generation)

    def cancel(self, generation_id: str) -> None:
        """End a generation, whoever started it. Raises NotFound when no such generation is running."""
        self._unary(self._stub.Cancel, pb.CancelRequest(generation_id=generation_id))

    def model(self) -> Model:
        """What is served."""
        return model_of(self._unary(self._stub.GetModel, pb.GetModelRequest()))

    def status(self) -> ServiceStatus:
        """How the service is: workers, load, counters."""
        return status_of(self._unary(self._stub.Status, pb.StatusRequest()))

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the service says that it serves. Raises DeadlineExceeded with the last reason why not."""
        readiness = Readiness(self.address, positive_seconds("timeout_s", timeout_s))
        request = health_pb2.HealthCheckRequest()
        while True:
            self._refuse_if_closed()
            try:
                answer = self._health.Check(request, timeout=readiness.check_timeout_s())
            except grpc.RpcError as failure:
                wait_s = readiness.failed(failure)
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                wait_s = readiness.not_serving()
            self._closed.wait(wait_s)

    def close(self) -> None:
        """Close the connection; what is under way is cancelled. May be called twice, and from any thread."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Callable[..., _Answer], request: Any) -> _Answer:
        call = Call(self.address, self._retry, self._call_timeout_s)
        while True:
            self._refuse_if_closed()
            try:
                return method(request, timeout=call.remaining_s())
            except grpc.RpcError as failure:
                wait_s = call.failed(failure)
            except ValueError as error:  # closed since we looked
                raise ClientClosed(CLOSED) from error
            self._closed.wait(wait_s)

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise ClientClosed(CLOSED)


class Generation(Iterator[Update]):
    """The updates of one generation, in order. Closing it, or letting go of it, ends the generation.

    One thread iterates; `close` may be called from any.
    """

    def __init__(self, method: Callable[..., Any], request: pb.GenerateRequest, call: Call) -> None:
        self._method, self._request, self._call = method, request, call
        self._closed = threading.Event()
        self._rpc: Any = None
        self._rpc = self._start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Update:
        while not self._closed.is_set():
            try:
                return self._call.received(next(self._rpc))
            except StopIteration:
                self._closed.set()
                self._call.ended()
            except grpc.RpcError as failure:
                if self._closed.is_set() or self._call.finished:  # we hung up; or the last message had come
                    break
                self._try_again(failure)
            except BaseException:  # an interrupt while we wait
                self.close()
                raise
        raise StopIteration

    def close(self) -> None:
        """End the generation, if it has not ended. Nothing comes after it."""
        self._closed.set()
        if self._rpc is not None:
            self._rpc.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> Any:
        try:
            return self._method(self._request, timeout=self._call.remaining_s())
        except ValueError as error:
            self._closed.set()
            raise ClientClosed(CLOSED) from error

    def _try_again(self, failure: grpc.RpcError) -> None:
        try:
            wait_s = self._call.failed(failure)
        except BaseException:
            self._closed.set()
            raise
        if not self._closed.wait(wait_s):
            self._rpc = self._start()
            if self._closed.is_set():  # closed between the two lines above
                self._rpc.cancel()
