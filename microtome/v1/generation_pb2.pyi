from microtome.v1 import logprobs_pb2 as _logprobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class GenerationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATION_STATE_UNSPECIFIED: _ClassVar[GenerationState]
    GENERATION_STATE_WAITING: _ClassVar[GenerationState]
    GENERATION_STATE_RUNNING: _ClassVar[GenerationState]
    GENERATION_STATE_RETURNING: _ClassVar[GenerationState]
    GENERATION_STATE_ENDED: _ClassVar[GenerationState]

class WaitingReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAITING_REASON_UNSPECIFIED: _ClassVar[WaitingReason]
    WAITING_REASON_NOTHING: _ClassVar[WaitingReason]
    WAITING_REASON_NO_WORKER: _ClassVar[WaitingReason]
    WAITING_REASON_SEQUENCES: _ClassVar[WaitingReason]
    WAITING_REASON_CELLS: _ClassVar[WaitingReason]
    WAITING_REASON_STEP_BUDGET: _ClassVar[WaitingReason]
    WAITING_REASON_PRIORITY: _ClassVar[WaitingReason]
    WAITING_REASON_TENANT_SHARE: _ClassVar[WaitingReason]
    WAITING_REASON_OWN_SESSION: _ClassVar[WaitingReason]
    WAITING_REASON_SHARED_PROMPT: _ClassVar[WaitingReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
GENERATION_STATE_UNSPECIFIED: GenerationState
GENERATION_STATE_WAITING: GenerationState
GENERATION_STATE_RUNNING: GenerationState
GENERATION_STATE_RETURNING: GenerationState
GENERATION_STATE_ENDED: GenerationState
WAITING_REASON_UNSPECIFIED: WaitingReason
WAITING_REASON_NOTHING: WaitingReason
WAITING_REASON_NO_WORKER: WaitingReason
WAITING_REASON_SEQUENCES: WaitingReason
WAITING_REASON_CELLS: WaitingReason
WAITING_REASON_STEP_BUDGET: WaitingReason
WAITING_REASON_PRIORITY: WaitingReason
WAITING_REASON_TENANT_SHARE: WaitingReason
WAITING_REASON_OWN_SESSION: WaitingReason
WAITING_REASON_SHARED_PROMPT: WaitingReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "generation_id", "priority", "generated_token_ids", "resumable", "session_id", "n", "begun", "tenant", "cache_salt", "ttft_target_ms", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "min_new_tokens", "stop", "logprobs", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    token_ids: TokenIds
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    generation_id: str
    priority: int
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resumable: bool
    session_id: str
    n: int
    begun: _containers.RepeatedCompositeFieldContainer[BegunCompletion]
    tenant: str
    cache_salt: str
    ttft_target_ms: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: int
    prompt_logprobs: int
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., generation_id: _Optional[str] = ..., priority: _Optional[int] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., resumable: _Optional[bool] = ..., session_id: _Optional[str] = ..., n: _Optional[int] = ..., begun: _Optional[_Iterable[_Union[BegunCompletion, _Mapping]]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttft_target_ms: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class BegunCompletion(_message.Message):
    __slots__ = ("index", "seed", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    seed: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., seed: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("cache_salt", "tenant")
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    cache_salt: str
    tenant: str
    def __init__(self, cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CloneSessionRequest(_message.Message):
    __slots__ = ("session_id", "upto")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    upto: int
    def __init__(self, session_id: _Optional[str] = ..., upto: _Optional[int] = ...) -> None: ...

class RewindSessionRequest(_message.Message):
    __slots__ = ("session_id", "position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    position: int
    def __init__(self, session_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    length: int
    def __init__(self, session_id: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("generation_id", "offset", "offsets")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    offset: int
    offsets: _containers.RepeatedCompositeFieldContainer[CompletionOffset]
    def __init__(self, generation_id: _Optional[str] = ..., offset: _Optional[int] = ..., offsets: _Optional[_Iterable[_Union[CompletionOffset, _Mapping]]] = ...) -> None: ...

class CompletionOffset(_message.Message):
    __slots__ = ("index", "offset")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("generation_id", "offset", "token_ids", "text", "finish_reason", "usage", "seed", "index", "n", "logprobs", "prompt_logprobs", "prompt_offset", "prompt_token_ids")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    seed: int
    index: int
    n: int
    logprobs: _logprobs_pb2.Logprobs
    prompt_logprobs: _logprobs_pb2.Logprobs
    prompt_offset: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation_id: _Optional[str] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., index: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[_Union[_logprobs_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_logprobs_pb2.Logprobs, _Mapping]] = ..., prompt_offset: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("generation_id",)
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    def __init__(self, generation_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhereRequest(_message.Message):
    __slots__ = ("generation_id",)
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    def __init__(self, generation_id: _Optional[str] = ...) -> None: ...

class WhereResponse(_message.Message):
    __slots__ = ("generation_id", "completions")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    completions: _containers.RepeatedCompositeFieldContainer[Whereabouts]
    def __init__(self, generation_id: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Whereabouts, _Mapping]]] = ...) -> None: ...

class Whereabouts(_message.Message):
    __slots__ = ("index", "state", "waits_for", "position", "predicted_ttft_ms", "prompt_tokens", "output_tokens", "worker", "parked", "moved", "age_ms", "finish_reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: GenerationState
    waits_for: WaitingReason
    position: int
    predicted_ttft_ms: int
    prompt_tokens: int
    output_tokens: int
    worker: str
    parked: int
    moved: int
    age_ms: int
    finish_reason: FinishReason
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[GenerationState, str]] = ..., waits_for: _Optional[_Union[WaitingReason, str]] = ..., position: _Optional[int] = ..., predicted_ttft_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., worker: _Optional[str] = ..., parked: _Optional[int] = ..., moved: _Optional[int] = ..., age_ms: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "context_tokens", "end_token_ids", "has_chat_template", "architecture")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    architecture: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., architecture: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("service", "version", "uptime_ms", "workers", "running", "waiting", "counters", "ray_address")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    service: str
    version: str
    uptime_ms: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    running: int
    waiting: int
    counters: Counters
    ray_address: str
    def __init__(self, service: _Optional[str] = ..., version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., ray_address: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "state", "device", "incarnation", "pid", "address", "cells_used", "cells_usable", "sessions", "steps", "cause", "cells_cached", "loss")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CELLS_USED_FIELD_NUMBER: _ClassVar[int]
    CELLS_USABLE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CELLS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    device: str
    incarnation: str
    pid: int
    address: str
    cells_used: int
    cells_usable: int
    sessions: int
    steps: int
    cause: str
    cells_cached: int
    loss: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., device: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., cells_used: _Optional[int] = ..., cells_usable: _Optional[int] = ..., sessions: _Optional[int] = ..., steps: _Optional[int] = ..., cause: _Optional[str] = ..., cells_cached: _Optional[int] = ..., loss: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("generations_started", "generations_finished", "prompt_tokens", "output_tokens", "overshoot_tokens", "steps", "step_us", "idle_us", "cached_tokens", "prefilled_tokens", "moved", "parked")
    GENERATIONS_STARTED_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERSHOOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    generations_started: int
    generations_finished: int
    prompt_tokens: int
    output_tokens: int
    overshoot_tokens: int
    steps: int
    step_us: int
    idle_us: int
    cached_tokens: int
    prefilled_tokens: int
    moved: int
    parked: int
    def __init__(self, generations_started: _Optional[int] = ..., generations_finished: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., overshoot_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., step_us: _Optional[int] = ..., idle_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., moved: _Optional[int] = ..., parked: _Optional[int] = ...) -> None: ...
