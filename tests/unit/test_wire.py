"""Planner types and messages say the same: for all values, within the sizes promised, and in bytes of old."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings

from microtome.actors import wire
from microtome.planner.errors import BadInput
from microtome.planner.types import (
    Annotate,
    Capability,
    Cell,
    CloneSequence,
    DropSequence,
    Incarnation,
    InputFlag,
    MethodSpec,
    MethodTable,
    OpenSequence,
    Position,
    SamplingParams,
    SequenceId,
    SequenceSnapshot,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TruncateSequence,
)
from microtome.v1 import worker_pb2 as pb
from microtome.v1.logprobs_pb2 import Logprobs
from tests.support import messages

OLD_BYTES = Path(__file__).resolve().parents[1] / "data" / "worker_v1"
WHO = Incarnation("00112233445566778899aabbccddeeff")

SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=2**64 - 1,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias=((5, 1.5), (9, -100.0)),
    allowed_tokens=(1, 2, 300),
    banned_tokens=(7,),
    min_new_tokens=3,
    stop_token_ids=(0, 2),
    logprobs=4,
    prompt_tokens=17,
    prompt_logprobs=0,
)

OLD_SAMPLING = dataclasses.replace(SAMPLING, prompt_logprobs=None)

PLAN = StepPlan(
    incarnation=WHO,
    step=StepNumber(41),
    table_digest=2**63 - 1,
    ops=(
        OpenSequence(SequenceId(4), (Cell(8), Cell(9))),
        CloneSequence(SequenceId(5), SequenceId(4), Position(1)),
        TruncateSequence(SequenceId(2), Position(0)),
        DropSequence(SequenceId(3)),
        SetSampling(SequenceId(4), SAMPLING),
        Annotate(SequenceId(4), b"\x00note"),
    ),
    sequences=[4, 1],
    starts=[2, 300],
    widths=[3, 1],
    flags=[1, 3],
    cells=[10, 11, 12, 70000],
    tokens=[101, 49151, 103],
    slice_offsets=[0, 3],
    slice_lengths=[3, 1],
    slice_methods=[2, 0],
    next_tokens=[104],
)

RESULT = StepResult(
    incarnation=WHO,
    step=StepNumber(41),
    tokens=[11, 12],
    logprobs=(TokenLogprobs(-0.25, ((11, -0.25), (13, -2.0))), None),
    step_us=10_000,
    idle_us=21,
    forwards=[1, 0, 1],
    prompt_logprobs=(TokenLogprobs(-7.5), TokenLogprobs(-0.5, ((3, -0.5),))),
)

FAULT = wire.StepFault(incarnation=WHO, step=StepNumber(42), refused=True, message="step 42 skips ahead")

CAPABILITY = Capability(
    incarnation=WHO,
    device="cuda:0 Some Device",
    device_uuid="GPU-1",
    model="smollm2-135m",
    fingerprint="ab" * 32,
    vocab_size=49152,
    usable_cells=65536,
    scratch_cell=Cell(65536),
    max_sequences=1024,
    max_session_tokens=8192,
    windows=(0, 4096),
    table=MethodTable(
        (
            MethodSpec(name="forward_1", max_tokens=1, static=True, cost_us=900),
            MethodSpec(
                name="forward_others", min_tokens=2, max_tokens=512, static=False, min_rows=2, cost_ns_per_token=12_500
            ),
        )
    ),
    max_output_rows=256,
)

SNAPSHOT = wire.Snapshot(
    incarnation=WHO,
    last_step=StepNumber(41),
    sequences=(
        SequenceSnapshot(
            sequence=SequenceId(4),
            cells=(Cell(8), Cell(70000)),
            tokens=(101, 49151),
            last_sampled=0,
            sampling=SAMPLING,
            note=b"\x00note",
            logprobs=(None, TokenLogprobs(-0.25, ((11, -0.25), (13, -2.0)))),
            logprobs_from=1,
        ),
        SequenceSnapshot(sequence=SequenceId(5), cells=(), tokens=(), last_sampled=None, sampling=None, note=b""),
    ),
)


def decode_plan(inputs: int) -> StepPlan:
    """A decode step of so many sequences, late in the life of a large pool."""
    return StepPlan(
        incarnation=WHO,
        step=StepNumber(10**6),
        table_digest=CAPABILITY.table.digest,
        sequences=list(range(1000 - inputs, 1000)),
        starts=[8000 + i for i in range(inputs)],
        widths=[1] * inputs,
        flags=[int(InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK)] * inputs,
        cells=[2_000_000 + 7 * i for i in range(inputs)],
        tokens=[],
        slice_offsets=list(range(0, inputs, 32)),
        slice_lengths=[32] * (inputs // 32),
        slice_methods=[5] * (inputs // 32),
    )


# --- for all values ---


@given(messages.plan)
@settings(max_examples=150)
def test_a_plan_reads_back_as_it_was_written(plan: StepPlan) -> None:
    sent = wire.plan_to_message(plan).SerializeToString()
    assert wire.plan_from_message(pb.StepPlan.FromString(sent)) == plan


@given(messages.result)
def test_a_result_reads_back_as_it_was_written(result: StepResult) -> None:
    sent = wire.answer_to_message(result).SerializeToString()
    assert wire.answer_from_message(pb.StepResult.FromString(sent)) == result


@given(messages.fault)
def test_a_fault_reads_back_as_it_was_written(fault: wire.StepFault) -> None:
    sent = wire.answer_to_message(fault).SerializeToString()
    assert wire.answer_from_message(pb.StepResult.FromString(sent)) == fault


@given(messages.capability)
def test_a_capability_reads_back_as_it_was_written(capability: Capability) -> None:
    sent = wire.capability_to_message(capability).SerializeToString()
    assert wire.capability_from_message(pb.DescribeResponse.FromString(sent)) == capability


@given(messages.sampling)
def test_sampling_reads_back_as_it_was_written(sampling: SamplingParams) -> None:
    sent = wire.sampling_to_message(sampling).SerializeToString()
    assert wire.sampling_from_message(pb.Sampling.FromString(sent)) == sampling


@given(messages.snapshot)
def test_a_snapshot_reads_back_as_it_was_written_however_it_is_cut(snapshot: wire.Snapshot) -> None:
    for max_bytes in (64, 200, 10**6):
        sent = [m.SerializeToString() for m in wire.snapshot_to_messages(snapshot, max_bytes)]
        assert wire.snapshot_from_messages(pb.SnapshotResponse.FromString(m) for m in sent) == snapshot


@pytest.mark.parametrize("kind", [StepPlan, StepResult, SamplingParams, Capability, SequenceSnapshot, MethodSpec])
def test_every_field_of_a_type_is_in_the_examples_with_another_value_than_its_default(kind: type) -> None:
    # a field added to a type and forgotten in `wire` would read back as its default, and no test would see it
    examples = {
        StepPlan: PLAN,
        StepResult: RESULT,
        SamplingParams: SAMPLING,
        Capability: CAPABILITY,
        SequenceSnapshot: SNAPSHOT.sequences[0],
        MethodSpec: None,
    }
    for field in dataclasses.fields(kind):
        given_values = (
            [getattr(m, field.name) for m in CAPABILITY.table.methods]
            if kind is MethodSpec
            else [getattr(examples[kind], field.name)]
        )
        assert any(value != field.default for value in given_values), field.name
    assert wire.plan_from_message(wire.plan_to_message(PLAN)) == PLAN
    assert wire.answer_from_message(wire.answer_to_message(RESULT)) == RESULT
    assert wire.capability_from_message(wire.capability_to_message(CAPABILITY)) == CAPABILITY
    assert wire.snapshot_from_messages(wire.snapshot_to_messages(SNAPSHOT, 10**6)) == SNAPSHOT


# --- sizes ---


def test_a_decode_step_of_256_sequences_stays_under_8_kib() -> None:
    assert wire.plan_to_message(decode_plan(256)).ByteSize() < 8192


def test_a_number_that_its_field_cannot_hold_is_an_error_not_another_number() -> None:
    with pytest.raises(ValueError):
        wire.plan_to_message(dataclasses.replace(PLAN, cells=[2**32]))
    with pytest.raises(ValueError):
        wire.plan_to_message(dataclasses.replace(PLAN, starts=[-1, 0]))


def test_snapshot_messages_stay_within_the_limit_and_hold_each_sequence_whole() -> None:
    sequences = tuple(
        dataclasses.replace(
            SNAPSHOT.sequences[0], sequence=SequenceId(i), cells=(Cell(2**31),) * 50, tokens=(2**31,) * 50
        )
        for i in range(40)
    )
    sent = list(wire.snapshot_to_messages(dataclasses.replace(SNAPSHOT, sequences=sequences), 4096))
    assert len(sent) > 1
    assert max(message.ByteSize() for message in sent) <= 4096
    assert min(message.ByteSize() for message in sent[:-1]) > 4096 - 2 * 700  # none is cut short for nothing
    assert [state.sequence for message in sent for state in message.sequences] == list(range(40))


def test_an_empty_snapshot_is_one_message_that_names_the_step() -> None:
    empty = dataclasses.replace(SNAPSHOT, sequences=())
    (only,) = wire.snapshot_to_messages(empty, 4096)
    assert only.last_step == 41
    assert wire.snapshot_from_messages([only]) == empty


# --- messages that mean nothing here ---


def test_an_operation_of_an_unknown_kind_is_refused_not_left_out() -> None:
    # field 15 of SequenceOp, as a newer driver might know it
    message = pb.StepPlan.FromString(b"\x10\x07" + b"\x22\x02\x7a\x00")
    assert len(message.ops) == 1
    with pytest.raises(BadInput, match="step 7 has an operation of a kind"):
        wire.plan_from_message(message)


def test_a_method_table_whose_digest_differs_is_refused() -> None:
    message = wire.capability_to_message(CAPABILITY)
    message.table_digest += 1
    with pytest.raises(BadInput, match=f"{CAPABILITY.table.digest:#x} here and {CAPABILITY.table.digest + 1:#x} there"):
        wire.capability_from_message(message)


def test_pairs_of_columns_of_different_length_are_refused() -> None:
    with pytest.raises(BadInput, match="2 tokens have 1 logit biases"):
        wire.sampling_from_message(pb.Sampling(bias_tokens=[1, 2], bias_values=[0.5]))
    result = pb.StepResult(logprobs=[pb.TokenLogprobs(present=True, top_tokens=[1])])
    with pytest.raises(BadInput, match="1 likely tokens have 0 log-probabilities"):
        wire.answer_from_message(result)
    with pytest.raises(BadInput, match="2 tokens have 1 log-probabilities"):
        wire.logprobs_from_message(Logprobs(counts=[1, 0, 1], logprobs=[-0.5]))
    with pytest.raises(BadInput, match="1 likely tokens have 2 ids and 1 log-probabilities"):
        wire.logprobs_from_message(Logprobs(counts=[2], logprobs=[-0.5], top_tokens=[1, 2], top_logprobs=[-0.5]))
    with pytest.raises(BadInput, match="1 of 2 prompt tokens have no log-probability"):
        wire.answer_from_message(pb.StepResult(prompt_logprobs=Logprobs(counts=[1, 0], logprobs=[-0.5])))


def test_nothing_is_sent_of_log_probabilities_when_nobody_asks() -> None:
    sent = wire.answer_to_message(dataclasses.replace(RESULT, logprobs=(), prompt_logprobs=()))
    assert not sent.HasField("token_logprobs")
    assert not sent.HasField("prompt_logprobs")
    assert not sent.logprobs


def test_a_log_probability_takes_ten_bytes_and_no_message_of_its_own() -> None:
    beside = tuple((40_000 + token, -1.5) for token in range(20))
    asked = dataclasses.replace(RESULT, tokens=[1] * 256, logprobs=(TokenLogprobs(-1.0, beside),) * 256)
    quiet = dataclasses.replace(asked, logprobs=())
    extra = wire.answer_to_message(asked).ByteSize() - wire.answer_to_message(quiet).ByteSize()
    assert extra < 10 * 256 * 21


def test_snapshot_messages_of_two_steps_are_refused() -> None:
    (first,) = wire.snapshot_to_messages(SNAPSHOT, 10**6)
    (second,) = wire.snapshot_to_messages(dataclasses.replace(SNAPSHOT, last_step=StepNumber(42)), 10**6)
    with pytest.raises(BadInput, match="of step 41 and of step 42"):
        wire.snapshot_from_messages([first, second])
    with pytest.raises(BadInput, match="0 messages"):
        wire.snapshot_from_messages([])


# --- bytes of old: never rewritten, only added to ---


def test_old_bytes_of_a_plan_still_say_the_same() -> None:
    old = pb.StepPlan.FromString((OLD_BYTES / "step_plan.bin").read_bytes())
    ops = tuple(
        dataclasses.replace(op, sampling=OLD_SAMPLING) if isinstance(op, SetSampling) else op for op in PLAN.ops
    )
    assert wire.plan_from_message(old) == dataclasses.replace(PLAN, ops=ops, next_tokens=[])


def test_old_bytes_of_answers_still_say_the_same() -> None:
    old = pb.StepResult.FromString((OLD_BYTES / "step_result.bin").read_bytes())
    assert wire.answer_from_message(old) == dataclasses.replace(RESULT, prompt_logprobs=())
    old = pb.StepResult.FromString((OLD_BYTES / "step_fault.bin").read_bytes())
    assert wire.answer_from_message(old) == FAULT


def test_old_bytes_of_a_capability_still_say_the_same() -> None:
    old = pb.DescribeResponse.FromString((OLD_BYTES / "describe_response.bin").read_bytes())
    assert wire.capability_from_message(old) == CAPABILITY


def test_old_bytes_of_a_snapshot_still_say_the_same() -> None:
    old = pb.SnapshotResponse.FromString((OLD_BYTES / "snapshot_response.bin").read_bytes())
    first, second = SNAPSHOT.sequences
    first = dataclasses.replace(first, sampling=OLD_SAMPLING, logprobs=(), logprobs_from=0)
    assert wire.snapshot_from_messages([old]) == dataclasses.replace(SNAPSHOT, sequences=(first, second))
