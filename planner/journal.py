"""A cluster's life as bytes: every event with the instructions it led to, in order, append-only.

A journal is a sequence of records, each a frame: length, CRC-32 of what follows, then that many bytes. A header begins
the life of a driver: magic, format, the planner's configuration. Every other record is an entry, what one call of
`Control.handle` took and gave, as parts: a kind, a length, the part. A driver that starts again appends another header.

What a cluster does all the time is written as columns of little-endian integers: answered steps, plans, tokens that are
delivered. A column that equals the one written last in its place (of that worker's last plan; tokens that are delivered
as the worker gave them) is one byte. So an entry is read only behind those before it, and an `Encoder`, or a decoder,
has a memory: one life each. What is rare is JSON, by `records`.

A crash may tear the last record: a journal ends before one that is cut short. One whose checksum is wrong ends it too,
and is named. Bytes in, bytes out: files are the caller's. Not thread-safe.
"""

import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from operator import attrgetter
from struct import Struct
from typing import Any

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput
from microtome.planner.events import (
    DeliverStep,
    Event,
    GiveUpWorker,
    Instruction,
    ReleaseWorker,
    RunStep,
    StepDone,
    Submit,
    WorkerGone,
)
from microtome.planner.records import from_json, to_json
from microtome.planner.types import (
    GenerationId,
    Incarnation,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerId,
)

