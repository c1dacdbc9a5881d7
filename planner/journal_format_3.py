"""One call of `Control.handle` as bytes, format 3: what a `Writer` writes, a reader reads behind those before it.

A body is parts: the event's, then one per instruction, each a byte that says what it is and then its own bytes. What a
cluster does all the time has forms of its own here: answered steps, plans, tokens that are delivered, as columns of
which one that equals the one written last in its place (that worker's last plan; tokens that are delivered as the
worker gave them) is a bit. What every generation and session does is written by `layouts`. What is rare is JSON.

A tick that led to nothing waits for what follows it: a body may begin with many, two bytes each. So writers and readers
have a memory: one life each. Not thread-safe.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from struct import Struct, error
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

from microtome.planner.columns import Reader, column, logprob_columns, text
from microtome.planner.errors import BadInput
from microtome.planner.events import (
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    DeliverPrompt,
    DeliverStep,
    Event,
    GiveUpWorker,
    Instruction,
    LookUpSession,
    OpenSession,
    ReleaseWorker,
    RewindSession,
    RunStep,
    SessionAnswer,
    StepDone,
    Submit,
    Tick,
    WorkerGone,
)
from microtome.planner.layouts import LOGPROBS_HAVE_COLUMNS, Description, Layout, Memory, Rest, layout
from microtome.planner.records import CLASSES, from_json, to_json
from microtome.planner.types import (
    Annotate,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    GenerationId,
    Incarnation,
    OpenSequence,
    SequenceOp,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TruncateSequence,
    WorkerId,
)

_JSON, _RAISED, _IDLE, _STEP_DONE, _RUN_STEP, _DELIVER_STEP = range(6)
_FIRST_LAYOUT = 16  # the layouts' kinds follow, in the order of the header
_LATEST_US = 1 << 56  # behind the tick before it, or behind 0: far from what 64 bits hold
_KINDS = [bytes([kind]) for kind in range(256)]
_IDLE_HEAD = Struct("<Bqq")  # kind, at_us of the first, the least time between two
_STEP_DONE_HEAD = Struct("<BBIqqqq")  # kind, what follows, place, at_us, step, step_us, idle_us
_RUN_STEP_HEAD = Struct("<BBIIqqI")  # kind, what follows, columns that follow, place, step, table digest, operations
_DELIVER_STEP_HEAD = Struct("<BB")  # kind, what follows
_NAMED, _FORWARDS, _LOGPROBS, _REST, _SAME_LOGPROBS = 1, 2, 4, 8, 16  # what follows
_NAMES, _MORE_NAMES, _TOKENS, _PROMPT_LOGPROBS = 1, 2, 32, 64
_ENDED_AT_MOST = 64  # generations that are remembered to have ended
_SEARCHED_AT_MOST = 2048  # names that are looked at for those that have ended; beyond that all are written

_OP_LAYOUTS = [
    layout(OpenSequence),
    layout(CloneSequence),
    layout(ExtendSequence, fresh=("cells",)),
    layout(TruncateSequence),
    layout(DropSequence),
    layout(SetSampling, own=("sampling.seed", "sampling.prompt_tokens")),
    layout(Annotate, fresh=("note",)),
]
_LAYOUTS = [
    layout(
        Submit,
        own=("options.max_new_tokens", "options.sampling.seed", "options.delivered_before"),
        fresh=("generation", "prompt"),
    ),
    layout(Cancel, fresh=("generation",)),
    layout(OpenSession),
    layout(CloneSession),
    layout(RewindSession),
    layout(LookUpSession),
    layout(CloseSession),
    layout(Tick),
    layout(Deliver, fresh=("generation", "tokens", "usage")),
    layout(DeliverPrompt, fresh=("generation", "logprobs")),
    layout(SessionAnswer),
    *_OP_LAYOUTS,
]
_PLAN_COLUMNS = tuple(
    name for name, hint in get_type_hints(StepPlan).items() if get_origin(hint) is Sequence and get_args(hint) == (int,)
)
_STEP_DONE_REST = Rest(StepDone, "at_us", "worker", "result")
_RESULT_REST = Rest(
    StepResult, "incarnation", "step", "tokens", "logprobs", "step_us", "idle_us", "forwards", "prompt_logprobs"
)
_RUN_STEP_REST = Rest(RunStep, "worker", "plan")
_PLAN_REST = Rest(StepPlan, "incarnation", "step", "table_digest", "ops", *_PLAN_COLUMNS)
_DELIVER_STEP_REST = Rest(DeliverStep, "generations", "offsets", "tokens", "logprobs")

# kinds with a form of their own; every other event and instruction is JSON
FREQUENT = frozenset([StepDone, RunStep, DeliverStep, *[one.kind for one in _LAYOUTS]])

Header = tuple[tuple[Description, ...], tuple[str, ...]]  # the layouts, from kind 16; a plan's columns


def header() -> Header:
    """What a reader has to know of the writer: to be kept as JSON at the life's beginning."""
    return tuple(one.description for one in _LAYOUTS), _PLAN_COLUMNS


