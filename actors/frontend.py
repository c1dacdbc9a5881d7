"""The clients' end of the service: checks and translates calls, posts events, streams what `Control` emits.

Decides nothing. A call is checked whole before its one event is posted, so a refused call has changed nothing. Text is
tokenized and decoded on threads of its own; the rest runs on the driver's event loop. A client that hangs up is
cancelled at once, unless its generation is resumable.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from microtome.actors.requests import (
    Completion,
    ServedModel,
    check_label,
    check_numbers,
    check_prompt,
    completions_of,
    finished_before,
    generation_options,
    resume_offsets,
    session_of,
    text_prompt,
)
from microtome.actors.status import status_of
from microtome.actors.streams import Call, Listener, Stream, Streams, call_of
from microtome.actors.text import CONTEXT_TOKENS, ModelText
from microtome.actors.whereabouts import where_is
from microtome.planner.errors import BadInput, BatchingError, UnknownId
from microtome.planner.events import (
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    DeliverPrompt,
    Event,
    LookUpSession,
    OpenSession,
    Restored,
    RewindSession,
    SessionAnswer,
    SessionEvent,
    Submit,
)
from microtome.planner.status import Whereabouts
from microtome.planner.types import FinishReason, GenerationId, GenerationOptions, SessionId, Usage
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc

TOKENIZER_THREADS = 2
SEED_BITS = 64
UNCLAIMED_S = 30.0  # how long a restored generation runs without anybody resuming it

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
SessionContext = grpc.aio.ServicerContext[Any, Any]


class Host(Protocol):
    """What the front end needs of the driver."""

    def post(self, event: Event) -> None:
        """Queue the event for `Control`. Never blocks."""

    async def ask(self, question: SessionEvent) -> SessionAnswer:
        """Post the event, under a ticket of the host's, and wait for its answer.

        A session that is opened or cloned for a caller who is cancelled meanwhile is closed again.
        """

    def now_us(self) -> int: ...

    async def where(self, generations: Sequence[GenerationId]) -> Mapping[GenerationId, Whereabouts]:
        """Where they are once everything posted before has been handled; without those that have ended."""

    async def settled(self) -> None:
        """Waits, after a restart, until what an earlier driver left behind has been taken over."""

    async def model(self) -> ServedModel:
        """Waits while no worker has ever said what it serves."""

    def status(self) -> pb.StatusResponse: ...


class FrontEnd(rpc.GenerationServicer):
    """The `Generation` service."""

    def __init__(
        self, host: Host, load_text: Callable[[], ModelText] | None, *, retain_s: float, retain_tokens: int
    ) -> None:
        """Begins to load the text side at once, on the text thread: what is decoded waits behind it.

        `load_text` None: prompts are token ids, and responses have no text.
        """
        self._host = host
        self._encoders = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
        self._decoder = ThreadPoolExecutor(1, "detokenize")  # one thread: a stream's pieces stay in order
        # The text side by revision of the service's settings, and the newest revision that brought each model.
        self._texts = {0: None if load_text is None else self._decoder.submit(load_text)}
        self._revisions: dict[str, int] = {}
        self.streams = Streams(int(retain_s * 1e6), retain_tokens)
        self.text_us = 0  # spent decoding text, all streams
        self.on_end: Callable[[Stream], None] = lambda stream: None

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._decoder.shutdown(wait=False, cancel_futures=True)

    async def text(self, fingerprint: str = "") -> ModelText | None:
        """A model's text side, once it is loaded. None: it has none. Raises what loading raised.

        One that no worker has brought yet is taken for the newest.
        """
        loading = self._loading_of(fingerprint)
        if loading is None:
            return None
        return await asyncio.wrap_future(loading)

    async def prepare(self, revision: int, load_text: Callable[[], ModelText] | None) -> None:
        """Load the text side of what `revision` will bring. Raises what loading raises, with nothing changed."""
        loading = None if load_text is None else self._encoders.submit(load_text)
        if loading is not None:
            await asyncio.wrap_future(loading)
        self._texts[revision] = loading

    def load(self, revision: int, load_text: Callable[[], ModelText] | None) -> None:
        """Begin to load it: what needs it waits."""
        self._texts[revision] = None if load_text is None else self._encoders.submit(load_text)

    def forget(self, revision: int) -> None:
        """`revision` brings nothing."""
        self._texts.pop(revision, None)

    def learn(self, fingerprint: str, revision: int) -> None:
        """A worker of `revision` brings this model."""
        self._revisions[fingerprint] = max(revision, self._revisions.get(fingerprint, 0))

    def _loading_of(self, fingerprint: str) -> "Future[ModelText] | None":
        newest = max(self._texts)
        return self._texts.get(self._revisions.get(fingerprint, newest), self._texts[newest])

    # --- from the driver ---

    def deliver(self, deliveries: Sequence[Deliver]) -> None:
        """Hand tokens to their streams. Those of generations that nobody knows any more are dropped."""
        known = [(stream, d) for d in deliveries if (stream := self.streams.stream(d.generation)) is not None]
        if not known:
            return
        self._pass_on([(stream, shifted(d, stream) if stream.base else d) for stream, d in known])

    def _pass_on(self, known: list[tuple[Stream, Deliver]]) -> None:
        """Through the text thread, where there is text; offsets are the caller's."""
        for stream, d in known:
            stream.expected = d.offset + len(d.tokens)
        silent = [(stream, d) for stream, d in known if stream.source is None]
        if silent:
            self._arrived([(stream, d, [""] * len(d.tokens), "") for stream, d in silent])
            known = [(stream, d) for stream, d in known if stream.source is not None]
        if known:
            self._decoder.submit(self._decode, known, asyncio.get_running_loop())

    def restore(self, restored: Restored) -> None:
        """A generation of an earlier driver goes on. Whoever it was for has lost the stream, and may resume it."""
        now, before = self._host.now_us(), restored.options.delivered_before
        prompt_tokens = len(restored.prompt) - before
        name, index, n = call_of(restored.generation)
        call = self.streams.find(name) or Call(name, n, resumable=True)  # whether it was is not known any more
        call.unclaimed_until_us = now + int(UNCLAIMED_S * 1e6)
        stream = Stream(
            call,
            index,
            seed=restored.options.sampling.seed,
            prompt_tokens=prompt_tokens,
            context=restored.prompt[max(0, prompt_tokens - CONTEXT_TOKENS) : prompt_tokens],
            created_us=now,
            base=before,
            options=restored.options,
            prompt=restored.prompt[:prompt_tokens],
        )
        stream.source = self._loading_of(restored.fingerprint)
        self.streams.add(stream)
        self._begin_with(stream, restored.prompt[prompt_tokens:])

    def _begin_with(self, stream: Stream, generated: tuple[int, ...]) -> None:
        """The stream has these tokens from the start."""
        if generated:
            self._pass_on([(stream, Deliver(generation=stream.generation, offset=0, tokens=generated))])

    def deliver_prompt(self, told: DeliverPrompt) -> None:
        """How likely a prompt is: of no text, so it goes to its stream at once, ahead of every token."""
        stream = self.streams.stream(told.generation)
        if stream is not None:
            stream.append_prompt(told.offset, told.logprobs)

    def tick(self, now_us: int) -> None:
        """Forget what nobody will ask for, and cancel what nobody has resumed."""
        self.streams.prune(now_us)
        for call in self.streams:
            if call.unclaimed_until_us is not None and now_us >= call.unclaimed_until_us and not call.heard:
                call.unclaimed_until_us = None
                self._cancel(call)

    def _decode(self, deliveries: list[tuple[Stream, Deliver]], loop: asyncio.AbstractEventLoop) -> None:
        """On the text thread."""
        begin = time.perf_counter_ns()
        for stream, _ in deliveries:
            if stream.text is None and not stream.ended:
                assert stream.source is not None
                stream.text = stream.source.result().tokenizer.stream(stream.context)
        arrived = [(stream, *decode(stream, d)) for stream, d in deliveries]
        spent_us = (time.perf_counter_ns() - begin) // 1000
        loop.call_soon_threadsafe(self._arrived, arrived, spent_us)

    def _arrived(self, arrived: list[tuple[Stream, Deliver, list[str], str]], spent_us: int = 0) -> None:
        self.text_us += spent_us
        now = self._host.now_us()
        for stream, d, pieces, tail in arrived:
            # A rebuilt driver may tell again what a stream has: offsets say so.
            known = stream.length - d.offset
            assert known >= 0, f"generation {d.generation} jumps from {stream.length} tokens to {d.offset}"
            if d.tokens and stream.first_us is None:
                stream.first_us = now
            stream.append(d.tokens[known:], pieces[known:], d.logprobs[known:])
            if stream.stopped is not None and not stream.ended:
                # The text has come to a stop: what `Control` has behind it is void, even where it has ended meanwhile.
                keep = max(0, stream.stopped - stream.base)
                self._host.post(Cancel(at_us=now, generation=d.generation, keep=keep))
            if d.finish is not None and not stream.ended:
                stream.end(d.finish, tail, d.usage, d.error)
                self.streams.ended(stream, now)
                self.on_end(stream)

    # --- calls ---

    async def Generate(self, request: pb.GenerateRequest, context: GenerateContext) -> None:
        try:
            call = await self._submit(request, context)
        except BatchingError as error:
            await _abort(context, error)
        await self._follow(call, call.listen(), context)

    async def Resume(self, request: pb.ResumeRequest, context: GenerateContext) -> None:
        await self._host.settled()
        try:
            call = self._known(request.generation_id)
            listener = call.listen(resume_offsets(request))
        except BatchingError as error:
            await _abort(context, error)
        await self._follow(call, listener, context)

    async def Cancel(
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelResponse]
    ) -> pb.CancelResponse:
        await self._host.settled()
        call = self.streams.find_running(request.generation_id)
        if call is None:
            await _abort(context, UnknownId(f"no generation {request.generation_id[:64]!r} is running"))
        self._cancel(call)
        return pb.CancelResponse()

    async def Where(
        self, request: pb.WhereRequest, context: grpc.aio.ServicerContext[pb.WhereRequest, pb.WhereResponse]
    ) -> pb.WhereResponse:
        await self._host.settled()
        try:
            call = self._known(request.generation_id)
        except BatchingError as error:
            await _abort(context, error)
        found = await self._host.where([stream.generation for stream in call.streams.values()])
        now = self._host.now_us()
        return pb.WhereResponse(
            generation_id=call.id,
            completions=[
                where_is(stream, found.get(stream.generation), now) for _, stream in sorted(call.streams.items())
            ],
        )

    def _known(self, name: str) -> Call:
        """Raises `UnknownId`."""
        call = self.streams.find(name)
        if call is None:
            raise UnknownId(f"no generation {name[:64]!r} is running or kept")
        return call

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        model = await self._host.model()
        return pb.GetModelResponse(
            name=model.name,
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            context_tokens=model.context_tokens,
            end_token_ids=model.end_token_ids,
            has_chat_template=model.has_chat_template,
            architecture=model.architecture,
        )

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusResponse]
    ) -> pb.StatusResponse:
        return self._host.status()

    # --- sessions ---

    async def OpenSession(self, request: pb.OpenSessionRequest, context: SessionContext) -> pb.Session:
        try:
            check_label("tenant", request.tenant)
            check_label("cache_salt", request.cache_salt)
        except BatchingError as error:
            await _abort(context, error)
        now = self._host.now_us()
        question = OpenSession(at_us=now, ticket=0, tenant=request.tenant, cache_salt=request.cache_salt)
        return await self._ask(question, context)

    async def CloneSession(self, request: pb.CloneSessionRequest, context: SessionContext) -> pb.Session:
        source = await self._session(request.session_id, context)
        upto = request.upto if request.HasField("upto") else None
        return await self._ask(CloneSession(at_us=self._host.now_us(), ticket=0, source=source, upto=upto), context)

    async def RewindSession(self, request: pb.RewindSessionRequest, context: SessionContext) -> pb.Session:
        session, position = await self._session(request.session_id, context), request.position
        question = RewindSession(at_us=self._host.now_us(), ticket=0, session=session, position=position)
        return await self._ask(question, context)

    async def GetSession(self, request: pb.GetSessionRequest, context: SessionContext) -> pb.Session:
        session = await self._session(request.session_id, context)
        return await self._ask(LookUpSession(at_us=self._host.now_us(), ticket=0, session=session), context)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: SessionContext) -> pb.CloseSessionResponse:
        session = await self._session(request.session_id, context)
        await self._ask(CloseSession(at_us=self._host.now_us(), ticket=0, session=session), context)
        return pb.CloseSessionResponse()

    async def _session(self, handle: str, context: SessionContext) -> SessionId:
        try:
            return session_of(handle)
        except BatchingError as error:
            await _abort(context, error)

    async def _ask(self, question: SessionEvent, context: SessionContext) -> pb.Session:
        await self._host.settled()
        answer = await self._host.ask(question)
        if answer.error is not None:
            await _abort(context, answer.error)
        return pb.Session(session_id=str(answer.session), length=answer.length)

    # --- one generation ---

    async def _submit(self, request: pb.GenerateRequest, context: GenerateContext) -> Call:
        await self._host.settled()
        model = await self._host.model()
        check_numbers(request, model)
        session = session_of(request.session_id) if request.session_id else None
        if request.stop and await self.text(model.fingerprint) is None:
            raise BadInput("this service has no tokenizer: it can stop at token ids, not at texts")
        prompt = await self._prompt(request, model)
        check_prompt(prompt, model)
        name = request.generation_id or secrets.token_hex(16)
        if name in self.streams:  # after the last wait: two calls cannot both pass
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"generation id {name!r} is in use")
        seed = request.seed if request.HasField("seed") else secrets.randbits(SEED_BITS)
        now = self._host.now_us()
        remaining = context.time_remaining()
        deadline = None if remaining is None else now + int(remaining * 1e6)
        wanted = [
            (one, generation_options(request, model, len(prompt), one.seed, deadline, len(one.generated), one.index))
            for one in completions_of(request, seed)
        ]
        call = Call(name, request.n or 1, resumable=request.resumable)
        fresh: list[tuple[Stream, GenerationOptions]] = []  # they share the prompt
        for one, options in wanted:
            stream = self._begin(call, one, prompt, now, model, options)
            if (finish := finished_before(options, one.generated)) is not None:
                usage = Usage(prompt_tokens=len(prompt), output_tokens=0)
                self.deliver([Deliver(generation=stream.generation, offset=0, finish=finish, usage=usage)])
            elif one.generated:
                self._host.post(
                    Submit(
                        at_us=now,
                        generation=stream.generation,
                        prompt=(*prompt, *one.generated),
                        options=options,
                        fingerprint=model.fingerprint,
                    )
                )
            else:
                fresh.append((stream, options))
        if fresh:
            (first, options), *others = fresh
            self._host.post(
                Submit(
                    at_us=now,
                    generation=first.generation,
                    prompt=tuple(prompt),
                    options=options,
                    session=session,
                    siblings=tuple((stream.generation, stream.seed) for stream, _ in others),
                    fingerprint=model.fingerprint,
                )
            )
        return call

    def _begin(
        self,
        call: Call,
        one: Completion,
        prompt: Sequence[int],
        now_us: int,
        model: ServedModel,
        options: GenerationOptions,
    ) -> Stream:
        stream = Stream(
            call,
            one.index,
            seed=one.seed,
            prompt_tokens=len(prompt),
            context=tuple(prompt[-CONTEXT_TOKENS:]),
            created_us=now_us,
            base=len(one.generated),
            options=options,
            prompt=tuple(prompt),
        )
        stream.source = self._loading_of(model.fingerprint)
        self.streams.add(stream)
        self._begin_with(stream, one.generated)
        return stream

    async def _prompt(self, request: pb.GenerateRequest, model: ServedModel) -> Sequence[int]:
        prompt = text_prompt(request)
        if prompt is None:
            return request.token_ids.ids
        text = await self.text(model.fingerprint)
        if text is None:
            raise BadInput("this service has no tokenizer: the prompt must be token ids")
        loop = asyncio.get_running_loop()
        if isinstance(prompt, str):
            return await loop.run_in_executor(self._encoders, text.tokenizer.encode, prompt)
        return await loop.run_in_executor(self._encoders, text.tokenizer.encode_chat, prompt)

    async def _follow(self, call: Call, listener: Listener, context: GenerateContext) -> None:
        try:
            while (message := await listener.next()) is not None:
                await context.write(message)
                if listener.done:
                    return
        except BatchingError as error:
            await _abort(context, error)
        finally:
            # Reached by every way out: the client hung up (this task is cancelled), or a write failed.
            if listener.newest and not call.ended and not call.resumable:
                self._cancel(call)
        await context.abort(grpc.StatusCode.ABORTED, "a later call has taken the generation over")

    def _cancel(self, call: Call) -> None:
        now = self._host.now_us()
        for stream in call.streams.values():
            if not stream.ended:
                self._host.post(Cancel(at_us=now, generation=stream.generation))


