"""One call of `Control.handle` as bytes, format 2: read, no longer written.

A body is parts: a kind, a length, the part. What a cluster does all the time is columns of little-endian integers, and
a column that equals the one written last in its place (of that worker's last plan; tokens that are delivered as the
worker gave them) is one byte. The rest is JSON. So a body is read only behind those before it, by a `PartReader` with a
memory: one life each.
"""

import sys
from array import array
from collections.abc import Iterator
from struct import Struct, error
from typing import Any

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
from microtome.planner.journal_format_3 import Call
from microtome.planner.records import from_json
from microtome.planner.types import (
    GenerationId,
    Incarnation,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerId,
)

_PART = Struct("<BI")  # kind, length of what follows
_TEXT = Struct("<I")  # length
_COLUMN = Struct("<BI")  # bytes of each entry, entries
_STEP_DONE_NUMBERS = Struct("<qqqq")  # at_us, step, step_us, idle_us
_RUN_STEP_NUMBERS = Struct("<qq")  # step, table digest
_STEP_DONE, _RUN_STEP, _TOKENS, _SUBMIT, _RAISED = range(1, 6)  # 0: JSON
_SIGNED, _FLOAT = 9, 10  # widths that stand for eight bytes each
_CODES = {4: "I", _SIGNED: "q", _FLOAT: "d"}
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


class PartReader:
    """One life, from its first body on."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def calls(self, body: bytes) -> Iterator[Call]:
        """What one body holds. Raises `BadInput` for one that is none of this format's."""
        try:
            yield self._call(body)
        except (error, AssertionError, IndexError, StopIteration, TypeError, ValueError) as cause:
            raise BadInput(f"not a record of the planner's: {body[:60]!r} ({cause})") from cause

    def _call(self, body: bytes) -> Call:
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
        return Call(event, instructions, raised, body)

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