class Call(NamedTuple):
    event: Event
    instructions: list[Instruction]
    raised: str | None
    body: bytes  # without the ticks before it; empty for one of these


@dataclass(slots=True)
class _Place:
    """What was written last of one incarnation of a worker."""

    number: int
    columns: list[list[int]]
    widths: list[int] = field(default_factory=lambda: [1] * (len(_PLAN_COLUMNS) + 1))  # and of the answers' tokens
    forwards: Sequence[int] | None = None


class _Memory:
    """What was written last in each place: the same on both sides."""

    def __init__(self, plan_columns: int) -> None:
        self.values: Memory = {}
        self.tokens: list[int] = []
        self.logprobs: Sequence[TokenLogprobs | None] = ()
        self.names: list[GenerationId] = []
        self.ended: list[GenerationId] = []  # since `names` were written
        self.offsets_width = 1
        self.places: dict[tuple[WorkerId, Incarnation], _Place] = {}
        self._plan_columns = plan_columns
        self._numbered = 0

    def begin_place(self, worker: WorkerId, incarnation: Incarnation) -> _Place:
        self._numbered += 1
        place = _Place(self._numbered, [[] for _ in range(self._plan_columns)])
        self.places[worker, incarnation] = place
        return place

    def take(self, one: Event | Instruction) -> None:
        """Of what is written by its layout or as JSON: a worker has gone, a generation has ended."""
        if type(one) is Deliver:
            if one.finish is not None and len(self.ended) < _ENDED_AT_MOST:
                self.ended.append(one.generation)
        elif isinstance(one, WorkerGone | GiveUpWorker | ReleaseWorker):
            for key in [key for key in self.places if key[0] == one.worker]:
                del self.places[key]

    def drop_ended(self) -> None:
        """Of the names that were written last, and the tokens that were answered, those of what has ended since."""
        names, tokens = self.names, self.tokens
        if len(self.ended) * len(names) > _SEARCHED_AT_MOST:
            names.clear()
        for name in self.ended:
            if name in names:
                at = names.index(name)
                del names[at]
                del tokens[at : at + 1]
        self.ended.clear()