def shifted(delivery: Deliver, stream: Stream) -> Deliver:
    """The delivery as the caller counts: what an earlier call delivered is prompt to `Control` and output to him."""
    usage = delivery.usage
    if usage is not None:
        usage = Usage(
            prompt_tokens=stream.prompt_tokens,
            output_tokens=usage.output_tokens + stream.base,
            cached_tokens=min(usage.cached_tokens, stream.prompt_tokens),
        )
    return replace(delivery, offset=delivery.offset + stream.base, usage=usage)


def decode(stream: Stream, delivery: Deliver) -> tuple[Deliver, list[str], str]:
    """What is to be told: tokens, the text that each adds, and what was held back when it ends.

    A stop token has no text. Behind the token that completes a text to stop at there is nothing: `stream.stopped` says
    after how many that was.
    """
    text, stops = stream.text, stream.stops
    if stream.stopped is not None:
        return _at_stop(delivery, stream.stopped), [], ""
    assert text is not None
    shown = len(delivery.tokens) - (delivery.finish is FinishReason.STOP and bool(delivery.tokens))
    pieces: list[str] = []
    for at, token in enumerate(delivery.tokens, delivery.offset):
        piece, found = text.push((token,)) if len(pieces) < shown else "", False
        if stops is not None and at >= stream.stops_after:
            piece, found = stops.push(piece)
        pieces.append(piece)
        if found:
            stream.stopped = at + 1
            return _at_stop(delivery, stream.stopped), pieces, ""
    if delivery.finish is None:
        return delivery, pieces, ""
    tail, found = text.finish(), False
    if stops is not None:
        tail, found = stops.push(tail)
        tail += stops.finish()
    if found:
        stream.stopped = delivery.offset + len(delivery.tokens)
        delivery = _at_stop(delivery, stream.stopped)
    return delivery, pieces, tail


def _at_stop(delivery: Deliver, stopped: int) -> Deliver:
    """The delivery of a stream whose text has come to a stop after so many tokens: nothing is behind those."""
    kept = max(0, stopped - delivery.offset)
    finish, usage = delivery.finish, delivery.usage
    if finish is not None:
        finish = FinishReason.STOP
    if usage is not None:
        usage = replace(usage, output_tokens=stopped)
    return replace(
        delivery,
        offset=min(delivery.offset, stopped),
        tokens=delivery.tokens[:kept],
        logprobs=delivery.logprobs[:kept],
        finish=finish,
        usage=usage,
        error=None,
    )


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", error: BatchingError) -> NoReturn:
    """End the call with the status that the error stands for."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing)
    raise AssertionError("abort has raised")
