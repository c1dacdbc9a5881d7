"""What each generation has delivered so far, and who listens to it.

A `Stream` is a transcript that only grows; a listener is an offset into it. So a slow client costs nobody anything: it
finds everything since its last message in one piece, and memory is bounded by the tokens generated. All on the event
loop, but `TextStream` objects, which belong to the text thread.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from microtome.actors.text import ModelText, TextStream
from microtome.planner.errors import BadInput, BatchingError
from microtome.planner.types import FinishReason, GenerationId, Usage
from microtome.v1 import generation_pb2 as pb

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


class Stream:
    """One generation's output."""

    __slots__ = (  # thousands of ended ones are kept
        "_changed",
        "_ends",
        "_listener",
        "_text",
        "_tokens",
        "base",
        "context",
        "created_us",
        "ended_us",
        "error",
        "expected",
        "finish",
        "first_us",
        "generation",
        "prompt_tokens",
        "resumable",
        "seed",
        "source",
        "text",
        "unclaimed_until_us",
        "usage",
    )

    def __init__(
        self,
        generation: GenerationId,
        *,
        seed: int,
        prompt_tokens: int,
        context: tuple[int, ...],
        resumable: bool,
        created_us: int,
        base: int = 0,
    ) -> None:
        self.generation = generation
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.base = base  # tokens that an earlier call has delivered: `Control` counts from behind them
        self.context = context  # the prompt's last tokens: text depends on what came before it
        self.source: Future[ModelText] | None = None  # the text side of its model; None: it has no text
        self.text: TextStream | None = None  # the text thread's alone
        self.resumable = resumable
        self.created_us = created_us
        self.unclaimed_until_us: int | None = None  # of a restored one: cancelled then if nobody has resumed it
        self.expected = 0  # tokens that `Control` has delivered, those that are still being decoded included
        self.first_us: int | None = None  # when its first token arrived
        self.ended_us: int | None = None
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self.error: BatchingError | None = None
        self._tokens = array("I")
        self._text = ""
        self._ends = array("I")  # per token: where its text ends in `_text`
        self._listener = 0  # the number of the newest; older ones are over
        self._changed: asyncio.Event = asyncio.Event()

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

    @property
    def heard(self) -> bool:
        """Somebody listens, or has just begun to."""
        return self._listener > 0

    def append(self, tokens: Sequence[int], pieces: Sequence[str]) -> None:
        """`pieces`: the text that each token adds, in order."""
        self._tokens.extend(tokens)
        self.expected = max(self.expected, self.length)
        end = len(self._text)
        self._text += "".join(pieces)
        for piece in pieces:
            end += len(piece)
            self._ends.append(end)
        self._changed.set()

    def end(self, finish: FinishReason, tail: str, usage: Usage | None, error: BatchingError | None) -> None:
        """Nothing follows. `tail` is the text that was held back, shown with the last message."""
        self._text += tail
        self.finish, self.usage, self.error = finish, usage, error
        self.text = None
        self._changed.set()

    def listen(self, offset: int) -> "Listener":
        """Begin at `offset`; whoever listened before is over. Raises `BadInput` for an offset not reached yet."""
        if offset > self.expected:
            raise BadInput(f"offset {offset} is above the {self.expected} tokens generated so far")
        self._listener += 1
        self._changed.set()  # an older listener wakes, and sees that it is over
        return Listener(self, self._listener, offset)

    def message(self, offset: int) -> pb.GenerateResponse | None:
        """Everything from `offset` on in one message; None while there is nothing to say."""
        length = len(self._tokens)
        if length < offset or (length == offset and not self.ended):
            return None
        begin = self._ends[offset - 1] if offset else 0
        message = pb.GenerateResponse(
            generation_id=self.generation,
            offset=offset,
            token_ids=self._tokens[offset:],
            text=self._text[begin:],
            seed=self.seed,
        )
        if self.finish is not None and self.error is None:
            message.finish_reason = _FINISH[self.finish]
            if self.usage is not None:
                message.usage.prompt_tokens = self.usage.prompt_tokens
                message.usage.output_tokens = self.usage.output_tokens
                message.usage.cached_tokens = self.usage.cached_tokens
        return message


class Listener:
    """One reader of a stream: takes what is new, as often as it likes."""

    def __init__(self, stream: Stream, number: int, offset: int) -> None:
        self._stream, self._number, self._offset = stream, number, offset

    @property
    def newest(self) -> bool:
        """False: another one has taken the stream over."""
        return self._stream._listener == self._number

    async def next(self) -> pb.GenerateResponse | None:
        """Everything new in one message, waiting until there is any. None: another listener took over.

        Raises the generation's error once everything before it was handed out.
        """
        stream = self._stream
        while self.newest:
            if stream.error is not None and self._offset == stream.length:
                raise stream.error
            message = stream.message(self._offset)
            if message is not None:
                self._offset += len(message.token_ids)
                return message
            stream._changed.clear()
            await stream._changed.wait()
        return None


class Streams:
    """All generations by id: those that run, and ended ones that may still be resumed."""

    def __init__(self, retain_us: int, retain_tokens: int) -> None:
        self._running: dict[GenerationId, Stream] = {}
        self._ended: OrderedDict[GenerationId, Stream] = OrderedDict()  # oldest end first
        self._ended_tokens = 0
        self._retain_us = retain_us
        self._retain_tokens = retain_tokens

    def __contains__(self, generation: str) -> bool:
        return self.find(generation) is not None

    def __iter__(self) -> Iterator[Stream]:
        """Those that run."""
        return iter(list(self._running.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    def find(self, generation: str) -> Stream | None:
        key = GenerationId(generation)
        return self._running.get(key) or self._ended.get(key)

    def find_running(self, generation: str) -> Stream | None:
        return self._running.get(GenerationId(generation))

    def add(self, stream: Stream) -> None:
        assert stream.generation not in self
        self._running[stream.generation] = stream

    def ended(self, stream: Stream, at_us: int) -> None:
        """The stream has ended: forget it, or keep it for a while when it is resumable."""
        self._running.pop(stream.generation, None)
        if not stream.resumable:
            return
        stream.ended_us = at_us
        self._ended[stream.generation] = stream
        self._ended_tokens += stream.length
        self.prune(at_us)

    def prune(self, at_us: int) -> None:
        """Forget ended streams that are too old, and the oldest beyond the bound on tokens."""
        while self._ended:
            oldest = next(iter(self._ended.values()))
            assert oldest.ended_us is not None
            if at_us - oldest.ended_us < self._retain_us and self._ended_tokens <= self._retain_tokens:
                return
            del self._ended[oldest.generation]
            self._ended_tokens -= oldest.length
