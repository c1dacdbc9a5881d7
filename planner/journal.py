"""A cluster's life as bytes: every event with the instructions it led to, in order, append-only.

A journal is a sequence of frames: length, CRC-32, then that many bytes. The first frame is the header: the format and
the planner's configuration. Every other is one entry, what one call of `Control.handle` took and gave, as parts: a
kind, a length, the part. What a cluster does all the time is written as columns of little-endian integers: answered
steps, plans, tokens delivered (consecutive ones together). Everything else is JSON, by `records`.

A crash may tear the last frame, so a frame that is cut short or whose checksum is wrong ends the journal: what stands
before it is good. Bytes in, bytes out: files are the caller's.
"""

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput
from microtome.planner.events import Deliver, Event, Instruction, RunStep, StepDone
from microtome.planner.records import from_json, to_json
from microtome.planner.types import GenerationId, Incarnation, StepNumber, StepPlan, StepResult, WorkerId

FORMAT = 1
_FRAME = Struct("<II")  # length of what follows, CRC-32 of it
_PART = Struct("<BI")  # kind, length of what follows
_TEXT = Struct("<I")  # length
_COLUMN = Struct("<IB")  # entries, bytes of each
_JSON, _STEP_DONE, _RUN_STEP, _TOKENS = range(4)
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
_SWAP = sys.byteorder == "big"


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of `Control.handle`. `answers`: what it returned, as it was encoded, for exact comparison."""

    event: Event
    answers: bytes

    @property
    def instructions(self) -> list[Instruction]:
        return list(_decode_instructions(self.answers))


@dataclass(frozen=True, slots=True)
class Journal:
    config: PlannerConfig
    entries: Sequence[Entry]
    torn_bytes: int  # behind the last good frame


# --- writing ---


def encode_header(config: PlannerConfig) -> bytes:
    """A journal's first bytes."""
    return _frame(bytes([FORMAT]) + to_json(config))


def encode_entry(event: Event, instructions: Sequence[Instruction]) -> bytes:
    """One frame; to be appended."""
    return _frame(_encode_event(event) + encode_instructions(instructions))


def encode_instructions(instructions: Sequence[Instruction]) -> bytes:
    """Equal instructions give equal bytes, whatever sequence types their columns have."""
    parts: list[bytes] = []
    run: list[Deliver] = []
    for instruction in instructions:
        if type(instruction) is Deliver and not (instruction.finish or instruction.logprobs):
            run.append(instruction)
            continue
        if run:
            parts.append(_encode_tokens(run))
            run = []
        if type(instruction) is RunStep:
            parts.append(_encode_plan(instruction))
        else:
            parts.append(_part(_JSON, to_json(instruction)))
    if run:
        parts.append(_encode_tokens(run))
    return b"".join(parts)


def _frame(body: bytes) -> bytes:
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _part(kind: int, body: bytes) -> bytes:
    return _PART.pack(kind, len(body)) + body


def _column(values: Sequence[int]) -> bytes:
    """Its entries, how wide each is, and the entries; as narrow as the values allow."""
    try:
        return _COLUMN.pack(len(values), 1) + bytes(values)
    except ValueError:
        pass
    try:
        column = array("I", values)
    except OverflowError:
        column = array("Q", values)
    if _SWAP:
        column.byteswap()
    return _COLUMN.pack(len(column), column.itemsize) + column.tobytes()


def _encode_event(event: Event) -> bytes:
    if type(event) is StepDone and not event.result.logprobs:
        r = event.result
        names = f"{event.worker}\0{r.incarnation}".encode()
        numbers = (event.at_us, r.step, r.step_us, r.idle_us)
        return _part(_STEP_DONE, b"".join([_text(names), _column(numbers), _column(r.tokens), _column(r.forwards)]))
    return _part(_JSON, to_json(event))


def _encode_plan(instruction: RunStep) -> bytes:
    plan = instruction.plan
    names = f"{instruction.worker}\0{plan.incarnation}".encode()
    columns = [_column(getattr(plan, name)) for name in _PLAN_COLUMNS]
    ops = to_json(plan.ops) if plan.ops else b""
    return _part(_RUN_STEP, b"".join([_text(names), _column((plan.step, plan.table_digest)), *columns, _text(ops)]))


