"""What each generation has delivered so far, and who listens to it.

A `Stream` is the transcript of one completion, and only grows; a `Call` has the streams of all completions of one
prompt, usually one. A listener is an offset into each. So a slow client costs nobody anything: it finds everything
since its last message in one piece, and memory is bounded by the tokens generated. All on the event loop, but
`TextStream` objects, which belong to the text thread.

Clients name a call by one id. To the planner each completion is a generation of its own, whose id is made of the
call's (`completion_id`), so that a restarted driver puts together again what belongs together.
"""

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from microtome.actors.stop_texts import StopTexts
from microtome.actors.text import ModelText, TextStream
from microtome.planner.errors import BadInput, BatchingError, UnknownId
from microtome.planner.packed_logprobs import PackedLogprobs
from microtome.planner.types import FinishReason, GenerationId, GenerationOptions, TokenLogprobs, Usage
from microtome.v1 import generation_pb2 as pb
from microtome.v1.logprobs_pb2 import Logprobs

FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
_NUMBERS_PER_MESSAGE = 400_000  # 1.6 MiB
_SEPARATOR = "\x1f"  # in no id of a caller's: those are printable


def completion_id(call: str, index: int, n: int) -> GenerationId:
    """What the planner calls a completion."""
    return GenerationId(call if n == 1 else f"{call}{_SEPARATOR}{index}{_SEPARATOR}{n}")


def call_of(generation: GenerationId) -> tuple[str, int, int]:
    """Of a completion: its call's id, its index, and how many there are."""
    if _SEPARATOR not in generation:
        return generation, 0, 1
    call, index, n = generation.rsplit(_SEPARATOR, 2)
    return call, int(index), int(n)


