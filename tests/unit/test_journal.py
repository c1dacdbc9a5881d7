"""The journal: exact both ways, and a crash costs its last entry only."""

import dataclasses
import types
import typing
import zlib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from random import Random

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput, StepError
from microtome.planner.events import (
    Cancel,
    Deliver,
    DeliverStep,
    Event,
    GiveUpWorker,
    Instruction,
    RunStep,
    SessionAnswer,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WorkerGone,
    WorkerJoined,
)
from microtome.planner.journal import MAGIC, Encoder, Entry, is_journal, read_journal, records_of
from microtome.planner.records import from_json, to_json
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    Incarnation,
    SamplingParams,
    SequenceId,
    SequenceSnapshot,
    SessionId,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Usage,
    WorkerId,
)
from tests.support.fake_executor import FakeExecutor
from tests.support.recorded import Recorded, busy_day

G = GenerationId("a generation – with a dash")
EVENTS: list[Event] = [
    Tick(at_us=2**40),
    Cancel(at_us=1, generation=G),
    Submit(
        at_us=3,
        generation=G,
        prompt=(1, 2**20, 3),
        options=GenerationOptions(max_new_tokens=9, sampling=SamplingParams(temperature=0.7, seed=2**63 + 1)),
        siblings=((GenerationId("s"), 4),),
    ),
    StepFailed(
        at_us=5, worker=WorkerId("w"), incarnation=Incarnation("0" * 32), step=StepNumber(9), refused=True, message="no"
    ),
    StepDone(
        at_us=7,
        worker=WorkerId("w"),
        result=StepResult(
            incarnation=Incarnation("f" * 32),
            step=StepNumber(2**33),
            tokens=(0, 255, 256, 2**32 - 1),
            step_us=10**9,
            idle_us=1,
            forwards=(0, 3),
        ),
    ),
    StepDone(
        at_us=7,
        worker=WorkerId("w"),
        result=StepResult(
            incarnation=Incarnation("f" * 32),
            step=StepNumber(1),
            tokens=(5, 6, 7),
            logprobs=(TokenLogprobs(-0.125, ((5, -0.125), (6, -2.5))), None, TokenLogprobs(-3.0)),
        ),
    ),
    WorkerJoined(
        at_us=0,
        worker=WorkerId("w"),
        capability=FakeExecutor(incarnation="a" * 32).describe(),
        held=(
            SequenceSnapshot(
                sequence=SequenceId(3),
                cells=(1, 2),  # type: ignore[arg-type]
                tokens=(7, 8),
                last_sampled=None,
                sampling=SamplingParams(logit_bias=((3, -1.5),), allowed_tokens=(1, 2)),
                note=b"\x00\xff note",
            ),
        ),
    ),
]
INSTRUCTIONS: list[Instruction] = [
    DeliverStep(generations=[G, GenerationId("b")], offsets=[0, 70_000], tokens=[7, 2**31]),
    DeliverStep(generations=[G], offsets=[1], tokens=[8], logprobs=[None]),
    Deliver(generation=GenerationId("b"), offset=300, tokens=(70000, 1)),
    RunStep(
        worker=WorkerId("w"),
        plan=StepPlan(
            incarnation=Incarnation("f" * 32),
            step=StepNumber(3),
            table_digest=2**63 - 1,
            ops=(SetSampling(SequenceId(1), SamplingParams(seed=2**64 - 1)),),
            sequences=(1, 300),
            starts=(0, 70_000),
            widths=(2, 1),
            flags=(1, 3),
            cells=(5, 6, 2**31),
            tokens=(9, 10),
            slice_offsets=(0,),
            slice_lengths=(3,),
            slice_methods=(0,),
        ),
    ),
    Deliver(generation=G, offset=1, tokens=(8,), logprobs=(TokenLogprobs(-1.0),)),
    Deliver(
        generation=G,
        offset=2,
        tokens=(9,),
        finish=FinishReason.STOP,
        usage=Usage(prompt_tokens=3, output_tokens=3, cached_tokens=1),
    ),
    Deliver(generation=G, offset=0, finish=FinishReason.FAILED, error=StepError("it failed")),
    SessionAnswer(ticket=4, session=SessionId(2), length=9),
    SessionAnswer(ticket=5, error=AtCapacity("sessions", 1, 0, 250)),
]
CONFIG = PlannerConfig(policy="fair", tenant_weights=("a=2",))
DATA = Path(__file__).parents[1] / "data"


