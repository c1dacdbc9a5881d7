"""The client for plain code. One client is one connection; any number of threads may share it.

What both clients know lies in `call`, `sampling` and `answers`; here is only the waiting.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.answers import (
    Completion,
    ListedGeneration,
    Model,
    ServiceStatus,
    Update,
    Whereabouts,
    completion_of,
    listed_of,
    model_of,
    status_of,
    whereabouts_of,
)
from microtome.call import CANCEL_S, CLOSED, Call, Contact, Readiness, channel_options
from microtome.errors import ClientClosed, MicrotomeError, NotFound
from microtome.generation_call import GenerationCall
from microtome.retry import Retry
from microtome.sampling import (
    GenerateOptions,
    Message,
    named_generation,
    one_only,
    positive_seconds,
    request_of,
    resume_request_of,
    scale_request_of,
    seconds_or_none,
    token_count_of,
)
from microtome.session_requests import clone_request_of, generate_request_of, open_request_of, rewind_request_of
from microtome.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from microtome.v1 import generation_pb2 as pb

__all__ = ["Client", "Generation", "Session"]

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
        self._contact = Contact()
        self._call_timeout_s = positive_seconds("call_timeout_s", call_timeout_s)
        self._closed = threading.Event()
        self._cancelling: set[Any] = set()  # gRPC futures: one that is let go of is not sent
        options = channel_options(address)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
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
        top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
        allowed_token_ids, banned_token_ids, min_new_tokens, stop, stop_token_ids, ignore_eos, logprobs,
        prompt_logprobs, generation_id, resumable, n, priority, tenant,
        cache_salt, ttft_target_s, timeout_s. With `n` updates say by their `index` to which completion they belong.

        Leaving the iteration before its end, however, ends the generation on the service.

        Raises InvalidRequest for what cannot be sent; the iteration raises what the service refuses or fails with.
        """
        return self._generation(request_of(prompt, messages, token_ids, options), options.get("timeout_s"))

    def resume(
        self, generation_id: str, offset: int | Sequence[int | None] = 0, *, timeout_s: float | None = None
    ) -> "Generation":
        """Go on with a generation from its token `offset` on: the number of tokens the caller has.

        Of several completions, every one from that token on; or, with a list, each from its own, and those for which it
        has None not at all. It is taken over from whoever else may be reading it. Raises NotFound, in the iteration,
        when it is not known: never started, started without `resumable`, or kept no longer.
        """
        return self._generation(resume_request_of(generation_id, offset), timeout_s)

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, waited for and joined. Raises InvalidRequest for an `n` above 1: see `completions`."""
        one_only(options)
        with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            return completion_of(generation)

    def completions(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Completion, ...]:
        """`generate` with an `n`, waited for: its completions by index, each joined."""
        with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            for _ in generation:
                pass
            return generation.completions

    def session(self, *, cache_salt: str = "", tenant: str = "") -> "Session":
        """Open a session: `with client.session() as session`. Whoever opens it closes it, or leaves its block.

        `cache_salt`: cached prefixes are shared between sessions of equal salt only. `tenant`: whose share its
        generations count against. Raises CapacityExhausted when as many sessions are open as may be.
        """
        return self._open("OpenSession", open_request_of(cache_salt, tenant))

    def cancel(self, generation_id: str) -> None:
        """End a generation, whoever started it. Raises NotFound when no such generation is running."""
        self._unary(self._stub.Cancel, pb.CancelRequest(generation_id=generation_id))

    def where(self, generation_id: str) -> tuple[Whereabouts, ...]:
        """Where a generation is, completion by completion: state, place in line, reason of waiting, forecast.

        Raises NotFound when no such generation is running or kept.
        """
        request = pb.WhereRequest(generation_id=named_generation(generation_id))
        return tuple(whereabouts_of(one) for one in (self._unary(self._stub.Where, request)).completions)

    def model(self) -> Model:
        """What is served."""
        return model_of(self._unary(self._stub.GetModel, pb.GetModelRequest()))

    def status(self) -> ServiceStatus:
        """How the service is: workers, load, counters."""
        return status_of(self._unary(self._stub.Status, pb.StatusRequest()))

    def queue(self, limit: int = 0) -> tuple[ListedGeneration, ...]:
        """The generations that have not ended: those that wait, in the order in which they start, then those that run.

        `limit`: of entries, 256 at most; 0: 64. For operators, since whoever knows an id can cancel what it names.
        """
        request = admin_pb2.ListGenerationsRequest(limit=token_count_of("limit", limit))
        answer = self._once(self._admin.ListGenerations, request, self._call_timeout_s)
        return tuple(listed_of(one) for one in answer.generations)

    def drain(self, worker: str, *, timeout_s: float | None = None) -> None:
        """Take one worker out of service, and wait until its sessions have moved and its process has ended.

        `worker` as `status` names it. For operators. Raises NotFound when no such worker is ready; giving up the
        waiting, as DeadlineExceeded does, does not end the work.
        """
        self._once(self._admin.DrainWorker, admin_pb2.DrainWorkerRequest(worker=worker), timeout_s)

    def update(self, settings: Mapping[str, str], *, drain_first: bool = False, timeout_s: float | None = None) -> int:
        """Replace every worker by one with other settings, one after the other, and wait; no stream is dropped.

        `settings`: "model" and "runtime.…" as in a configuration. `drain_first`: give up a worker's place before asking
        for the next one, where none is spare. Returns the settings' revision. For operators. Raises WrongState for
        settings that cannot be, Unavailable when no worker starts with them: then nothing has changed.
        """
        request = admin_pb2.UpdateRequest(settings=settings, drain_first=drain_first)
        return int(self._once(self._admin.Update, request, timeout_s).revision)

    def scale(self, min_workers: int | None = None, max_workers: int | None = None) -> tuple[int, int]:
        """Keep between so many workers from now on; None: as it is. Returns the bounds in force.

        For operators. Raises WrongState for bounds that cannot be: then nothing has changed.
        """
        answer = self._once(self._admin.Scale, scale_request_of(min_workers, max_workers), self._call_timeout_s)
        return answer.min_workers, answer.max_workers

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
        with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            for cancelling in tuple(self._cancelling):
                cancelling.exception(CANCEL_S)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Callable[..., _Answer], request: Any) -> _Answer:
        call = Call(self.address, self._retry, self._call_timeout_s, self._contact)
        while True:
            self._refuse_if_closed()
            try:
                answer = method(request, timeout=call.remaining_s())
            except grpc.RpcError as failure:
                wait_s = call.failed(failure)
            except ValueError as error:  # closed since we looked
                raise ClientClosed(CLOSED) from error
            else:
                call.answered()
                return answer
            self._closed.wait(wait_s)

    def _open(self, method: str, request: Any) -> "Session":
        answer = self._once(getattr(self._stub, method), request, self._call_timeout_s)
        return Session(self, answer.session_id)

    def _once(self, method: Callable[..., _Answer], request: Any, timeout_s: float | None) -> _Answer:
        """A call that is not tried again: what it began may go on."""
        call = Call(self.address, self._retry, seconds_or_none("timeout_s", timeout_s))
        self._refuse_if_closed()
        try:
            return method(request, timeout=call.remaining_s())
        except grpc.RpcError as failure:
            raise call.error_of(failure) from failure
        except ValueError as error:  # closed since we looked
            raise ClientClosed(CLOSED) from error

    def _generation(self, request: pb.GenerateRequest | pb.ResumeRequest, timeout_s: float | None) -> "Generation":
        call = GenerationCall(
            request, self.address, self._retry, seconds_or_none("timeout_s", timeout_s), self._contact
        )
        self._refuse_if_closed()
        return Generation(self._stub, call, self._cancel_unwaited)

    def _cancel_unwaited(self, generation_id: str) -> None:
        """Send a `Cancel` and wait for its answer in `close` at the latest."""
        with contextlib.suppress(ValueError):  # closed already: there is no link to send it on
            cancelling = self._stub.Cancel.future(pb.CancelRequest(generation_id=generation_id), timeout=CANCEL_S)
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise ClientClosed(CLOSED)


class Generation(Iterator[Update]):
    """The updates of one generation, in order. Closing it, or letting go of it, ends the generation.

    One thread iterates; `close` and `detach` may be called from any.
    """

    def __init__(
        self, stub: generation_pb2_grpc.GenerationStub, call: GenerationCall, cancel: Callable[[str], None]
    ) -> None:
        self._stub, self._call, self._cancel = stub, call, cancel
        self._over = threading.Event()  # nothing comes any more
        self._rpc: Any = None
        self._start()

    @property
    def generation_id(self) -> str:
        """What to call it by in `cancel` and `resume`."""
        return self._call.generation_id

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions that have ended so far, by index, joined: all of them behind the last update.

        Of one that was resumed, what came from there on.
        """
        return self._call.completions

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Update:
        while not self._over.is_set():
            try:
                return self._call.received(next(self._rpc))
            except StopIteration:
                self._over.set()
                self._call.ended()
            except grpc.RpcError as failure:
                if self._over.is_set() or self._call.finished:  # we hung up; or the last message had come
                    break
                self._try_again(failure)
            except BaseException:  # an interrupt while we wait
                self.close()
                raise
        self._over.set()
        raise StopIteration

    def close(self) -> None:
        """End the generation, if it has not ended. Nothing comes after it. Does not wait for the service."""
        if self._over.is_set() or self._call.finished:
            self._over.set()
            return
        self.detach()
        if self._call.outlives_its_stream:
            self._cancel(self.generation_id)

    def detach(self) -> None:
        """Stop reading. A generation started with `resumable` goes on, for `resume`; any other one ends."""
        self._over.set()
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

    def _start(self) -> None:
        name, request = self._call.next_attempt()
        try:
            self._rpc = getattr(self._stub, name)(request, timeout=self._call.remaining_s())
        except ValueError as error:  # gRPC's word for a closed channel
            self._over.set()
            raise ClientClosed(CLOSED) from error

    def _try_again(self, failure: grpc.RpcError) -> None:
        try:
            wait_s = self._call.failed(failure)
        except BaseException:
            self._over.set()
            raise
        if not self._over.wait(wait_s):
            self._start()
            if self._over.is_set():  # closed between the two lines above
                self._rpc.cancel()


