"""The words every package shares. Values only: no tensor, handle, lock or clock, so any process can send one.

Positions, widths and lengths count tokens; cells index the pool; times are integers in microseconds (`_us`) of one
monotonic clock, the driver's. Ranges are half-open.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import NewType

WorkerId = NewType("WorkerId", str)  # a worker's name; a worker that comes back may use it again
Incarnation = NewType("Incarnation", str)  # 32 hex digits, minted with an empty pool; one life of a worker
GenerationId = NewType("GenerationId", str)  # minted at the edge, opaque here, never used twice
SessionId = NewType("SessionId", int)  # issued by the driver, from 1, never used twice
SequenceId = NewType("SequenceId", int)  # a session inside one cell table: small, and reused
Position = NewType("Position", int)  # a token's place in its session, from 0
Cell = NewType("Cell", int)  # room for one token's K and V in every layer
StepNumber = NewType("StepNumber", int)  # from 1, grows by one in an incarnation


class Kind(Enum):
    DECODE = "decode"  # the one token sampled last
    PREFILL = "prefill"  # given tokens, any width


class FinishReason(Enum):
    STOP = "stop"  # a stop token was sampled; it is delivered and kept
    LENGTH = "length"  # max_new_tokens, or the end of the context
    CANCELLED = "cancelled"
    FAILED = "failed"  # the only reason that comes with an error


# Not frozen, though never changed: one is built per token, and a frozen one takes five times as long to build.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Input:
    """Positions [start, end) of one session, for one step. Which tokens they are rides beside it. Never changed."""

    session: SessionId
    kind: Kind
    start: Position
    width: int  # tokens; 1 for a decode
    wants_output: bool  # one logits row, after the last token; false inside a prompt

    @property
    def end(self) -> Position:
        return Position(self.start + self.width)


Batch = tuple[Input, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """One exported program: how many tokens it takes, and what a forward of it costs.

    A static method runs `max_tokens` tokens whatever the slice's length (the rest is padding) and costs `cost_us`.
    A dynamic one runs `min_tokens` to `max_tokens` and costs `cost_us + tokens * cost_ns_per_token / 1000`.
    A cost of 0 means "not measured".
    """

    name: str
    max_tokens: int
    static: bool
    min_tokens: int = 1
    min_rows: int = 1  # logits rows a forward must select at least
    cost_us: int = 0
    cost_ns_per_token: int = 0


@dataclass(frozen=True, slots=True)
class MethodTable:
    """A worker's methods, ascending by `max_tokens`; fixed for an incarnation. A slice names a method by its index."""

    methods: tuple[MethodSpec, ...]
    digest: int = field(init=False)  # 63 bits over everything but the costs, which differ between equal machines

    def __post_init__(self) -> None:
        text = ";".join(f"{m.name},{m.min_tokens},{m.max_tokens},{m.static:d},{m.min_rows}" for m in self.methods)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        object.__setattr__(self, "digest", digest)

    @property
    def widest(self) -> int:
        """Tokens of the widest method: the preferred batch size; 0 for an empty table."""
        return self.methods[-1].max_tokens if self.methods else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one generation's tokens are drawn. The coin of a token depends on (seed, its position) alone."""

    temperature: float = 0.0  # 0: greedy, the rest is ignored
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # 64 bits, unsigned; chosen at the edge when the caller gave none
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    allowed_tokens: tuple[int, ...] | None = None  # None: all
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0  # the stop tokens cannot be drawn before this many
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # report the drawn token's log-probability, and this many likeliest beside it
    prompt_logprobs: int | None = None  # and those of the prompt's own tokens, likewise
    prompt_tokens: int = 0  # where the generated part begins, for min_new_tokens and the penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What a caller may ask of one generation; checked in `Control` before anything changes."""

    max_new_tokens: int = 256
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()  # end-of-text tokens included unless the caller ignores them
    priority: int = 0  # higher first
    tenant: str = ""  # whose share it counts against
    cache_salt: str = ""  # prefixes are shared only under equal salts
    deadline_us: int | None = None  # absolute; None: none
    ttft_target_us: int | None = None  # from submission; None: none
    delivered_before: int = 0  # of the prompt's last tokens, how many an earlier call has delivered
    stop_texts: tuple[str, ...] = ()  # the driver's text side ends the generation at the first of them; opaque here


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Start `sequence` with `cells` as its history; they hold a cached prefix and may be shared. Usually empty."""

    sequence: SequenceId
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True, slots=True)
class CloneSequence:
    """Start `sequence` with the first `upto` cells of `source`."""

    sequence: SequenceId
    source: SequenceId
    upto: Position


@dataclass(frozen=True, slots=True)
class ExtendSequence:
    """Lengthen `sequence` by `cells`, which hold the tokens that come next in it: of another sequence, or cached.

    Here and in `OpenSequence` a cell may be one that this very step writes, in an input before the first of `sequence`.
    """

    sequence: SequenceId
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class TruncateSequence:
    """Forget everything from position `length` up."""

    sequence: SequenceId
    length: Position


@dataclass(frozen=True, slots=True)
class DropSequence:
    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class SetSampling:
    """Draw the sequence's tokens like this from now on."""

    sequence: SequenceId
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Annotate:
    """Keep `note` beside the sequence and give it back in a snapshot: the driver's own record of it, opaque here."""

    sequence: SequenceId
    note: bytes