class Writer:
    """Equal lives give equal bytes, whatever sequence types their columns have. Keeps the columns it is given."""

    def __init__(self) -> None:
        self._memory = _Memory(len(_PLAN_COLUMNS))
        self._ticks: list[int] = []

    def waits(self, event: Event, instructions: Sequence[Instruction]) -> bool:
        """Whether it is a tick that led to nothing: it is kept, to be written with `ticks`.

        Clocks go forward; a tick for which this one does not is written by itself.
        """
        if type(event) is not Tick or instructions or not _TICKS_ARE_TIMES:
            return False
        before = self._ticks[-1] if self._ticks else 0
        if not before <= event.at_us < before + _LATEST_US:
            return False
        self._ticks.append(event.at_us)
        return True

    @property
    def waiting(self) -> int:
        return len(self._ticks)

    def ticks(self) -> bytes:
        """Those that wait: in front of the next body, or a body by themselves."""
        if not self._ticks:
            return b""
        times, self._ticks = self._ticks, []
        between = [later - earlier for earlier, later in pairwise(times)]
        least = min(between, default=0)
        return _IDLE_HEAD.pack(_IDLE, times[0], least) + column([one - least for one in between])

    def body(self, event: Event, instructions: Sequence[Instruction]) -> bytes:
        """Raises `TypeError` for a value that is none of the planner's, `struct.error` for a number beyond 64 bits."""
        pieces: list[bytes] = []
        if type(event) is StepDone:
            self._step_done(event, pieces)
        else:
            self._other(event, pieces)
        for one in instructions:
            kind = type(one)
            if kind is RunStep:
                self._plan(cast(RunStep, one), pieces)
            elif kind is DeliverStep:
                self._deliveries(cast(DeliverStep, one), pieces)
            else:
                self._other(one, pieces)
        return b"".join(pieces)

    def raised(self, event: Event, error: str) -> bytes:
        return self.body(event, []) + _KINDS[_RAISED] + text(error.encode())

    def _other(self, one: Event | Instruction, pieces: list[bytes]) -> None:
        known = _BY_CLASS.get(type(one))
        if known is not None:
            kind, layout = known
            data = layout.encode(one, self._memory.values)
            if data is not None:
                pieces += (kind, data)
            else:
                pieces += (_KINDS[_JSON], text(to_json(one)))
            if type(one) is not Deliver:
                return
        else:
            pieces += (_KINDS[_JSON], text(to_json(one)))
        self._memory.take(one)

    def _step_done(self, event: StepDone, pieces: list[bytes]) -> None:
        result, memory = event.result, self._memory
        place = memory.places.get((event.worker, result.incarnation))
        tokens = memory.tokens = list(result.tokens)
        logprobs = memory.logprobs = result.logprobs
        what = 0
        follows = []
        if place is None:
            what = _NAMED
            follows.append(_name(event.worker, result.incarnation))
            follows.append(column(tokens))
        else:
            data = column(tokens, place.widths[-1])
            place.widths[-1] = data[0]
            follows.append(data)
        if place is None or result.forwards != place.forwards:
            what |= _FORWARDS
            follows.append(column(result.forwards))
            if place is not None:
                place.forwards = result.forwards
        if logprobs:
            what |= _LOGPROBS
            follows += _logprobs(logprobs)
        if result.prompt_logprobs:
            what |= _PROMPT_LOGPROBS
            follows += _logprobs(result.prompt_logprobs)
        if not (_STEP_DONE_REST.none and _RESULT_REST.none):
            what |= _rest(follows, _STEP_DONE_REST.of(event), _RESULT_REST.of(result))
        pieces.append(
            _STEP_DONE_HEAD.pack(
                _STEP_DONE,
                what,
                place.number if place is not None else 0,
                event.at_us,
                result.step,
                result.step_us,
                result.idle_us,
            )
        )
        pieces += follows

    def _plan(self, instruction: RunStep, pieces: list[bytes]) -> None:
        plan, memory = instruction.plan, self._memory
        place = memory.places.get((instruction.worker, plan.incarnation))
        what = mask = 0
        follows = []
        if place is None:
            place = memory.begin_place(instruction.worker, plan.incarnation)
            what = _NAMED
            follows.append(_name(instruction.worker, plan.incarnation))
        before, widths = place.columns, place.widths
        bit = 1
        for k, values in enumerate(_columns_of(plan)):
            if values != before[k]:
                if type(values) is not list:
                    values = list(values)  # what holds them makes no difference
                    if values == before[k]:
                        bit <<= 1
                        continue
                data = column(values, widths[k])
                widths[k] = data[0]
                before[k] = values
                mask |= bit
                follows.append(data)
            bit <<= 1
        for op in plan.ops:
            known = _BY_CLASS.get(type(op))
            encoded = known[1].encode(op, memory.values) if known is not None else None
            if known is not None and encoded is not None:
                follows += (known[0], encoded)
            else:
                follows += (_KINDS[_JSON], text(to_json(op)))
        if not (_RUN_STEP_REST.none and _PLAN_REST.none):
            what |= _rest(follows, _RUN_STEP_REST.of(instruction), _PLAN_REST.of(plan))
        pieces.append(
            _RUN_STEP_HEAD.pack(_RUN_STEP, what, mask, place.number, plan.step, plan.table_digest, len(plan.ops))
        )
        pieces += follows

    def _deliveries(self, step: DeliverStep, pieces: list[bytes]) -> None:
        memory = self._memory
        names, tokens, logprobs = step.generations, step.tokens, step.logprobs
        what = 0
        follows = []
        if names != memory.names:
            memory.drop_ended()
            before = memory.names
            more = names[len(before) :]
            before += more
            what = _MORE_NAMES
            if before != names:
                what = _NAMES
                memory.names = more = names.copy()
            follows += _names(more)
        data = column(step.offsets, memory.offsets_width)
        memory.offsets_width = data[0]
        follows.append(data)
        if tokens != memory.tokens:
            what |= _TOKENS
            follows.append(column(tokens))
        if logprobs:
            if list(logprobs) == list(memory.logprobs):
                what |= _SAME_LOGPROBS
            else:
                what |= _LOGPROBS
                follows += _logprobs(logprobs)
        if not _DELIVER_STEP_REST.none:
            what |= _rest(follows, _DELIVER_STEP_REST.of(step), b"")
        pieces.append(_DELIVER_STEP_HEAD.pack(_DELIVER_STEP, what))
        pieces += follows


