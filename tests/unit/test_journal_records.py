"""Every event, instruction and operation comes back from its record as it was, those that are added later too."""

import dataclasses
import struct
import types
import typing
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microtome.planner import events as events_module
from microtome.planner.columns import Reader, column
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput, StepError
from microtome.planner.events import (
    CallersWait,
    Deliver,
    DrainBegun,
    Event,
    GiveUpWorker,
    Instruction,
    ReleaseWorker,
    Restored,
    RunStep,
    Scale,
    StartWorker,
    StepFailed,
    Submit,
    Tick,
    UpdateEnded,
    UpdateWorkers,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
)
from microtome.planner.journal import Encoder, Entry, read_journal
from microtome.planner.journal_format_3 import FREQUENT, PartReader, header
from microtome.planner.layouts import Layout, Memory, Rest, layout
from microtome.planner.records import from_json, to_json
from microtome.planner.scaling import ScalingConfig
from microtome.planner.types import (
    GenerationId,
    GenerationOptions,
    Incarnation,
    SequenceOp,
    SessionId,
    StepNumber,
    StepPlan,
    WorkerId,
)

EVENTS: tuple[type, ...] = typing.get_args(Event)
INSTRUCTIONS: tuple[type, ...] = typing.get_args(Instruction)
OPERATIONS: tuple[type, ...] = typing.get_args(SequenceOp)
# About workers, or once in a driver's life: what is rare enough to be JSON, and readable in the file.
RARE = {
    *(WorkerJoined, WorkerGone, WorkerDraining, WorkerPlaced, WorkerStartFailed, Scale, CallersWait, UpdateWorkers),
    *(StepFailed, GiveUpWorker, ReleaseWorker, StartWorker, DrainBegun, UpdateEnded, Restored),
}

INT_64 = st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
# No -0.0: where it stands behind a 0.0, it comes back as that one.
FLOATS = st.floats(allow_nan=False).map(lambda number: number + 0.0)
# Few names, so that they come again; some that no client may give, and no text of ours has.
TEXTS = st.one_of(st.sampled_from(["a", "b", "worker-1", "", "a\0b", "–"]), st.text(max_size=5))


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any values of that type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "__supertype__"):
        return values(hint.__supertype__, name)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(one, name) for one in arguments])
    if origin in (list, Sequence) or (origin is tuple and arguments[-1] is Ellipsis):
        return st.lists(values(arguments[0]), max_size=4).map(list if origin is list else tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if hint is int:
        return st.integers(0, 2**64 - 1) if name == "seed" else INT_64
    plain = {float: FLOATS, bool: st.booleans(), str: TEXTS, bytes: st.binary(max_size=5), type(None): st.none()}
    if hint in plain:
        return plain[hint]
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if issubclass(hint, Exception):
        return st.sampled_from([AtCapacity("cells", 3, 2, 250), StepError("it failed")])
    return built(hint)


def built(kind: type) -> st.SearchStrategy[Any]:
    if kind is ScalingConfig:  # which refuses most values
        return st.builds(ScalingConfig, max_workers=st.integers(1, 2**40), idle_s=st.floats(0, 1e9))
    hints = typing.get_type_hints(kind)
    fields = [one for one in dataclasses.fields(kind) if one.init]
    set_to = {one.name: values(hints[one.name], one.name) for one in fields}
    defaults = {one.name: st.builds(lambda one=one: _default_of(one)) for one in fields if _default_of(one) is not None}
    # Most fields are mostly as they are by default, which is what memories are for.
    mixed = {name: st.one_of(defaults[name], some) if name in defaults else some for name, some in set_to.items()}
    return st.builds(kind, **mixed)


def _default_of(one: Any) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return None if one.default is dataclasses.MISSING else one.default


CALLS = st.tuples(
    st.one_of([built(kind) for kind in EVENTS]), st.lists(st.one_of([built(kind) for kind in INSTRUCTIONS]), max_size=3)
)


def read(calls: Sequence[tuple[Any, Sequence[Any]]]) -> list[Entry]:
    """What a life of these calls says when it is read."""
    encoder = Encoder()
    records = [encoder.header(PlannerConfig()), *[encoder.entry(event, told) for event, told in calls]]
    (life,) = read_journal(b"".join([*records, encoder.waiting()])).lives
    entries = list(life)
    assert len(life) == len(entries)
    return entries


def check(calls: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    back = read(calls)
    assert len(back) == len(calls)
    for entry, (event, told) in zip(back, calls, strict=True):
        assert type(entry.event) is type(event)
        assert to_json(entry.event) == to_json(event)
        assert [type(one) for one in entry.instructions] == [type(one) for one in told]
        assert to_json(entry.instructions) == to_json(list(told))


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_any_event_of_this_type_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.lists(built(kind), min_size=1, max_size=4))
    def prove(some: list[Any]) -> None:
        check([(one, []) for one in some])

    prove()


@pytest.mark.parametrize("kind", INSTRUCTIONS, ids=lambda kind: kind.__name__)
def test_any_instruction_of_this_type_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.lists(built(kind), min_size=1, max_size=4))
    def prove(some: list[Any]) -> None:
        check([(Tick(at_us=1), some[:2]), (Tick(at_us=2), some[2:])])

    prove()


