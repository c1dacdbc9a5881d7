"""Strategies for every value that crosses the driver–worker link, over the whole range its field can hold."""

from hypothesis import strategies as st

from microtome.actors.wire import Snapshot, StepFault
from microtome.planner.types import (
    Annotate,
    Capability,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    MethodSpec,
    MethodTable,
    OpenSequence,
    SamplingParams,
    SequenceSnapshot,
    SetSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TruncateSequence,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
real = st.floats(allow_nan=False)
real32 = st.floats(allow_nan=False, width=32)
text = st.text(max_size=20)
incarnation = st.binary(min_size=16, max_size=16).map(bytes.hex)
column = st.lists(uint32, max_size=12)
ids = st.lists(uint32, max_size=6).map(tuple)

sampling = st.builds(
    SamplingParams,
    temperature=real,
    top_k=uint32,
    top_p=real,
    min_p=real,
    seed=uint64,
    repetition_penalty=real,
    presence_penalty=real,
    frequency_penalty=real,
    logit_bias=st.lists(st.tuples(uint32, real), max_size=4).map(tuple),
    allowed_tokens=st.none() | ids,
    banned_tokens=ids,
    min_new_tokens=uint32,
    stop_token_ids=ids,
    logprobs=st.none() | uint32,
    prompt_tokens=uint32,
    prompt_logprobs=st.none() | uint32,
)

operation = st.one_of(
    st.builds(OpenSequence, uint32, ids),
    st.builds(CloneSequence, uint32, uint32, uint32),
    st.builds(ExtendSequence, uint32, ids),
    st.builds(TruncateSequence, uint32, uint32),
    st.builds(DropSequence, uint32),
    st.builds(SetSampling, uint32, sampling),
    st.builds(Annotate, uint32, st.binary(max_size=20)),
)

plan = st.builds(
    StepPlan,
    incarnation=incarnation,
    step=uint64,
    table_digest=uint64,
    ops=st.lists(operation, max_size=6).map(tuple),
    sequences=column,
    starts=column,
    widths=column,
    flags=column,
    cells=column,
    tokens=column,
    slice_offsets=column,
    slice_lengths=column,
    slice_methods=column,
    next_tokens=column,
)

known_logprobs = st.builds(TokenLogprobs, real32, st.lists(st.tuples(uint32, real32), max_size=3).map(tuple))
logprobs = st.none() | known_logprobs

result = st.builds(
    StepResult,
    incarnation=incarnation,
    step=uint64,
    tokens=column,
    logprobs=st.lists(logprobs, max_size=4).map(tuple),
    prompt_logprobs=st.lists(known_logprobs, max_size=4).map(tuple),
    step_us=uint64,
    idle_us=uint64,
    forwards=column,
)

fault = st.builds(StepFault, incarnation=incarnation, step=uint64, refused=st.booleans(), message=text)

method = st.builds(
    MethodSpec,
    name=text,
    max_tokens=uint32,
    static=st.booleans(),
    min_tokens=uint32,
    min_rows=uint32,
    cost_us=uint64,
    cost_ns_per_token=uint64,
)

capability = st.builds(
    Capability,
    incarnation=incarnation,
    device=text,
    device_uuid=text,
    model=text,
    fingerprint=text,
    vocab_size=uint32,
    usable_cells=uint32,
    scratch_cell=uint32,
    max_sequences=uint32,
    max_session_tokens=uint32,
    windows=ids,
    table=st.lists(method, max_size=4).map(lambda methods: MethodTable(tuple(methods))),
    max_output_rows=uint32,
)

sequence = st.builds(
    SequenceSnapshot,
    sequence=uint32,
    cells=ids,
    tokens=ids,
    last_sampled=st.none() | uint32,
    sampling=st.none() | sampling,
    note=st.binary(max_size=20),
    logprobs=st.lists(logprobs, max_size=4).map(tuple),
    logprobs_from=uint32,
)

snapshot = st.builds(
    Snapshot, incarnation=incarnation, last_step=uint64, sequences=st.lists(sequence, max_size=6).map(tuple)
)