_TICKS_ARE_TIMES = Rest(Tick, "at_us").none
_BY_CLASS: dict[type, tuple[bytes, Layout]] = {
    one.kind: (_KINDS[kind], one) for kind, one in enumerate(_LAYOUTS, _FIRST_LAYOUT)
}
_columns_of: Callable[[StepPlan], tuple[Sequence[int], ...]] = attrgetter(*_PLAN_COLUMNS)


def _name(worker: WorkerId, incarnation: Incarnation) -> bytes:
    return text(worker.encode()) + text(incarnation.encode())


def _names(names: Sequence[GenerationId]) -> list[bytes]:
    """As one text; one by one where a name holds what parts them."""
    joined = "\0".join(names)
    if joined.count("\0") == len(names) - 1:
        return [b"\1", text(joined.encode())]
    return [b"\0", column([len(one.encode()) for one in names]), *[one.encode() for one in names]]


def _logprobs(logprobs: Sequence[TokenLogprobs | None]) -> list[bytes]:
    return logprob_columns(logprobs) if LOGPROBS_HAVE_COLUMNS else [text(to_json(tuple(logprobs)))]


def _rest(follows: list[bytes], outer: bytes, inner: bytes) -> int:
    if not (outer or inner):
        return 0
    follows += (text(outer), text(inner))
    return _REST


def calls_in(body: bytes) -> int:
    """How many calls it holds, at a glance."""
    if body[0] != _IDLE:
        return 1
    r = Reader(body)
    r.numbers(_IDLE_HEAD)
    return 1 + len(r.column()) + r.left


