"""The journal: exact both ways, and a crash costs its last entry only."""

import zlib
from random import Random

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput, StepError
from microtome.planner.events import Cancel, Deliver, RunStep, SessionAnswer, StepDone, StepFailed, Tick, WorkerJoined
from microtome.planner.journal import (
    encode_entry,
    encode_header,
    encode_instructions,
    read_journal,
)
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

G = GenerationId("a generation – with a dash")
EVENTS = [
    Tick(at_us=2**40),
    Cancel(at_us=1, generation=G),
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
            tokens=(5,),
            logprobs=(TokenLogprobs(-0.125, ((5, -0.125), (6, -2.5))),),
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
INSTRUCTIONS = [
    Deliver(generation=G, offset=0, tokens=(7,)),
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


def written(entries: int = 8) -> tuple[bytes, list[bytes]]:
    frames = [encode_entry(EVENTS[n % len(EVENTS)], INSTRUCTIONS[: n + 1]) for n in range(entries)]
    return encode_header(CONFIG) + b"".join(frames), frames


def same(one: object, other: object) -> bool:
    return to_json(one) == to_json(other)


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_back_as_it_was(event: Tick) -> None:
    journal = read_journal(encode_header(CONFIG) + encode_entry(event, []))
    assert journal.entries[0].event == event
    assert journal.entries[0].instructions == []


def test_instructions_come_back_as_they_were_and_in_order() -> None:
    journal = read_journal(encode_header(CONFIG) + encode_entry(Tick(at_us=1), INSTRUCTIONS))
    back = journal.entries[0].instructions
    assert len(back) == len(INSTRUCTIONS)
    assert all(same(one, other) for one, other in zip(back, INSTRUCTIONS, strict=True))
    assert journal.config == CONFIG
    assert journal.torn_bytes == 0


def test_equal_instructions_have_equal_bytes_whatever_holds_their_columns() -> None:
    plan = INSTRUCTIONS[2]
    assert isinstance(plan, RunStep)
    as_lists = StepPlan(
        **{name: getattr(plan.plan, name) for name in ("incarnation", "step", "table_digest", "ops")},
        **{
            name: list(getattr(plan.plan, name))
            for name in StepPlan.__slots__
            if name not in ("incarnation", "step", "table_digest", "ops")
        },
    )
    assert encode_instructions([RunStep(worker=plan.worker, plan=as_lists)]) == encode_instructions([plan])


def test_a_torn_tail_costs_the_last_entry_only() -> None:
    data, frames = written()
    whole = len(data) - len(frames[-1])
    for cut in range(whole, len(data)):
        journal = read_journal(data[:cut])
        assert len(journal.entries) == len(frames) - 1
        assert journal.torn_bytes == cut - whole


def test_a_flipped_bit_ends_the_journal_before_it() -> None:
    data, frames = written()
    rng = Random(1)
    start = len(encode_header(CONFIG))
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
        assert len(journal.entries) == reached


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a journal"),
        (b"hello, this is no journal at all", "not a journal"),
        (encode_header(CONFIG)[:-1], "not a journal"),
    ],
)
def test_what_is_no_journal_is_said_to_be_none(data: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_journal(data)


def test_another_format_is_named() -> None:
    body = b"\x07" + to_json(CONFIG)
    frame = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    with pytest.raises(BadInput, match="format 7; this reads format 1"):
        read_journal(frame)


def test_a_step_of_256_sessions_takes_less_than_32_bytes_a_session() -> None:
    n = 256
    tokens = [Deliver(generation=GenerationId(f"{k:016x}"), offset=400, tokens=(40_000 + k,)) for k in range(n)]
    plan = StepPlan(
        incarnation=Incarnation("f" * 32),
        step=StepNumber(99_999),
        table_digest=2**62,
        sequences=range(n),
        starts=[1000 + k for k in range(n)],
        widths=[1] * n,
        flags=[3] * n,
        cells=[500_000 + k for k in range(n)],
        slice_offsets=(0,),
        slice_lengths=(n,),
        slice_methods=(4,),
    )
    assert len(encode_instructions([*tokens, RunStep(worker=WorkerId("w"), plan=plan)])) < 40 * n


def test_records_refuse_what_is_not_theirs() -> None:
    for data in (b"{", b'{"!": "Popen", "args": []}', b'{"no": 1}', b'{"!": "Tick", "what": 1}'):
        with pytest.raises(BadInput, match="not a record"):
            from_json(data)


def test_records_keep_every_option_of_a_generation() -> None:
    options = GenerationOptions(max_new_tokens=3, tenant="t", deadline_us=5, sampling=SamplingParams(top_p=0.3))
    assert from_json(to_json(options)) == options