@pytest.mark.parametrize("kind", OPERATIONS, ids=lambda kind: kind.__name__)
def test_any_operation_of_this_type_comes_back_as_it_was(kind: type) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.lists(built(kind), min_size=1, max_size=4))
    def prove(some: list[Any]) -> None:
        plan = StepPlan(incarnation=Incarnation("f"), step=StepNumber(1), table_digest=2, ops=tuple(some))
        check([(Tick(at_us=1), [RunStep(worker=WorkerId("w"), plan=plan)] * 2)])

    prove()


@settings(max_examples=25, deadline=None)
@given(st.lists(CALLS, max_size=6))
def test_any_life_comes_back_as_it_was(calls: list[tuple[Any, list[Any]]]) -> None:
    check(calls)


@settings(max_examples=12, deadline=None)
@given(st.lists(CALLS, max_size=4))
def test_equal_lives_have_equal_bytes(calls: list[tuple[Any, list[Any]]]) -> None:
    def written() -> list[bytes]:
        encoder = Encoder()
        return [encoder.entry(event, told) for event, told in calls]

    assert written() == written()


def test_every_type_that_crosses_the_border_is_written_often_or_is_said_to_be_rare() -> None:
    crossing = {*EVENTS, *INSTRUCTIONS, *OPERATIONS}
    assert not FREQUENT & RARE
    assert crossing == FREQUENT | RARE, (
        "give the new type a layout in journal_format_3, or say here that it is rare and may be JSON"
    )


def test_every_dataclass_among_the_events_is_an_event_or_an_instruction() -> None:
    there = {
        kind
        for kind in vars(events_module).values()
        if dataclasses.is_dataclass(kind) and getattr(kind, "__module__", "") == events_module.__name__
    }
    assert there == {*EVENTS, *INSTRUCTIONS}