class Stream:
    """One completion's output."""

    __slots__ = (  # thousands of ended ones are kept
        "_ends",
        "_text",
        "_tokens",
        "base",
        "call",
        "context",
        "created_us",
        "error",
        "expected",
        "finish",
        "first_us",
        "generation",
        "index",
        "logprobs",
        "prompt",
        "prompt_logprobs",
        "prompt_tokens",
        "seed",
        "source",
        "stopped",
        "stops",
        "stops_after",
        "text",
        "usage",
    )

    def __init__(
        self,
        call: "Call",
        index: int = 0,
        *,
        seed: int,
        prompt_tokens: int,
        context: tuple[int, ...],
        created_us: int,
        base: int = 0,
        options: GenerationOptions | None = None,
        prompt: tuple[int, ...] = (),
    ) -> None:
        """`options`: what is to be told beside the tokens, and where the text ends; None: nothing, and nowhere.

        `prompt`: kept where it is asked about.
        """
        self.call = call
        self.index = index
        self.generation = completion_id(call.id, index, call.n)
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.base = base  # tokens that an earlier call has delivered: `Control` counts from behind them
        self.context = context  # the prompt's last tokens: text depends on what came before it
        self.source: Future[ModelText] | None = None  # the text side of its model; None: it has no text
        self.text: TextStream | None = None  # the text thread's alone
        options = options or GenerationOptions()
        # The text thread's alone: what to stop at, behind how many tokens, and after which token it was found.
        self.stops = StopTexts(options.stop_texts) if options.stop_texts else None
        self.stops_after = options.sampling.min_new_tokens
        self.stopped: int | None = None
        self.logprobs = PackedLogprobs() if options.sampling.logprobs is not None else None
        asked = options.sampling.prompt_logprobs is not None
        self.prompt = array("I", prompt if asked else ())
        self.prompt_logprobs = PackedLogprobs() if asked else None
        self.created_us = created_us
        self.expected = 0  # tokens that `Control` has delivered, those that are still being decoded included
        self.first_us: int | None = None  # when its first token arrived
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self.error: BatchingError | None = None
        self._tokens = array("I")
        self._text = ""
        self._ends = array("I")  # per token: where its text ends in `_text`
        call.streams[index] = self

    @property
    def length(self) -> int:
        """Tokens delivered so far."""
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def append(
        self, tokens: Sequence[int], pieces: Sequence[str], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> None:
        """`pieces`: the text that each token adds, in order; `logprobs`: of each, or none at all."""
        self._tokens.extend(tokens)
        if self.logprobs is not None:
            self.logprobs.extend(logprobs or [None] * len(tokens))
        self.expected = max(self.expected, self.length)
        end = len(self._text)
        self._text += "".join(pieces)
        for piece in pieces:
            end += len(piece)
            self._ends.append(end)
        self.call.changed.set()

    def end(self, finish: FinishReason, tail: str, usage: Usage | None, error: BatchingError | None) -> None:
        """Nothing follows. `tail` is the text that was held back, shown with the last message."""
        self._text += tail
        self.finish, self.usage, self.error = finish, usage, error
        self.text = None
        self.call.changed.set()

    def append_prompt(self, offset: int, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """How likely the prompt's tokens from `offset` on are; a rebuilt driver may tell again what is known."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(logprobs[len(self.prompt_logprobs) - offset :])
            self.call.changed.set()

    def message(self, offset: int, prompt_at: int = 0) -> pb.GenerateResponse | None:
        """Everything from `offset` on in one message, or as much as one holds; None while there is nothing to say.

        In front of the first token, what is known of the prompt from its token `prompt_at` on.
        """
        if not offset and self.prompt_logprobs is not None and prompt_at < len(self.prompt_logprobs):
            end = _end_of_message(self.prompt_logprobs, prompt_at)
            return pb.GenerateResponse(
                generation_id=self.call.id,
                index=self.index,
                n=self.call.n,
                seed=self.seed,
                prompt_offset=prompt_at,
                prompt_token_ids=self.prompt[prompt_at:end],
                prompt_logprobs=_logprobs_message(self.prompt_logprobs, prompt_at, end),
            )
        length = len(self._tokens)
        if length <= offset and not self.ended:
            return None
        offset = min(offset, length)  # above it only where a caller gave tokens that lie behind a stop
        begin = self._ends[offset - 1] if offset else 0
        end = length if self.logprobs is None else _end_of_message(self.logprobs, offset)
        message = pb.GenerateResponse(
            generation_id=self.call.id,
            index=self.index,
            n=self.call.n,
            offset=offset,
            token_ids=self._tokens[offset:end],
            text=self._text[begin:] if end == length else self._text[begin : self._ends[end - 1]],
            seed=self.seed,
        )
        if self.logprobs is not None and end > offset:
            message.logprobs.CopyFrom(_logprobs_message(self.logprobs, offset, end))
        if self.finish is not None and self.error is None and end == length:
            message.finish_reason = FINISH[self.finish]
            if self.usage is not None:
                message.usage.prompt_tokens = self.usage.prompt_tokens
                message.usage.output_tokens = self.usage.output_tokens
                message.usage.cached_tokens = self.usage.cached_tokens
        return message


def _end_of_message(logprobs: PackedLogprobs, begin: int) -> int:
    """Where a message that begins there ends: a client's messages have a size limit, of usually 4 MiB."""
    numbers = logprobs.numbers // max(1, len(logprobs))  # of each token, on average
    return min(len(logprobs), begin + max(1, _NUMBERS_PER_MESSAGE // max(1, numbers)))


def _logprobs_message(logprobs: PackedLogprobs, begin: int, end: int) -> Logprobs:
    counts, own, tokens, values = logprobs.columns(begin, end)
    return Logprobs(counts=counts, logprobs=own, top_tokens=tokens, top_logprobs=values)


class Call:
    """What one prompt was asked for: a stream for each completion. All of them have one listener at a time."""

    __slots__ = ("_listener", "changed", "ended_us", "id", "n", "resumable", "streams", "unclaimed_until_us")

    def __init__(self, name: str, n: int = 1, *, resumable: bool) -> None:
        self.id = name
        self.n = n  # completions asked for; those that the caller has had whole before have no stream here
        self.resumable = resumable
        self.streams: dict[int, Stream] = {}  # by index
        self.unclaimed_until_us: int | None = None  # of a restored one: cancelled then if nobody has resumed it
        self.ended_us: int | None = None
        self.changed = asyncio.Event()
        self._listener = 0  # the number of the newest; older ones are over

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self.streams.values())

    @property
    def heard(self) -> bool:
        """Somebody listens, or has just begun to."""
        return self._listener > 0

    @property
    def length(self) -> int:
        """Tokens delivered so far, of all completions."""
        return sum(stream.length for stream in self.streams.values())

    @property
    def weight(self) -> int:
        """What is held, in tokens: three numbers of log-probabilities take about as much room as one with its text."""
        packed = [p for s in self.streams.values() for p in (s.logprobs, s.prompt_logprobs) if p is not None]
        return self.length + sum(p.numbers for p in packed) // 3

    def listen(self, offsets: Mapping[int, int] | int | None = None) -> "Listener":
        """Begin at these offsets; whoever listened before is over.

        `offsets`: by index of those completions that are wanted; or one for all; None: each from where this call began.
        Raises `BadInput` for an offset not reached yet or an index out of range, `UnknownId` for a completion that is
        not known here.
        """
        if offsets is None:
            offsets = {index: stream.base for index, stream in self.streams.items()}
        elif isinstance(offsets, int):
            offsets = dict.fromkeys(range(self.n), offsets)
        for index, offset in offsets.items():
            if index >= self.n:
                raise BadInput(f"completion {index} is not below the {self.n} of generation {self.id!r}")
            stream = self.streams.get(index)
            if stream is None:
                raise UnknownId(f"completion {index} of generation {self.id!r} is not known any more")
            if offset > stream.expected:
                which = "" if self.n == 1 else f" of completion {index}"
                raise BadInput(f"offset {offset} is above the {stream.expected} tokens{which} generated so far")
        self._listener += 1
        self.changed.set()  # an older listener wakes, and sees that it is over
        return Listener(self, self._listener, offsets)


class Listener:
    """One reader of a call: takes what is new, as often as it likes."""

    def __init__(self, call: Call, number: int, offsets: Mapping[int, int]) -> None:
        self._call, self._number = call, number
        # A stream, and how much of it and of its prompt was handed out.
        self._turns = deque((call.streams[index], offset, 0) for index, offset in offsets.items())

    @property
    def newest(self) -> bool:
        """False: another one has taken the call over."""
        return self._call._listener == self._number

    @property
    def done(self) -> bool:
        """The last message of every completion was handed out."""
        return not self._turns

    async def next(self) -> pb.GenerateResponse | None:
        """Everything new of one completion, in turns, waiting until there is any. None: another listener took over.

        Raises a completion's error once nothing else is new.
        """
        call, turns = self._call, self._turns
        while self.newest:
            failure = None
            for _ in range(len(turns)):
                stream, offset, prompt_at = turns.popleft()
                if stream.error is not None and offset == stream.length:
                    failure = failure or stream.error
                elif (message := stream.message(offset, prompt_at)) is not None:
                    if not message.finish_reason:
                        prompt_at += len(message.prompt_token_ids)
                        turns.append((stream, offset + len(message.token_ids), prompt_at))
                    return message
                turns.append((stream, offset, prompt_at))
            if failure is not None:
                raise failure
            call.changed.clear()
            await call.changed.wait()
        return None


class Streams:
    """All calls by id, those that run and ended ones that may still be resumed; and the running streams by theirs."""

    def __init__(self, retain_us: int, retain_tokens: int) -> None:
        self._streams: dict[GenerationId, Stream] = {}
        self._running: dict[str, Call] = {}
        self._ended: OrderedDict[str, Call] = OrderedDict()  # oldest end first
        self._ended_weight = 0
        self._retain_us = retain_us
        self._retain_tokens = retain_tokens

    def __contains__(self, call: str) -> bool:
        return call in self._running or call in self._ended

    def __iter__(self) -> Iterator[Call]:
        """Those that run."""
        return iter(list(self._running.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    def find(self, call: str) -> Call | None:
        return self._running.get(call) or self._ended.get(call)

    def find_running(self, call: str) -> Call | None:
        return self._running.get(call)

    def stream(self, generation: GenerationId) -> Stream | None:
        """Of a completion that runs."""
        return self._streams.get(generation)

    def add(self, stream: Stream) -> None:
        """A completion begins. Its call runs from now on, if it did not; it may have ended, as far as it was known."""
        assert stream.generation not in self._streams
        self._streams[stream.generation] = stream
        call = stream.call
        if self._ended.pop(call.id, None) is not None:
            self._ended_weight -= call.weight
        self._running[call.id] = call

    def ended(self, stream: Stream, at_us: int) -> None:
        """A completion has ended. With its call's last one the call is forgotten, or kept for a while if resumable."""
        self._streams.pop(stream.generation, None)
        call = stream.call
        if not call.ended or self._running.pop(call.id, None) is None or not call.resumable:
            return
        call.ended_us = at_us
        self._ended[call.id] = call
        self._ended_weight += call.weight
        self.prune(at_us)

    def prune(self, at_us: int) -> None:
        """Forget ended calls that are too old, and the oldest beyond the bound on tokens."""
        while self._ended:
            oldest = next(iter(self._ended.values()))
            assert oldest.ended_us is not None
            if at_us - oldest.ended_us < self._retain_us and self._ended_weight <= self._retain_tokens:
                return
            del self._ended[oldest.id]
            self._ended_weight -= oldest.weight
