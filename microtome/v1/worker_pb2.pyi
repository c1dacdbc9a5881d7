from microtome.v1 import logprobs_pb2 as _logprobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("incarnation", "device", "device_uuid", "model", "fingerprint", "vocab_size", "usable_cells", "scratch_cell", "max_sequences", "max_session_tokens", "windows", "methods", "table_digest", "max_output_rows")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    USABLE_CELLS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_CELL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    device: str
    device_uuid: str
    model: str
    fingerprint: str
    vocab_size: int
    usable_cells: int
    scratch_cell: int
    max_sequences: int
    max_session_tokens: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    methods: _containers.RepeatedCompositeFieldContainer[Method]
    table_digest: int
    max_output_rows: int
    def __init__(self, incarnation: _Optional[bytes] = ..., device: _Optional[str] = ..., device_uuid: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., usable_cells: _Optional[int] = ..., scratch_cell: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_session_tokens: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ..., methods: _Optional[_Iterable[_Union[Method, _Mapping]]] = ..., table_digest: _Optional[int] = ..., max_output_rows: _Optional[int] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "min_tokens", "max_tokens", "is_static", "min_rows", "cost_us", "cost_ns_per_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_STATIC_FIELD_NUMBER: _ClassVar[int]
    MIN_ROWS_FIELD_NUMBER: _ClassVar[int]
    COST_US_FIELD_NUMBER: _ClassVar[int]
    COST_NS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    min_tokens: int
    max_tokens: int
    is_static: bool
    min_rows: int
    cost_us: int
    cost_ns_per_token: int
    def __init__(self, name: _Optional[str] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., is_static: _Optional[bool] = ..., min_rows: _Optional[int] = ..., cost_us: _Optional[int] = ..., cost_ns_per_token: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("incarnation", "step", "table_digest", "ops", "sequences", "starts", "widths", "flags", "cells", "tokens", "slice_offsets", "slice_lengths", "slice_methods", "next_tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLICE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SLICE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SLICE_METHODS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    step: int
    table_digest: int
    ops: _containers.RepeatedCompositeFieldContainer[SequenceOp]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    widths: _containers.RepeatedScalarFieldContainer[int]
    flags: _containers.RepeatedScalarFieldContainer[int]
    cells: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    slice_offsets: _containers.RepeatedScalarFieldContainer[int]
    slice_lengths: _containers.RepeatedScalarFieldContainer[int]
    slice_methods: _containers.RepeatedScalarFieldContainer[int]
    next_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[bytes] = ..., step: _Optional[int] = ..., table_digest: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[SequenceOp, _Mapping]]] = ..., sequences: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., widths: _Optional[_Iterable[int]] = ..., flags: _Optional[_Iterable[int]] = ..., cells: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., slice_offsets: _Optional[_Iterable[int]] = ..., slice_lengths: _Optional[_Iterable[int]] = ..., slice_methods: _Optional[_Iterable[int]] = ..., next_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceOp(_message.Message):
    __slots__ = ("open", "clone", "truncate", "drop", "set_sampling", "annotate", "extend")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLONE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    SET_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ANNOTATE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    open: OpenSequence
    clone: CloneSequence
    truncate: TruncateSequence
    drop: DropSequence
    set_sampling: SetSampling
    annotate: Annotate
    extend: ExtendSequence
    def __init__(self, open: _Optional[_Union[OpenSequence, _Mapping]] = ..., clone: _Optional[_Union[CloneSequence, _Mapping]] = ..., truncate: _Optional[_Union[TruncateSequence, _Mapping]] = ..., drop: _Optional[_Union[DropSequence, _Mapping]] = ..., set_sampling: _Optional[_Union[SetSampling, _Mapping]] = ..., annotate: _Optional[_Union[Annotate, _Mapping]] = ..., extend: _Optional[_Union[ExtendSequence, _Mapping]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence", "cells")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ...) -> None: ...

class ExtendSequence(_message.Message):
    __slots__ = ("sequence", "cells")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ...) -> None: ...

class CloneSequence(_message.Message):
    __slots__ = ("sequence", "source", "upto")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    source: int
    upto: int
    def __init__(self, sequence: _Optional[int] = ..., source: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class TruncateSequence(_message.Message):
    __slots__ = ("sequence", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    length: int
    def __init__(self, sequence: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class DropSequence(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class SetSampling(_message.Message):
    __slots__ = ("sequence", "sampling")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sampling: Sampling
    def __init__(self, sequence: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Annotate(_message.Message):
    __slots__ = ("sequence", "note")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    note: bytes
    def __init__(self, sequence: _Optional[int] = ..., note: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_tokens", "bias_values", "allowed_tokens", "restrict_to_allowed", "banned_tokens", "min_new_tokens", "stop_token_ids", "logprobs", "prompt_tokens", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTRICT_TO_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed_tokens: _containers.RepeatedScalarFieldContainer[int]
    restrict_to_allowed: bool
    banned_tokens: _containers.RepeatedScalarFieldContainer[int]
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_tokens: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed_tokens: _Optional[_Iterable[int]] = ..., restrict_to_allowed: _Optional[bool] = ..., banned_tokens: _Optional[_Iterable[int]] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("incarnation", "step", "tokens", "logprobs", "step_us", "idle_us", "forwards", "fault", "token_logprobs", "prompt_logprobs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    step: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    step_us: int
    idle_us: int
    forwards: _containers.RepeatedScalarFieldContainer[int]
    fault: StepFault
    token_logprobs: _logprobs_pb2.Logprobs
    prompt_logprobs: _logprobs_pb2.Logprobs
    def __init__(self, incarnation: _Optional[bytes] = ..., step: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., step_us: _Optional[int] = ..., idle_us: _Optional[int] = ..., forwards: _Optional[_Iterable[int]] = ..., fault: _Optional[_Union[StepFault, _Mapping]] = ..., token_logprobs: _Optional[_Union[_logprobs_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_logprobs_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class StepFault(_message.Message):
    __slots__ = ("refused", "message")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    refused: bool
    message: str
    def __init__(self, refused: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("present", "logprob", "top_tokens", "top_logprobs")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    present: bool
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, present: _Optional[bool] = ..., logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("incarnation", "last_step", "sequences")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    last_step: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceState]
    def __init__(self, incarnation: _Optional[bytes] = ..., last_step: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceState, _Mapping]]] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("sequence", "cells", "tokens", "last_sampled", "sampling", "note", "logprobs_from", "logprobs")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    last_sampled: int
    sampling: Sampling
    note: bytes
    logprobs_from: int
    logprobs: _logprobs_pb2.Logprobs
    def __init__(self, sequence: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., last_sampled: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., note: _Optional[bytes] = ..., logprobs_from: _Optional[int] = ..., logprobs: _Optional[_Union[_logprobs_pb2.Logprobs, _Mapping]] = ...) -> None: ...