def written(entries: int = 9) -> tuple[bytes, list[bytes]]:
    encoder = Encoder()
    header = encoder.header(CONFIG, version="1.2.3", unix_us=5)
    frames = [encoder.entry(EVENTS[n % len(EVENTS)], INSTRUCTIONS[: n + 1]) for n in range(entries)]
    return header + b"".join(frames), frames


def entries_of(data: bytes) -> list[Entry]:
    return [entry for life in read_journal(data).lives for entry in life]


def one_entry(event: Event, instructions: Sequence[Instruction] = ()) -> Entry:
    encoder = Encoder()
    (entry,) = entries_of(encoder.header(CONFIG) + encoder.entry(event, instructions) + encoder.waiting())
    return entry


def same(one: object, other: object) -> bool:
    return to_json(one) == to_json(other)


def made(kind: typing.Any) -> typing.Any:
    """Some value of this type, with every field set."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return made(arguments[0])
    if origin is tuple:
        return (made(arguments[0]),) if arguments[-1] is Ellipsis else tuple(map(made, arguments))
    if origin in (list, Sequence):
        return [made(arguments[0])]
    if hasattr(kind, "__supertype__"):
        return made(kind.__supertype__)
    if kind in (int, float, bool, str, bytes):
        return {int: 7, float: 0.5, bool: True, str: "text", bytes: b"\xff"}[kind]
    if issubclass(kind, Enum):
        return next(iter(kind))
    if issubclass(kind, Exception):
        return AtCapacity("cells", 3, 2)
    hints = typing.get_type_hints(kind)
    return kind(**{one.name: made(hints[one.name]) for one in dataclasses.fields(kind) if one.init})


@pytest.mark.parametrize("kind", typing.get_args(Event), ids=lambda kind: kind.__name__)
def test_every_event_there_is_has_a_record(kind: type) -> None:
    event = made(kind)
    assert same(one_entry(event).event, event)


@pytest.mark.parametrize("kind", typing.get_args(Instruction), ids=lambda kind: kind.__name__)
def test_every_instruction_there_is_has_a_record(kind: type) -> None:
    instruction = made(kind)
    assert same(one_entry(Tick(at_us=1), [instruction]).instructions, [instruction])


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    entry = one_entry(event)
    assert entry.event == event
    assert entry.instructions == []


def test_instructions_come_back_as_they_were_and_in_order() -> None:
    back = one_entry(Tick(at_us=1), INSTRUCTIONS).instructions
    assert len(back) == len(INSTRUCTIONS)
    assert all(same(one, other) for one, other in zip(back, INSTRUCTIONS, strict=True))


def test_a_life_says_who_wrote_it_when_and_how_it_was_configured() -> None:
    (life,) = read_journal(written()[0]).lives
    assert (life.config, life.version, life.began_unix_us) == (CONFIG, "1.2.3", 5)


def test_what_is_repeated_comes_back_though_it_was_written_once() -> None:
    encoder = Encoder()
    data = encoder.header(CONFIG)
    steps = []
    for number in range(1, 6):
        # The third of worker b tells another set of tokens; c has gone and come back under its name.
        result = StepResult(incarnation=Incarnation("f" * 32), step=StepNumber(number), tokens=(5, 300 + number // 3))
        plan = StepPlan(
            incarnation=Incarnation("f" * 32), step=StepNumber(number), table_digest=1, cells=[3, number // 2]
        )
        told: list[Instruction] = [
            DeliverStep(generations=[G, GenerationId("b")], offsets=[1, 2], tokens=list(result.tokens)),
            RunStep(worker=WorkerId("bc"[number % 2]), plan=plan),
        ]
        if number == 3:
            told.append(GiveUpWorker(worker=WorkerId("c"), incarnation=Incarnation("f" * 32), cause="test"))
        event = StepDone(at_us=number, worker=WorkerId("w"), result=result)
        steps.append((event, told))
        data += encoder.entry(event, told)
    gone = WorkerGone(at_us=9, worker=WorkerId("b"), incarnation=Incarnation("f" * 32), cause="")
    data += encoder.entry(gone, steps[-1][1])
    back = entries_of(data)
    for entry, (event, told) in zip(back, [*steps, (gone, steps[-1][1])], strict=True):
        assert entry.event == event
        assert same(entry.instructions, told)


def test_equal_instructions_have_equal_bytes_whatever_holds_their_columns() -> None:
    plan = next(one for one in INSTRUCTIONS if isinstance(one, RunStep))
    columns = {name: list(getattr(plan.plan, name)) for name in StepPlan.__slots__ if name[-1] == "s" and name != "ops"}
    as_lists = RunStep(worker=plan.worker, plan=dataclasses.replace(plan.plan, **columns))  # type: ignore[arg-type]
    assert Encoder().body(EVENTS[0], [as_lists]) == Encoder().body(EVENTS[0], [plan])


def test_lives_follow_each_other_in_one_file() -> None:
    first, frames = written()
    second = Encoder()
    data = first + second.header(PlannerConfig()) + second.entry(Tick(at_us=9), []) + second.waiting()
    one, two = read_journal(data).lives
    assert (len(one), len(two)) == (len(frames), 1)
    assert two.config == PlannerConfig()
    assert [entry.record for life in (one, two) for entry in life] == [*range(1, len(frames) + 1), len(frames) + 2]


def test_a_torn_tail_costs_the_last_entry_only() -> None:
    data, frames = written()
    whole = len(data) - len(frames[-1])
    for cut in range(whole, len(data)):
        journal = read_journal(data[:cut])
        assert len(journal.lives[0]) == len(frames) - 1
        assert (journal.unread_bytes, journal.damage) == (cut - whole, None)
    journal = read_journal(data[:whole] + bytes(100))  # the machine stopped
    assert (len(journal.lives[0]), journal.unread_bytes, journal.damage) == (len(frames) - 1, 100, None)


def test_a_flipped_bit_ends_the_journal_before_it_and_is_named() -> None:
    data, frames = written()
    rng = Random(1)
    start = len(data) - sum(map(len, frames))
    for _ in range(200):
        at = rng.randrange(start, len(data))
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        journal = read_journal(bytes(broken))
        reached = 0
        end = start
        for frame in frames:
            end += len(frame)
            if at < end:
                break
            reached += 1
        assert len(journal.lives[0]) == reached
        assert journal.unread_bytes == len(data) - end + len(frames[reached])
        in_length = at - (end - len(frames[reached])) < 4  # then it may look as if the file was cut short
        assert in_length or f"record {reached + 1} at byte {end - len(frames[reached])} is damaged" in str(
            journal.damage
        )


@pytest.mark.parametrize("data", [b"", b"hello, this is no journal at all", Encoder().header(CONFIG)[:20]])
def test_what_is_no_journal_is_said_to_be_none(data: bytes) -> None:
    assert not is_journal(data)
    with pytest.raises(BadInput, match="not a journal"):
        read_journal(data)


def test_a_journal_whose_header_is_torn_has_nothing_to_read() -> None:
    with pytest.raises(BadInput, match="its first one is cut short"):
        read_journal(Encoder().header(CONFIG)[:-1])


def test_another_format_is_named() -> None:
    body = MAGIC + b"\x07" + to_json(CONFIG)
    frame = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    with pytest.raises(BadInput, match="format 7; this reads formats 2 to 3"):
        read_journal(frame)


def test_a_record_that_a_newer_planner_wrote_is_named() -> None:
    header = Encoder().header(CONFIG)
    part = b'{"!":"Teleport","at_us":1}'
    body = b"\0" + len(part).to_bytes(4, "little") + part
    data = header + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    with pytest.raises(BadInput, match="record 1 cannot be read: not a record of the planner's"):
        entries_of(data)


@pytest.mark.parametrize("number", [2, 3])
def test_bytes_written_when_a_format_was_new_are_read(number: int) -> None:
    back = entries_of((DATA / f"journal_{number}").read_bytes())
    assert [entry.event for entry in back] == [EVENTS[n % len(EVENTS)] for n in range(len(back))]
    for n, entry in enumerate(back):
        assert same(entry.instructions, INSTRUCTIONS[: n + 1])
    assert len(back) == 9


def test_a_day_in_an_older_format_says_the_same_as_in_this_one() -> None:
    (old,) = read_journal((DATA / "journal_2_day").read_bytes()).lives
    encoder = Encoder()
    header = encoder.header(old.config)
    data = header + b"".join([encoder.entry(entry.event, entry.instructions) for entry in old])
    (life,) = read_journal(data).lives
    assert (old.format, life.format) == (2, 3)
    assert len(old) == len(life) == 120
    for one, other in zip(old, life, strict=True):
        assert same(one.event, other.event)
        assert same(one.instructions, other.instructions)
    assert len(data) < 0.7 * (DATA / "journal_2_day").stat().st_size


def test_lives_of_both_formats_are_read_from_one_file() -> None:
    old = (DATA / "journal_2_day").read_bytes()
    lives = read_journal(old + written()[0]).lives
    assert [(one.format, len(list(one))) for one in lives] == [(2, 120), (3, 9)]


def test_ticks_that_led_to_nothing_share_records_and_come_back_each() -> None:
    encoder = Encoder()
    data = encoder.header(CONFIG)
    events: list[Event] = [Tick(at_us=at) for at in (5, 100_009, 200_000, 200_000, 100_000, 2**50)]
    events += [Cancel(at_us=7, generation=G), Tick(at_us=9), Tick(at_us=2**40)]
    records = [encoder.entry(event, []) for event in events]
    backwards = 4  # it is written by itself, behind those that wait
    assert [bool(record) for record in records] == [n in (backwards, 6) for n in range(9)]
    back = entries_of(data + b"".join(records) + encoder.waiting())
    assert [entry.event for entry in back] == events
    assert [entry.record for entry in back] == [1] * 5 + [2, 2, 3, 3]
    assert encoder.waiting() == b""


def test_a_tick_that_led_to_something_is_written_at_once_behind_those_before_it() -> None:
    encoder = Encoder()
    told: list[Instruction] = [SessionAnswer(ticket=1)]
    data = encoder.header(CONFIG) + encoder.entry(Tick(at_us=1), []) + encoder.entry(Tick(at_us=2), told)
    (life,) = read_journal(data).lives
    assert [(entry.event.at_us, len(entry.instructions)) for entry in life] == [(1, 0), (2, 1)]
    assert len(life) == 2


def test_ticks_wait_ten_seconds_at_most() -> None:
    encoder = Encoder()
    lengths = [len(encoder.entry(Tick(at_us=n), [])) for n in range(0, 25_000_000, 100_000)]
    assert [n for n, length in enumerate(lengths) if length] == [99, 199]


def test_an_idle_day_takes_less_than_two_megabytes() -> None:
    """Ten ticks a second, each late by what a loop and a timer take: less than 65 ms, or two bytes become four."""
    encoder, rng = Encoder(), Random(1)
    size, at_us = len(encoder.header(CONFIG)), 0
    for _ in range(864_00):  # a tenth of the day
        at_us += 100_000 + rng.randrange(5_000)
        size += len(encoder.entry(Tick(at_us=at_us), []))
    assert 1.8e6 < 10 * size < 2.1e6


def test_the_event_that_broke_the_planner_stands_behind_the_ticks_before_it() -> None:
    encoder = Encoder()
    data = encoder.header(CONFIG) + encoder.entry(Tick(at_us=1), []) + encoder.raised(Tick(at_us=2), "KeyError: 7")
    assert [(entry.event.at_us, entry.raised) for entry in entries_of(data)] == [(1, None), (2, "KeyError: 7")]


def test_generations_that_end_and_begin_do_not_make_the_other_names_be_written_again() -> None:
    encoder = Encoder()
    data = encoder.header(CONFIG)
    names = [GenerationId(f"generation {k:05}") for k in range(200)]
    written: list[tuple[Event, list[Instruction]]] = []
    sizes = []
    for step in range(1, 12):
        tokens = [300 + step + k for k in range(len(names))]
        result = StepResult(incarnation=Incarnation("f" * 32), step=StepNumber(step), tokens=tokens)
        told: list[Instruction] = []
        for at in (0, 57, len(names) - 3) if step > 1 else ():
            told.append(Deliver(generation=names[at], offset=9, tokens=(tokens[at],), finish=FinishReason.STOP))
            del names[at], tokens[at]
        told.append(DeliverStep(generations=names.copy(), offsets=[step] * len(names), tokens=tokens))
        names += [GenerationId(f"generation {step * 1000 + k:05}") for k in range(step % 3)]
        event = StepDone(at_us=step, worker=WorkerId("w"), result=result)
        written.append((event, told))
        record = encoder.entry(event, told)
        sizes.append(len(record))
        data += record
    for entry, (event, told) in zip(entries_of(data), written, strict=True):
        assert same(entry.event, event)
        assert same(entry.instructions, told)
    assert max(sizes[1:]) < 1300 < 16 * len(names) < sizes[0]


def test_a_generation_takes_few_bytes_beside_its_tokens_when_its_options_are_as_before() -> None:
    encoder = Encoder()
    options = GenerationOptions(
        max_new_tokens=9, stop_token_ids=(1, 2), tenant="a tenant", sampling=SamplingParams(temperature=0.5, top_p=0.9)
    )
    sizes = []
    for n in range(3):
        seeded = dataclasses.replace(options, sampling=dataclasses.replace(options.sampling, seed=2**63 + n))
        submit = Submit(at_us=n, generation=GenerationId(f"{n:016}"), prompt=(300,) * 50, options=seeded)
        sizes.append(len(encoder.entry(submit, [])))
    assert sizes[0] > 200 > 175 > sizes[1] == sizes[2]


def test_a_step_of_256_sessions_takes_less_than_20_bytes_a_session() -> None:
    encoder = Encoder()
    sizes = []
    for step in range(3):
        n = 256
        tokens = [40_000 + k + step for k in range(n)]
        plan = StepPlan(
            incarnation=Incarnation("f" * 32),
            step=StepNumber(99_999 + step),
            table_digest=2**62,
            sequences=range(n),
            starts=[1000 + k + step for k in range(n)],
            widths=[1] * n,
            flags=[3] * n,
            cells=[500_000 + k + n * step for k in range(n)],
            slice_offsets=(0,),
            slice_lengths=(n,),
            slice_methods=(4,),
        )
        result = StepResult(incarnation=Incarnation("f" * 32), step=StepNumber(step), tokens=tokens)
        told = DeliverStep(
            generations=[GenerationId(f"{k:016x}") for k in range(n)], offsets=[400 + step] * n, tokens=tokens
        )
        event = StepDone(at_us=step, worker=WorkerId("w"), result=result)
        sizes.append(len(encoder.entry(event, [told, RunStep(worker=WorkerId("w"), plan=plan)])))
    assert sizes[-1] < 20 * n < sizes[0]


def test_a_journal_of_a_whole_life_comes_back_entry_by_entry() -> None:
    cluster: Recorded = busy_day()
    back = entries_of(cluster.journal)
    assert len(back) == len(cluster.entries) > 50
    for entry, (event, told) in zip(back, cluster.entries, strict=True):
        assert same(entry.event, event)
        assert same(entry.instructions, told)
    assert records_of(cluster.journal).end == len(cluster.journal)


def test_records_refuse_what_is_not_theirs() -> None:
    for data in (b"{", b'{"!": "Popen", "args": []}', b'{"no": 1}', b'{"!": "Tick", "what": 1}'):
        with pytest.raises(BadInput, match="not a record"):
            from_json(data)


def test_records_keep_every_option_of_a_generation() -> None:
    options = GenerationOptions(max_new_tokens=3, tenant="t", deadline_us=5, sampling=SamplingParams(top_p=0.3))
    assert from_json(to_json(options)) == options