FORMAT = 2
MAGIC = b"microtome journal\n"
_FRAME = Struct("<II")  # length of what follows, CRC-32 of it
_PART = Struct("<BI")  # kind, length of what follows
_TEXT = Struct("<I")  # length
_COLUMN = Struct("<BI")  # bytes of each entry, entries
_STEP_DONE_NUMBERS = Struct("<qqqq")  # at_us, step, step_us, idle_us
_RUN_STEP_NUMBERS = Struct("<qq")  # step, table digest
_JSON, _STEP_DONE, _RUN_STEP, _TOKENS, _SUBMIT, _RAISED = range(6)
_SAME = b"\0"  # instead of a column or names: those written last in this place
_MARK = b"\1"  # before what may be missing
_SIGNED, _FLOAT = 9, 10  # widths that stand for eight bytes each
_CODES = {4: "I", _SIGNED: "q", _FLOAT: "d"}
_MAX_FRAME = 1 << 30
_PLAN_COLUMNS = (
    "sequences",
    "starts",
    "widths",
    "flags",
    "cells",
    "tokens",
    "slice_offsets",
    "slice_lengths",
    "slice_methods",
)
_columns_of: Callable[[StepPlan], tuple[Sequence[int], ...]] = attrgetter(*_PLAN_COLUMNS)
_SWAP = sys.byteorder == "big"


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of `Control.handle`. `record` counts from 0 in its file, headers too."""

    event: Event
    instructions: list[Instruction]
    raised: str | None = None  # it raised this instead of answering: the planner's defect
    record: int = 0
    body: bytes = b""  # as it stands in the file, for exact comparison


@dataclass(frozen=True, slots=True)
class Life:
    """A driver's life. Its entries are decoded anew each time they are iterated."""

    config: PlannerConfig
    version: str  # of the package that wrote it
    began_unix_us: int  # when; the events' times are another clock's
    first_record: int
    bodies: "_Bodies"

    def __iter__(self) -> Iterator[Entry]:
        decoder = _Decoder()
        for number, body in enumerate(self.bodies, self.first_record + 1):
            try:
                yield decoder.entry(body, number)
            except BadInput as error:
                raise BadInput(f"record {number} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self.bodies)


@dataclass(frozen=True, slots=True)
class Journal:
    lives: Sequence[Life]
    unread_bytes: int  # behind the last good record
    damage: str | None  # why they are unread, if no crash while writing explains it


# --- writing ---


class _Memory:
    """What was written last in each place: the same on both sides."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.names: list[GenerationId] = []
        self.plans: dict[WorkerId, list[list[int]]] = {}

    def plan(self, worker: WorkerId) -> list[list[int]]:
        known = self.plans.get(worker)
        if known is None:
            known = self.plans[worker] = [[] for _ in _PLAN_COLUMNS]
        return known

    def forget(self, of: object) -> None:
        """A worker has gone: its name may never come again."""
        if isinstance(of, WorkerGone | GiveUpWorker | ReleaseWorker):
            self.plans.pop(of.worker, None)


class Encoder:
    """Equal lives give equal bytes, whatever sequence types their columns have. Keeps the columns it is given."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def header(self, config: PlannerConfig, *, version: str = "", unix_us: int = 0) -> bytes:
        """A life's first bytes."""
        self._memory = _Memory()
        return _frame(MAGIC + bytes([FORMAT]) + to_json((config, version, unix_us)))

    def entry(self, event: Event, instructions: Sequence[Instruction]) -> bytes:
        """One record; to be appended."""
        return _frame(self.body(event, instructions))

    def body(self, event: Event, instructions: Sequence[Instruction]) -> bytes:
        """The same without what frames it."""
        parts = [self._event(event)]
        for one in instructions:
            if type(one) is RunStep:
                parts.append(self._plan(one))
            elif type(one) is DeliverStep:
                parts.append(self._deliveries(one))
            else:
                self._memory.forget(one)
                parts.append(_part(_JSON, to_json(one)))
        return b"".join(parts)

    def raised(self, event: Event, error: str) -> bytes:
        """The record of an event that broke the planner: a life's last."""
        return _frame(self._event(event) + _part(_RAISED, error.encode()))

    def _event(self, event: Event) -> bytes:
        if type(event) is StepDone:
            return self._step_done(event)
        if type(event) is Submit:
            return _part(_SUBMIT, _column(list(event.prompt)) + to_json(event, without="prompt"))
        self._memory.forget(event)
        return _part(_JSON, to_json(event))

    def _step_done(self, event: StepDone) -> bytes:
        r, memory = event.result, self._memory
        memory.tokens = list(r.tokens)
        memory.logprobs = list(r.logprobs)
        return _part(
            _STEP_DONE,
            b"".join(
                [
                    _text(f"{event.worker}\0{r.incarnation}".encode()),
                    _STEP_DONE_NUMBERS.pack(event.at_us, r.step, r.step_us, r.idle_us),
                    _column(memory.tokens),
                    _column(list(r.forwards)),
                    *_logprobs(memory.logprobs),
                ]
            ),
        )

    def _plan(self, instruction: RunStep) -> bytes:
        plan = instruction.plan
        pieces = [
            _text(f"{instruction.worker}\0{plan.incarnation}".encode()),
            _RUN_STEP_NUMBERS.pack(plan.step, plan.table_digest),
        ]
        before = self._memory.plan(instruction.worker)
        for k, column in enumerate(_columns_of(plan)):
            values = column if type(column) is list else list(column)
            if values == before[k]:
                pieces.append(_SAME)
            else:
                pieces.append(_column(values))
                before[k] = values
        if plan.ops:
            pieces.append(to_json(plan.ops))
        return _part(_RUN_STEP, b"".join(pieces))

    def _deliveries(self, step: DeliverStep) -> bytes:
        memory = self._memory
        names, tokens, logprobs = step.generations, step.tokens, step.logprobs
        pieces = [
            _SAME if names == memory.names else _MARK + _text("\0".join(names).encode()),
            _column(step.offsets),
            _SAME if tokens == memory.tokens else _column(tokens),
        ]
        if logprobs:
            pieces += [_SAME] if logprobs == memory.logprobs else [_MARK, *_logprobs(logprobs)]
        memory.names = names
        return _part(_TOKENS, b"".join(pieces))


def _frame(body: bytes) -> bytes:
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _part(kind: int, body: bytes) -> bytes:
    return _PART.pack(kind, len(body)) + body


def _text(data: bytes) -> bytes:
    return _TEXT.pack(len(data)) + data


def _column(values: list[int]) -> bytes:
    """How wide each entry is, how many there are, and the entries; as narrow as the values allow."""
    if not values or (values[0] < 256 and values[-1] < 256):
        try:
            return _COLUMN.pack(1, len(values)) + bytes(values)
        except ValueError:
            pass
    try:
        return _array(4, array("I", values))
    except OverflowError:
        return _array(_SIGNED, array("q", values))


def _array(width: int, column: "array[Any]") -> bytes:
    if _SWAP:
        column.byteswap()
    return _COLUMN.pack(width, len(column)) + column.tobytes()


def _logprobs(logprobs: Sequence[TokenLogprobs | None]) -> list[bytes]:
    """Nothing for none. Else per token 0 for None or 1 and how many are beside it; all numbers; the tokens beside."""
    if not logprobs:
        return []
    known = [one for one in logprobs if one is not None]
    numbers = [number for one in known for number in (one.logprob, *(logprob for _, logprob in one.top))]
    return [
        _column([0 if one is None else 1 + len(one.top) for one in logprobs]),
        _array(_FLOAT, array("d", numbers)),
        _column([token for one in known for token, _ in one.top]),
    ]


# --- reading ---


@dataclass(frozen=True, slots=True)
class Extent:
    """Where records lie in a file's bytes: (begin, end) of each body. Beyond `end` nothing can be read."""

    bodies: Sequence[tuple[int, int]]
    end: int
    damage: str | None  # a record that was whole once; None: the file ends there, or was being written


def records_of(data: bytes | mmap) -> Extent:
    """Find the records of a file, by their lengths and checksums."""
    bodies: list[tuple[int, int]] = []
    at, size = 0, len(data)
    damage = None
    while at + _FRAME.size <= size:
        length, checksum = _FRAME.unpack_from(data, at)
        begin = at + _FRAME.size
        end = begin + length
        if not length and not any(data[at:]):
            break  # a machine that stopped may leave zeros behind what was written
        if not 0 < length <= _MAX_FRAME:
            damage = f"record {len(bodies)} at byte {at} is damaged: its length is {length}"
            break
        if end > size:
            break
        if zlib.crc32(data[begin:end]) != checksum:
            damage = f"record {len(bodies)} at byte {at} is damaged: its CRC-32 is not the one written with it"
            break
        bodies.append((begin, end))
        at = end
    return Extent(bodies, at, damage)


def is_journal(data: bytes | mmap) -> bool:
    """Whether a file that begins so is a journal, of any format. An empty one, or a torn header, is none."""
    return data[_FRAME.size : _FRAME.size + len(MAGIC)] == MAGIC


def read_journal(data: bytes | mmap) -> Journal:
    """A whole journal; `data` is kept. Raises `BadInput` if it does not begin with a header of this format."""
    if not is_journal(data):
        raise BadInput("it is not a journal: it does not begin with a journal's header")
    extent = records_of(data)
    if not extent.bodies:
        raise BadInput(f"it has no record that can be read: {extent.damage or 'its first one is cut short'}")
    lives: list[Life] = []
    heads = [k for k, (begin, _) in enumerate(extent.bodies) if data[begin : begin + len(MAGIC)] == MAGIC]
    for head, following in zip(heads, [*heads[1:], len(extent.bodies)], strict=True):
        begin, end = extent.bodies[head]
        config, version, unix_us = _read_header(data[begin + len(MAGIC) : end])
        lives.append(Life(config, version, unix_us, head, _Bodies(data, extent.bodies[head + 1 : following])))
    return Journal(lives, len(data) - extent.end, extent.damage)


def _read_header(body: bytes) -> tuple[PlannerConfig, str, int]:
    if body[:1] != bytes([FORMAT]):
        raise BadInput(f"it is a journal of format {body[0] if body else 'none'}; this reads format {FORMAT}")
    match from_json(body[1:]):
        case (PlannerConfig() as config, str(version), int(unix_us)):
            return config, version, unix_us
    raise BadInput("it is not a journal: its header holds no configuration")


class _Bodies(Sequence[bytes]):
    """Slices of a file, made when they are looked at."""

    def __init__(self, data: bytes | mmap, extents: Sequence[tuple[int, int]]) -> None:
        self._data = data
        self._extents = extents

    def __len__(self) -> int:
        return len(self._extents)

    def __getitem__(self, at: Any) -> Any:
        begin, end = self._extents[at]
        return self._data[begin:end]


class _Reader:
    """A part's bytes, from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def numbers(self, kind: Struct) -> tuple[int, ...]:
        begin = self._at
        self._at = begin + kind.size
        return kind.unpack_from(self._data, begin)

    def text(self) -> bytes:
        (length,) = self.numbers(_TEXT)
        begin = self._at
        self._at = begin + length
        return self._data[begin : self._at]

    def rest(self) -> bytes:
        begin, self._at = self._at, len(self._data)
        return self._data[begin:]

    def same(self) -> bool:
        """Whether nothing is written here; a mark that something is stays to be read."""
        if self._data[self._at] != 0:
            return False
        self._at += 1
        return True

    def skip_mark(self) -> None:
        self._at += 1

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def column(self) -> list[Any]:
        width, entries = self.numbers(_COLUMN)
        begin = self._at
        self._at = begin + entries * (width if width < _SIGNED else 8)
        data = self._data[begin : self._at]
        if width == 1:
            return list(data)
        column: array[Any] = array(_CODES[width])
        column.frombytes(data)
        if _SWAP:
            column.byteswap()
        return column.tolist()

    def logprobs(self) -> list[TokenLogprobs | None]:
        counts, numbers, tokens = self.column(), iter(self.column()), iter(self.column())
        return [
            TokenLogprobs(next(numbers), tuple((next(tokens), next(numbers)) for _ in range(count - 1)))
            if count
            else None
            for count in counts
        ]


class _Decoder:
    """The `Encoder`'s other side: one life, from its first entry on."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def entry(self, body: bytes, record: int) -> Entry:
        event: Event | None = None
        raised: str | None = None
        instructions: list[Instruction] = []
        at = 0
        while at < len(body):
            kind, length = _PART.unpack_from(body, at)
            at += _PART.size
            part = body[at : at + length]
            at += length
            if event is None:
                event = self._event(kind, part)
            elif kind == _RUN_STEP:
                instructions.append(self._plan(part))
            elif kind == _TOKENS:
                instructions.append(self._deliveries(part))
            elif kind == _RAISED:
                raised = part.decode()
            else:
                one: Instruction = from_json(part)
                self._memory.forget(one)
                instructions.append(one)
        assert event is not None, "a body is never empty"
        return Entry(event, instructions, raised, record, body)

    def _event(self, kind: int, part: bytes) -> Event:
        r = _Reader(part)
        if kind == _STEP_DONE:
            return self._step_done(r)
        if kind == _SUBMIT:
            prompt = tuple(r.column())
            submit: Submit = from_json(r.rest(), prompt=prompt)
            return submit
        event: Event = from_json(part)
        self._memory.forget(event)
        return event

    def _step_done(self, r: _Reader) -> StepDone:
        worker, _, incarnation = r.text().decode().partition("\0")
        at_us, step, step_us, idle_us = r.numbers(_STEP_DONE_NUMBERS)
        memory = self._memory
        memory.tokens = r.column()
        forwards = r.column()
        memory.logprobs = r.logprobs() if r.left else []
        result = StepResult(
            incarnation=Incarnation(incarnation),
            step=StepNumber(step),
            tokens=tuple(memory.tokens),
            logprobs=tuple(memory.logprobs),
            forwards=tuple(forwards),
            step_us=step_us,
            idle_us=idle_us,
        )
        return StepDone(at_us=at_us, worker=WorkerId(worker), result=result)

    def _plan(self, part: bytes) -> RunStep:
        r = _Reader(part)
        worker, _, incarnation = r.text().decode().partition("\0")
        step, digest = r.numbers(_RUN_STEP_NUMBERS)
        columns = self._memory.plan(WorkerId(worker))
        for k in range(len(_PLAN_COLUMNS)):
            if not r.same():
                columns[k] = r.column()
        plan = StepPlan(
            incarnation=Incarnation(incarnation),
            step=StepNumber(step),
            table_digest=digest,
            ops=from_json(r.rest()) if r.left else (),
            **dict(zip(_PLAN_COLUMNS, columns, strict=True)),
        )
        return RunStep(worker=WorkerId(worker), plan=plan)

    def _deliveries(self, part: bytes) -> DeliverStep:
        r, memory = _Reader(part), self._memory
        if not r.same():
            r.skip_mark()
            memory.names = [GenerationId(name) for name in r.text().decode().split("\0")]
        offsets = r.column()
        tokens = memory.tokens if r.same() else r.column()
        logprobs: list[TokenLogprobs | None] = []
        if r.left:
            if r.same():
                logprobs = memory.logprobs
            else:
                r.skip_mark()
                logprobs = r.logprobs()
        return DeliverStep(generations=memory.names, offsets=offsets, tokens=tokens, logprobs=logprobs)