@pytest.mark.parametrize("kind", sorted(FREQUENT, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_what_is_frequent_is_not_written_as_json(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    sample: dict[str, Any] = {"prompt": (1,), "cells": (1,), "note": b"", "tokens": (1,), "usage": None}
    if kind in OPERATIONS:
        given_ = {one.name: sample.get(one.name, 1) for one in dataclasses.fields(kind)}
        if "sampling" in given_:
            given_["sampling"] = GenerationOptions().sampling
        plan = StepPlan(incarnation=Incarnation("f"), step=StepNumber(1), table_digest=2, ops=(kind(**given_),))
        call: tuple[Any, list[Any]] = (Tick(at_us=1), [RunStep(worker=WorkerId("w"), plan=plan)])
    else:
        given_ = {
            one.name: _plain_value(hints[one.name])
            for one in dataclasses.fields(kind)
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        }
        one = kind(**given_)
        call = (one, []) if kind in EVENTS else (Tick(at_us=1), [one])
    body = Encoder().body(*call)
    assert b'{"!"' not in body


def _plain_value(hint: Any) -> Any:
    """Some small value of that type."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        needed = [one.name for one in dataclasses.fields(hint) if one.default is dataclasses.MISSING]
        return hint(**{name: _plain_value(hints[name]) for name in needed})  # type: ignore[operator]
    origin = typing.get_origin(hint)
    return () if origin is tuple else [] if origin is list else {int: 1, str: "a"}[hint]


def test_numbers_beyond_64_bits_come_back_and_what_follows_does_too() -> None:
    submits = [
        Submit(
            at_us=1,
            generation=GenerationId("a"),
            prompt=(1, 2),
            options=GenerationOptions(tenant=f"tenant {n}", deadline_us=2**70 if n % 2 else 5),
            session=SessionId(2**64) if n == 3 else None,
        )
        for n in range(6)
    ]
    check([(one, []) for one in submits])
    check([(Tick(at_us=2**66), []), (Tick(at_us=1), [Deliver(generation=GenerationId("a"), offset=2**80)])] * 2)


# --- fields that a later version adds ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    share: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grown(Inner):
    further: int = 7
    names: tuple[str, ...] = ()
    maybe: int | None = None
    title: str = ""
    table: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Grown
    at_us: int = 0


def back(of: Layout, by: Layout, *some: object) -> list[Any]:
    there: Memory = {}
    here: Memory = {}
    data = [of.encode(one, there) for one in some]
    assert None not in data
    return [by.decode(Reader(typing.cast(bytes, one)), here) for one in data]


def test_a_field_that_is_added_is_carried_whatever_its_type() -> None:
    made = layout(Outer)
    grown = Grown(number=1, further=2, names=("a", "b"), maybe=3, title="x", table=((1, 0.5),))
    some = [
        Outer(inner=grown),
        Outer(inner=dataclasses.replace(grown, table=(), title="y"), at_us=9),
        Outer(inner=Grown(number=5)),
        Outer(inner=Grown(number=5, share=-1.5)),
    ]
    assert back(made, made, *some) == some


def test_what_was_written_before_a_field_was_added_has_its_default() -> None:
    made = layout(Inner)
    name, *groups = made.description
    read_now = Layout(Grown, (name, *groups))  # type: ignore[arg-type]
    assert back(made, read_now, Inner(number=3, share=2.0)) == [Grown(number=3, share=2.0)]


def test_what_a_newer_version_wrote_is_refused_by_the_field_that_is_not_known() -> None:
    with pytest.raises(BadInput, match=r"it holds Grown.further, which this version does not know"):
        Layout(Inner, layout(Grown).description)


@pytest.mark.parametrize(
    "form", ["numbers of Usage a,__import__('os').abort()", "numbers of Popen a", "a form", "", "q)", 7, None]
)
def test_a_header_that_names_no_form_of_ours_is_refused_and_nothing_in_it_runs(form: Any) -> None:
    descriptions, columns = header()
    for group in (1, 3, 4):
        forged = list(descriptions[0])
        (path, _), *others = forged[group]
        forged[group] = ((path, form), *others)
        with pytest.raises(BadInput, match="does not say how a Submit is written"):
            PartReader(((tuple(forged), *descriptions[1:]), columns))


def test_a_layout_that_was_read_writes_nothing() -> None:
    with pytest.raises(TypeError, match="writes nothing: Inner"):
        Layout(Inner, layout(Inner).description).encode(Inner(number=1), {})


def test_fields_beside_the_columns_are_carried_where_they_are_not_the_default() -> None:
    rest = Rest(Grown, "number", "share")
    assert rest.of(Grown(number=1)) == b""
    some = rest.of(Grown(number=1, further=9, names=("a",)))
    assert Rest.read(some) == {"further": 9, "names": ("a",)}
    assert Rest(Inner, "number", "share").none


def test_a_description_survives_its_header() -> None:
    made = layout(Outer)
    assert from_json(to_json(made.description)) == made.description


# --- columns ---


@given(st.lists(st.one_of(st.integers(0, 300), INT_64), max_size=20), st.sampled_from([1, 2, 4, 8]))
def test_a_column_comes_back_whatever_its_numbers(numbers: list[int], width: int) -> None:
    data = column(numbers, width)
    assert data[0] >= width
    r = Reader(data)
    assert r.column() == numbers
    assert not r.left


@pytest.mark.parametrize("held", [range(250, 260), tuple(range(250, 260)), array("I", range(250, 260))], ids=repr)
def test_a_columns_bytes_do_not_depend_on_what_holds_its_numbers(held: Sequence[int]) -> None:
    assert column(held) == column(list(held))


@pytest.mark.parametrize(("numbers", "width"), [([255], 1), ([0, 256], 2), ([65536, 1], 4), ([-1], 8), ([2**32], 8)])
def test_a_column_is_as_narrow_as_its_numbers_allow(numbers: list[int], width: int) -> None:
    assert len(column(numbers)) == 5 + width * len(numbers)


def test_bytes_that_end_too_early_are_an_error_and_not_a_value() -> None:
    for data in (column([1, 2, 300]), column([1, 2, 3])):
        for cut in range(len(data)):
            with pytest.raises((IndexError, struct.error)):
                Reader(data[:cut]).column()
