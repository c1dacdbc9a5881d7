"""Planner types ↔ messages of `microtome.v1.Worker`: pure, total, symmetrical.

For every value `x` of a planner type, `x_from_message(x_to_message(x)) == x`, columns read back as lists. Messages are
looked at here, in `worker_service` and in `worker_client`, and nowhere else.

Writing raises `ValueError` for a number its field cannot hold, which is a bug of ours. Reading raises `BadInput` for a
message that means nothing here, such as an operation that a newer driver knows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from microtome.planner.errors import BadInput
from microtome.planner.types import (
    Annotate,
    Capability,
    Cell,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    Incarnation,
    MethodSpec,
    MethodTable,
    OpenSequence,
    Position,
    SamplingParams,
    SequenceId,
    SequenceOp,
    SequenceSnapshot,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TruncateSequence,
)
from microtome.v1 import logprobs_pb2
from microtome.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFault:
    """The other answer to a plan. `refused`: nothing was touched. Otherwise the worker's state is unknown."""

    incarnation: Incarnation
    step: StepNumber
    refused: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a worker holds, as of `last_step`; 0: none was run."""

    incarnation: Incarnation
    last_step: StepNumber
    sequences: tuple[SequenceSnapshot, ...] = ()


# --- plans ---


def plan_to_message(plan: StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        incarnation=bytes.fromhex(plan.incarnation),
        step=plan.step,
        table_digest=plan.table_digest,
        ops=[_op_to_message(op) for op in plan.ops],
        sequences=plan.sequences,
        starts=plan.starts,
        widths=plan.widths,
        flags=plan.flags,
        cells=plan.cells,
        tokens=plan.tokens,
        slice_offsets=plan.slice_offsets,
        slice_lengths=plan.slice_lengths,
        slice_methods=plan.slice_methods,
        next_tokens=plan.next_tokens,
    )


def plan_from_message(message: pb.StepPlan) -> StepPlan:
    return StepPlan(
        incarnation=Incarnation(message.incarnation.hex()),
        step=StepNumber(message.step),
        table_digest=message.table_digest,
        ops=tuple(_op_from_message(op, message.step) for op in message.ops),
        sequences=list(message.sequences),
        starts=list(message.starts),
        widths=list(message.widths),
        flags=list(message.flags),
        cells=list(message.cells),
        tokens=list(message.tokens),
        slice_offsets=list(message.slice_offsets),
        slice_lengths=list(message.slice_lengths),
        slice_methods=list(message.slice_methods),
        next_tokens=list(message.next_tokens),
    )


def _op_to_message(op: SequenceOp) -> pb.SequenceOp:
    match op:
        case OpenSequence(sequence, cells):
            return pb.SequenceOp(open=pb.OpenSequence(sequence=sequence, cells=cells))
        case CloneSequence(sequence, source, upto):
            return pb.SequenceOp(clone=pb.CloneSequence(sequence=sequence, source=source, upto=upto))
        case ExtendSequence(sequence, cells):
            return pb.SequenceOp(extend=pb.ExtendSequence(sequence=sequence, cells=cells))
        case TruncateSequence(sequence, length):
            return pb.SequenceOp(truncate=pb.TruncateSequence(sequence=sequence, length=length))
        case DropSequence(sequence):
            return pb.SequenceOp(drop=pb.DropSequence(sequence=sequence))
        case SetSampling(sequence, sampling):
            return pb.SequenceOp(set_sampling=pb.SetSampling(sequence=sequence, sampling=sampling_to_message(sampling)))
        case Annotate(sequence, note):
            return pb.SequenceOp(annotate=pb.Annotate(sequence=sequence, note=note))


def _op_from_message(message: pb.SequenceOp, step: int) -> SequenceOp:
    kind = message.WhichOneof("op")
    if kind == "open":
        cells = tuple(Cell(cell) for cell in message.open.cells)
        return OpenSequence(SequenceId(message.open.sequence), cells)
    if kind == "clone":
        clone = message.clone
        return CloneSequence(SequenceId(clone.sequence), SequenceId(clone.source), Position(clone.upto))
    if kind == "extend":
        cells = tuple(Cell(cell) for cell in message.extend.cells)
        return ExtendSequence(SequenceId(message.extend.sequence), cells)
    if kind == "truncate":
        return TruncateSequence(SequenceId(message.truncate.sequence), Position(message.truncate.length))
    if kind == "drop":
        return DropSequence(SequenceId(message.drop.sequence))
    if kind == "set_sampling":
        sampling = sampling_from_message(message.set_sampling.sampling)
        return SetSampling(SequenceId(message.set_sampling.sequence), sampling)
    if kind == "annotate":
        return Annotate(SequenceId(message.annotate.sequence), message.annotate.note)
    # Leaving it out would run a plan that means something else.
    raise BadInput(f"step {step} has an operation of a kind that is not known here")


def sampling_to_message(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_tokens=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
        allowed_tokens=sampling.allowed_tokens or (),
        restrict_to_allowed=sampling.allowed_tokens is not None,
        banned_tokens=sampling.banned_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        prompt_tokens=sampling.prompt_tokens,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_message(message: pb.Sampling) -> SamplingParams:
    if len(message.bias_tokens) != len(message.bias_values):
        raise BadInput(f"{len(message.bias_tokens)} tokens have {len(message.bias_values)} logit biases")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.bias_tokens, message.bias_values, strict=True)),
        allowed_tokens=tuple(message.allowed_tokens) if message.restrict_to_allowed else None,
        banned_tokens=tuple(message.banned_tokens),
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_tokens=message.prompt_tokens,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


# --- answers ---


def answer_to_message(answer: StepResult | StepFault) -> pb.StepResult:
    if isinstance(answer, StepFault):
        return pb.StepResult(
            incarnation=bytes.fromhex(answer.incarnation),
            step=answer.step,
            fault=pb.StepFault(refused=answer.refused, message=answer.message),
        )
    return pb.StepResult(
        incarnation=bytes.fromhex(answer.incarnation),
        step=answer.step,
        tokens=answer.tokens,
        token_logprobs=logprobs_to_message(answer.logprobs),
        prompt_logprobs=logprobs_to_message(answer.prompt_logprobs),
        step_us=answer.step_us,
        idle_us=answer.idle_us,
        forwards=answer.forwards,
    )


def answer_from_message(message: pb.StepResult) -> StepResult | StepFault:
    incarnation, step = Incarnation(message.incarnation.hex()), StepNumber(message.step)
    if message.HasField("fault"):
        fault = message.fault
        return StepFault(incarnation=incarnation, step=step, refused=fault.refused, message=fault.message)
    prompt = logprobs_from_message(message.prompt_logprobs)
    known = tuple([one for one in prompt if one is not None])
    if len(known) < len(prompt):
        raise BadInput(f"{len(prompt) - len(known)} of {len(prompt)} prompt tokens have no log-probability")
    return StepResult(
        incarnation=incarnation,
        step=step,
        tokens=list(message.tokens),
        logprobs=logprobs_from_message(message.token_logprobs)
        or tuple(_logprobs_from_old_message(logprobs) for logprobs in message.logprobs),
        prompt_logprobs=known,
        step_us=message.step_us,
        idle_us=message.idle_us,
        forwards=list(message.forwards),
    )


def logprobs_to_message(logprobs: Sequence[TokenLogprobs | None]) -> logprobs_pb2.Logprobs | None:
    """None for no token."""
    if not logprobs:
        return None
    known = [one for one in logprobs if one is not None]
    return logprobs_pb2.Logprobs(
        counts=[0 if one is None else 1 + len(one.top) for one in logprobs],
        logprobs=[one.logprob for one in known],
        top_tokens=[token for one in known for token, _ in one.top],
        top_logprobs=[value for one in known for _, value in one.top],
    )


def logprobs_from_message(message: logprobs_pb2.Logprobs) -> tuple[TokenLogprobs | None, ...]:
    known = len(message.counts) - list(message.counts).count(0)
    beside = sum(message.counts) - known
    if len(message.logprobs) != known:
        raise BadInput(f"{known} tokens have {len(message.logprobs)} log-probabilities")
    if not len(message.top_tokens) == len(message.top_logprobs) == beside:
        raise BadInput(
            f"{beside} likely tokens have {len(message.top_tokens)} ids and {len(message.top_logprobs)} "
            "log-probabilities"
        )
    own, top = iter(message.logprobs), zip(message.top_tokens, message.top_logprobs, strict=True)
    return tuple(
        [TokenLogprobs(next(own), tuple(islice(top, count - 1))) if count else None for count in message.counts]
    )


def _logprobs_from_old_message(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    if not message.present:
        return None
    if len(message.top_tokens) != len(message.top_logprobs):
        raise BadInput(f"{len(message.top_tokens)} likely tokens have {len(message.top_logprobs)} log-probabilities")
    return TokenLogprobs(message.logprob, tuple(zip(message.top_tokens, message.top_logprobs, strict=True)))


# --- what a worker is ---


def capability_to_message(capability: Capability) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        incarnation=bytes.fromhex(capability.incarnation),
        device=capability.device,
        device_uuid=capability.device_uuid,
        model=capability.model,
        fingerprint=capability.fingerprint,
        vocab_size=capability.vocab_size,
        usable_cells=capability.usable_cells,
        scratch_cell=capability.scratch_cell,
        max_sequences=capability.max_sequences,
        max_session_tokens=capability.max_session_tokens,
        windows=capability.windows,
        methods=[
            pb.Method(
                name=method.name,
                min_tokens=method.min_tokens,
                max_tokens=method.max_tokens,
                is_static=method.static,
                min_rows=method.min_rows,
                cost_us=method.cost_us,
                cost_ns_per_token=method.cost_ns_per_token,
            )
            for method in capability.table.methods
        ],
        table_digest=capability.table.digest,
        max_output_rows=capability.max_output_rows,
    )


def capability_from_message(message: pb.DescribeResponse) -> Capability:
    table = MethodTable(
        tuple(
            MethodSpec(
                name=method.name,
                max_tokens=method.max_tokens,
                static=method.is_static,
                min_tokens=method.min_tokens,
                min_rows=method.min_rows,
                cost_us=method.cost_us,
                cost_ns_per_token=method.cost_ns_per_token,
            )
            for method in message.methods
        )
    )
    if table.digest != message.table_digest:
        # The worker would refuse every plan: the two sides hash, or know, different things about a method.
        raise BadInput(f"the method table's digest is {table.digest:#x} here and {message.table_digest:#x} there")
    return Capability(
        incarnation=Incarnation(message.incarnation.hex()),
        device=message.device,
        device_uuid=message.device_uuid,
        model=message.model,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        usable_cells=message.usable_cells,
        scratch_cell=Cell(message.scratch_cell),
        max_sequences=message.max_sequences,
        max_session_tokens=message.max_session_tokens,
        windows=tuple(message.windows),
        table=table,
        max_output_rows=message.max_output_rows,
    )


# --- what a worker holds ---


def snapshot_to_messages(snapshot: Snapshot, max_bytes: int) -> Iterator[pb.SnapshotResponse]:
    """One message or more, each of `max_bytes` at most unless a single sequence takes more than that."""
    message, size = _snapshot_message(snapshot), 0
    for sequence in snapshot.sequences:
        state = _sequence_to_message(sequence)
        state_bytes = state.ByteSize() + _STATE_FRAME_BYTES
        if message.sequences and size + state_bytes > max_bytes - _SNAPSHOT_FRAME_BYTES:
            yield message
            message, size = _snapshot_message(snapshot), 0
        message.sequences.append(state)
        size += state_bytes
    yield message


def snapshot_from_messages(messages: Iterable[pb.SnapshotResponse]) -> Snapshot:
    """The snapshot that the messages carry together. Raises `BadInput` when they are none, or not of one snapshot."""
    parts = list(messages)
    if not parts:
        raise BadInput("a snapshot of 0 messages says nothing")
    first = parts[0]
    for part in parts:
        if (part.incarnation, part.last_step) != (first.incarnation, first.last_step):
            raise BadInput(f"a snapshot is of step {first.last_step} and of step {part.last_step}")
    return Snapshot(
        incarnation=Incarnation(first.incarnation.hex()),
        last_step=StepNumber(first.last_step),
        sequences=tuple(_sequence_from_message(state) for part in parts for state in part.sequences),
    )


_STATE_FRAME_BYTES = 6  # a sequence's tag and length inside the message
_SNAPSHOT_FRAME_BYTES = 32  # incarnation and step number


def _snapshot_message(snapshot: Snapshot) -> pb.SnapshotResponse:
    return pb.SnapshotResponse(incarnation=bytes.fromhex(snapshot.incarnation), last_step=snapshot.last_step)


def _sequence_to_message(sequence: SequenceSnapshot) -> pb.SequenceState:
    return pb.SequenceState(
        sequence=sequence.sequence,
        cells=sequence.cells,
        tokens=sequence.tokens,
        last_sampled=sequence.last_sampled,
        sampling=None if sequence.sampling is None else sampling_to_message(sequence.sampling),
        note=sequence.note,
        logprobs_from=sequence.logprobs_from,
        logprobs=logprobs_to_message(sequence.logprobs),
    )


def _sequence_from_message(message: pb.SequenceState) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence=SequenceId(message.sequence),
        cells=tuple(Cell(cell) for cell in message.cells),
        tokens=tuple(message.tokens),
        last_sampled=message.last_sampled if message.HasField("last_sampled") else None,
        sampling=sampling_from_message(message.sampling) if message.HasField("sampling") else None,
        note=message.note,
        logprobs=logprobs_from_message(message.logprobs),
        logprobs_from=message.logprobs_from,
    )