SequenceOp = OpenSequence | CloneSequence | ExtendSequence | TruncateSequence | DropSequence | SetSampling | Annotate


class InputFlag(IntFlag):
    WANTS_OUTPUT = 1  # sample one token after the input's last one
    FEEDBACK = 2  # the input is the token sampled last for this sequence; it is on the device, not in `tokens`
    PROMPT_LOGPROBS = 4  # report how likely the token behind each of the input's tokens is, where that is a given one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of one worker, as columns. Operations first, in order; then the slices, in order.

    `sequences`, `starts`, `widths`, `flags`: one entry per input, in packed order.
    `cells`: one per token, packed order. `tokens`: those of the inputs without FEEDBACK, packed order.
    `slice_offsets`, `slice_lengths`, `slice_methods`: tile [0, len(cells)); methods by index in the table.
    `next_tokens`: one per input with PROMPT_LOGPROBS and without WANTS_OUTPUT, packed order: the token that follows it.
    """

    incarnation: Incarnation
    step: StepNumber
    table_digest: int
    ops: tuple[SequenceOp, ...] = ()
    sequences: Sequence[int] = ()
    starts: Sequence[int] = ()
    widths: Sequence[int] = ()
    flags: Sequence[int] = ()
    cells: Sequence[int] = ()
    tokens: Sequence[int] = ()
    slice_offsets: Sequence[int] = ()
    slice_lengths: Sequence[int] = ()
    slice_methods: Sequence[int] = ()
    next_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one token: its own, then the likeliest (token, logprob), best first.

    Those of the model itself, before penalties and temperature; float32 numbers, so that every wire keeps them exact.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer to one `StepPlan`: one token per input that wants output, in input order."""

    incarnation: Incarnation
    step: StepNumber
    tokens: Sequence[int] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # empty, or one per token
    step_us: int = 0  # from the step's start to its result, on the worker
    idle_us: int = 0  # from the step before's result to this one's start, on the worker
    forwards: Sequence[int] = ()  # per method of the table: how often it ran in this step
    # Of the inputs with PROMPT_LOGPROBS, packed order: of the token behind each of theirs, but for the last one of an
    # input that wants output.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """What a worker holds of one sequence, for a driver that starts anew."""

    sequence: SequenceId
    cells: tuple[Cell, ...]
    tokens: tuple[int, ...]  # one per cell: the transcript
    last_sampled: int | None  # sampled and not yet run
    sampling: SamplingParams | None
    note: bytes
    # From position `logprobs_from` on, one per token that was reported and is still held, the sampled one included.
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    logprobs_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one incarnation of a worker is and can do; measured before it reports ready."""

    incarnation: Incarnation
    device: str  # "cpu" or "cuda:0 NVIDIA H200"
    device_uuid: str
    model: str  # as users name it
    fingerprint: str  # hex digest of weights and configuration: equal means interchangeable
    vocab_size: int
    usable_cells: int  # the scratch cell is not among them
    scratch_cell: Cell
    max_sequences: int
    max_session_tokens: int  # length of a sequence's row; the context length at most
    windows: tuple[int, ...]  # distinct attention windows in tokens, 0: unlimited
    table: MethodTable
    max_output_rows: int  # tokens sampled in one step at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