class Session:
    """A history of tokens on the service: each generation goes on behind it, and runs only what is new.

    One generation at a time. Chat messages are rendered by the model's chat template as they are, without the history:
    give those that are new, and mind that many templates put a system message or a beginning-of-text token before each
    list. A generation that was left early stays in the history as far as it came; `rewind` takes it back. None is asked
    for twice: where the connection is lost before its first update, the iteration raises Unavailable, and `length`
    tells whether anything was added.

    Leaving its block closes it. NotFound, from any of its methods: it was closed, or lost with the service's driver.
    """

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self._closed = False
        self.session_id = session_id

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """`generate` of the client, behind the history. Its updates raise WrongState while another one runs here."""
        request = generate_request_of(self.session_id, prompt, messages, token_ids, options)
        return self._client._generation(request, options.get("timeout_s"))

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, waited for and joined. Raises InvalidRequest for an `n` above 1: see `completions`."""
        one_only(options)
        with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            return completion_of(generation)

    def completions(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> tuple[Completion, ...]:
        """`generate` with an `n`, waited for: its completions by index, each joined."""
        with self.generate(prompt, messages=messages, token_ids=token_ids, **options) as generation:
            for _ in generation:
                pass
            return generation.completions

    def length(self) -> int:
        """Committed tokens, asked of the service.

        The last token that a generation brought is not among them until the next generation has run it.
        """
        request = pb.GetSessionRequest(session_id=self.session_id)
        return int(self._client._unary(self._client._stub.GetSession, request).length)

    def clone(self, upto: int | None = None) -> "Session":
        """Another session with this one's first `upto` committed tokens; None: with all.

        Raises InvalidRequest beyond its length, CapacityExhausted when as many sessions are open as may be.
        """
        return self._client._open("CloneSession", clone_request_of(self.session_id, upto))

    def rewind(self, position: int) -> None:
        """Keep the first `position` committed tokens of the history, and forget the rest.

        Raises InvalidRequest beyond its length and for 0, WrongState while a generation runs.
        """
        self._client._unary(self._client._stub.RewindSession, rewind_request_of(self.session_id, position))

    def close(self) -> None:
        """Forget the session; what it generates is cancelled. May be called twice, and when it is lost already."""
        if not self._closed:
            with contextlib.suppress(NotFound):
                self._client._unary(self._client._stub.CloseSession, pb.CloseSessionRequest(session_id=self.session_id))
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*(() if error is None else (MicrotomeError,))):  # the block's own error tells more
            self.close()