def _encode_tokens(run: Sequence[Deliver]) -> bytes:
    names = "\0".join([d.generation for d in run]).encode()
    counts: list[int] = []  # none: one token each
    try:
        tokens = [token for (token,) in [d.tokens for d in run]]
    except ValueError:
        tokens = [token for d in run for token in d.tokens]
        counts = [len(d.tokens) for d in run]
    return _part(_TOKENS, b"".join([_text(names), _column([d.offset for d in run]), _column(counts), _column(tokens)]))


def _text(data: bytes) -> bytes:
    return _TEXT.pack(len(data)) + data


# --- reading ---


def read_journal(data: bytes) -> Journal:
    """A whole journal. Raises `BadInput` if it does not begin with a header of this format."""
    bodies = list(_bodies(data))
    if not bodies:
        raise BadInput("not a journal: its first frame is not whole")
    header = bodies[0]
    if not header or header[0] != FORMAT:
        raise BadInput(f"a journal of format {header[0] if header else 'none'}; this reads format {FORMAT}")
    config = from_json(header[1:])
    if not isinstance(config, PlannerConfig):
        raise BadInput("not a journal: its header holds no configuration")
    entries = [_entry(body) for body in bodies[1:]]
    return Journal(config, entries, len(data) - sum(_FRAME.size + len(body) for body in bodies))


def _bodies(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if length > _MAX_FRAME or len(body) < length or zlib.crc32(body) != checksum:
            return
        yield body
        at += _FRAME.size + length


def _entry(body: bytes) -> Entry:
    kind, length = _PART.unpack_from(body)
    end = _PART.size + length
    part = body[_PART.size : end]
    event: Event = _decode_step_done(part) if kind == _STEP_DONE else from_json(part)
    return Entry(event, body[end:])


def _decode_instructions(data: bytes) -> Iterator[Instruction]:
    at = 0
    while at < len(data):
        kind, length = _PART.unpack_from(data, at)
        at += _PART.size
        part = data[at : at + length]
        at += length
        if kind == _RUN_STEP:
            yield _decode_plan(part)
        elif kind == _TOKENS:
            yield from _decode_tokens(part)
        else:
            yield from_json(part)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def text(self) -> bytes:
        (length,) = _TEXT.unpack_from(self._data, self._at)
        begin = self._at + _TEXT.size
        self._at = begin + length
        return self._data[begin : self._at]

    def column(self) -> tuple[int, ...]:
        entries, width = _COLUMN.unpack_from(self._data, self._at)
        begin = self._at + _COLUMN.size
        self._at = begin + entries * width
        if width == 1:
            return tuple(self._data[begin : self._at])
        column = array("I" if width == 4 else "Q")
        column.frombytes(self._data[begin : self._at])
        if _SWAP:
            column.byteswap()
        return tuple(column)


def _decode_step_done(part: bytes) -> StepDone:
    r = _Reader(part)
    worker, _, incarnation = r.text().decode().partition("\0")
    at_us, step, step_us, idle_us = r.column()
    result = StepResult(
        incarnation=Incarnation(incarnation),
        step=StepNumber(step),
        tokens=r.column(),
        forwards=r.column(),
        step_us=step_us,
        idle_us=idle_us,
    )
    return StepDone(at_us=at_us, worker=WorkerId(worker), result=result)


def _decode_plan(part: bytes) -> RunStep:
    r = _Reader(part)
    worker, _, incarnation = r.text().decode().partition("\0")
    step, digest = r.column()
    columns = {name: r.column() for name in _PLAN_COLUMNS}
    ops = r.text()
    plan = StepPlan(
        incarnation=Incarnation(incarnation),
        step=StepNumber(step),
        table_digest=digest,
        ops=from_json(ops) if ops else (),
        **columns,
    )
    return RunStep(worker=WorkerId(worker), plan=plan)


def _decode_tokens(part: bytes) -> Iterable[Deliver]:
    r = _Reader(part)
    names = r.text().decode().split("\0")
    offsets, counts, tokens = r.column(), r.column(), r.column()
    at = 0
    for name, offset, count in zip(names, offsets, counts or (1,) * len(offsets), strict=True):
        yield Deliver(generation=GenerationId(name), offset=offset, tokens=tokens[at : at + count])
        at += count