class PartReader:
    """The `Writer`'s other side: one life, from its first body on. Raises `BadInput` for a newer version's header."""

    def __init__(self, header: Any) -> None:
        descriptions, self._plan_columns = _checked(header)
        self._layouts = {}
        for kind, description in enumerate(descriptions, _FIRST_LAYOUT):
            if not issubclass(CLASSES.get(description[0], int), _WITH_LAYOUTS):
                raise BadInput(f"it holds {description[0]}, which this version does not know")
            try:
                self._layouts[kind] = Layout(CLASSES[description[0]], description)
            except (AttributeError, KeyError, TypeError, ValueError, error) as cause:
                raise BadInput(f"its header does not say how a {description[0]} is written: {cause!r}") from cause
        if unknown := sorted(set(self._plan_columns) - {one.name for one in fields(StepPlan)}):
            raise BadInput(f"it holds StepPlan.{unknown[0]}, which this version does not know")
        self._memory = _Memory(len(self._plan_columns))
        self._places: dict[int, tuple[WorkerId, Incarnation, _Place]] = {}

    def calls(self, body: bytes) -> Iterator[Call]:
        """What one body holds. Raises `BadInput` for one that no writer of this format wrote."""
        try:
            r = Reader(body)
            if body[0] == _IDLE:
                _, first, least = r.numbers(_IDLE_HEAD)
                times = accumulate([first, *[least + one for one in r.column()]])
                yield from [Call(Tick(at_us=at_us), [], None, b"") for at_us in times]
            if r.left:
                yield self._call(r, body[r.at :])
        except (error, IndexError, KeyError, StopIteration, TypeError, ValueError) as cause:
            raise BadInput(f"not a record of the planner's: {body[:60]!r} ({cause})") from cause

    def _call(self, r: Reader, body: bytes) -> Call:
        event = self._step_done(r) if r.byte() == _STEP_DONE else self._other(r)
        instructions: list[Instruction] = []
        raised: str | None = None
        while r.left:
            kind = r.byte()
            if kind == _RUN_STEP:
                instructions.append(self._plan(r))
            elif kind == _DELIVER_STEP:
                instructions.append(self._deliveries(r))
            elif kind == _RAISED:
                r.skip()
                raised = r.text().decode()
            else:
                instructions.append(self._other(r))
        return Call(event, instructions, raised, body)

    def _other(self, r: Reader) -> Any:
        one = self._value(r)
        self._memory.take(one)
        return one

    def _value(self, r: Reader) -> Any:
        kind = r.byte()
        r.skip()
        return from_json(r.text()) if kind == _JSON else self._layouts[kind].decode(r, self._memory.values)

    def _step_done(self, r: Reader) -> StepDone:
        _, what, number, at_us, step, step_us, idle_us = r.numbers(_STEP_DONE_HEAD)
        memory = self._memory
        place = None
        if what & _NAMED:
            worker, incarnation = _read_name(r)
        else:
            worker, incarnation, place = self._places[number]
        memory.tokens = r.column()
        if what & _FORWARDS:
            forwards: Sequence[int] = tuple(r.column())
            if place is not None:
                place.forwards = forwards
        else:
            assert place is not None
            forwards = place.forwards or ()
        memory.logprobs = _read_logprobs(r) if what & _LOGPROBS else ()
        prompts = cast(Sequence[TokenLogprobs], _read_logprobs(r) if what & _PROMPT_LOGPROBS else ())
        outer, inner = _read_rest(r) if what & _REST else ({}, {})
        result = StepResult(
            incarnation=incarnation,
            step=StepNumber(step),
            tokens=tuple(memory.tokens),
            logprobs=tuple(memory.logprobs),
            forwards=forwards,
            step_us=step_us,
            idle_us=idle_us,
            prompt_logprobs=tuple(prompts),
            **inner,
        )
        return StepDone(at_us=at_us, worker=worker, result=result, **outer)

    def _plan(self, r: Reader) -> RunStep:
        _, what, mask, number, step, digest, ops = r.numbers(_RUN_STEP_HEAD)
        if what & _NAMED:
            worker, incarnation = _read_name(r)
            self._places[number] = worker, incarnation, self._memory.begin_place(worker, incarnation)
        worker, incarnation, place = self._places[number]
        for k in range(len(self._plan_columns)):
            if mask & (1 << k):
                place.columns[k] = r.column()
        operations = tuple([cast(SequenceOp, self._value(r)) for _ in range(ops)])
        outer, inner = _read_rest(r) if what & _REST else ({}, {})
        plan = StepPlan(
            incarnation=incarnation,
            step=StepNumber(step),
            table_digest=digest,
            ops=operations,
            **dict(zip(self._plan_columns, place.columns, strict=True)),
            **inner,
        )
        return RunStep(worker=worker, plan=plan, **outer)

    def _deliveries(self, r: Reader) -> DeliverStep:
        memory = self._memory
        _, what = r.numbers(_DELIVER_STEP_HEAD)
        if what & (_NAMES | _MORE_NAMES):
            memory.drop_ended()
            if what & _NAMES:
                memory.names.clear()
            memory.names += _read_names(r)
        offsets = r.column()
        tokens = r.column() if what & _TOKENS else list(memory.tokens)
        logprobs: list[TokenLogprobs | None] = []
        if what & (_LOGPROBS | _SAME_LOGPROBS):
            logprobs = list(_read_logprobs(r) if what & _LOGPROBS else memory.logprobs)
        outer, _ = _read_rest(r) if what & _REST else ({}, {})
        return DeliverStep(generations=memory.names.copy(), offsets=offsets, tokens=tokens, logprobs=logprobs, **outer)


_WITH_LAYOUTS = tuple(_BY_CLASS)


def _checked(header: Any) -> Header:
    match header:
        case (tuple(descriptions), tuple(columns)) if all(len(one) == 5 for one in descriptions):
            return descriptions, columns
    raise BadInput("its header does not say how its records are written")


def _read_name(r: Reader) -> tuple[WorkerId, Incarnation]:
    return WorkerId(r.text().decode()), Incarnation(r.text().decode())


def _read_names(r: Reader) -> list[GenerationId]:
    joined = r.byte()
    r.skip()
    if joined:
        return [GenerationId(name) for name in r.text().decode().split("\0")]
    return [GenerationId(r.take(length).decode()) for length in r.column()]


def _read_logprobs(r: Reader) -> Sequence[TokenLogprobs | None]:
    if LOGPROBS_HAVE_COLUMNS:
        return r.logprobs()
    logprobs: tuple[TokenLogprobs | None, ...] = from_json(r.text())
    return logprobs


def _read_rest(r: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    return Rest.read(r.text()), Rest.read(r.text())
