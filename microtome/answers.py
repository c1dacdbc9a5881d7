"""What a client gets back: plain values, and how each is read off the wire. Knows no channel, clock or thread.

Counts are tokens, cells or generations; times are seconds where a name ends in `_s`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from microtome.v1 import admin_pb2
from microtome.v1 import generation_pb2 as pb
from microtome.v1.logprobs_pb2 import Logprobs

__all__ = [
    "Completion",
    "FinishReason",
    "GenerationState",
    "ListedGeneration",
    "Model",
    "ServiceStatus",
    "TokenLogprobs",
    "Update",
    "Usage",
    "WaitingReason",
    "Whereabouts",
    "WorkerState",
]


class FinishReason(StrEnum):
    """Why a generation ended. Compares equal to its text: `update.finish_reason == "length"`."""

    STOP = "stop"  # a stop token, which is among the token ids, not in the text; or a text to stop at, not in it either
    LENGTH = "length"  # max_new_tokens, or the end of the context
    CANCELLED = "cancelled"


class GenerationState(StrEnum):
    """What a generation is about. Compares equal to its text."""

    WAITING = "waiting"  # for its first step
    RUNNING = "running"  # it has a place on a worker
    RETURNING = "returning"  # it had a place, gave it up or lost it, and waits for another
    ENDED = "ended"  # and is kept for a while, as it was started as resumable


class WaitingReason(StrEnum):
    """Why a generation makes no step. Compares equal to its text."""

    NOTHING = "nothing"  # it runs, or has ended
    NO_WORKER = "no worker"  # none is there that can hold it
    SEQUENCES = "sequences"  # the workers hold as many sessions as they can
    CELLS = "cells"  # the workers' pools have no room for it now
    STEP_BUDGET = "step budget"  # others came first, and a step holds only so much
    PRIORITY = "priority"  # others that came later have a higher priority
    TENANT_SHARE = "tenant share"  # its tenant has asked for, or was given, more than others
    OWN_SESSION = "own session"  # the generation before it in its session has a step under way
    SHARED_PROMPT = "shared prompt"  # the first of its completions runs the prompt for it
    OTHER = "other"  # one that this client does not know yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a completion cost."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was: natural logarithms of the model's own probabilities, before penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token id, logprob) in its place, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one message of a generation's stream adds to one completion; its last has `finish_reason` and `usage`."""

    text: str  # what these tokens add; may lag behind them while a character is incomplete
    token_ids: tuple[int, ...]
    offset: int  # tokens of this completion sent before these
    generation_id: str
    seed: int  # the seed in force
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token where asked for; None: lost with a driver
    # Where asked for, of the prompt's tokens from `prompt_offset` on, ahead of the first token. None: the first of all.
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_offset: int = 0
    index: int = 0  # of the completion; 0 where only one was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole completion: its updates, joined."""

    text: str
    token_ids: tuple[int, ...]
    generation_id: str
    seed: int
    finish_reason: FinishReason
    usage: Usage
    index: int = 0
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # as of `Update`
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where one completion is, and what it waits for."""

    index: int
    state: GenerationState
    waits_for: WaitingReason
    position: int  # generations that start before it; 0: it is next, runs, or has ended
    predicted_ttft_s: float | None  # from now; None: nothing is measured yet, or the first token is out
    prompt_tokens: int
    output_tokens: int  # so far
    worker: str  # empty: it is on none
    parked: int  # times it gave up its cells for another
    moved: int  # times it lost its worker, or left it
    age_s: float  # since it was submitted
    finish_reason: FinishReason | None = None  # of one that has ended; None there: it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGeneration:
    """One completion among all that have not ended."""

    generation_id: str
    tenant: str
    priority: int
    whereabouts: Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is served."""

    name: str
    architecture: str  # the transformers library's name of the model class
    fingerprint: str  # hex; equal fingerprints give equal answers
    vocab_size: int
    context_tokens: int  # prompt and output of one generation together
    end_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker, as the service sees it."""

    name: str
    state: str  # "starting", "ready", "draining", "ended", "lost"
    cause: str  # why it is not ready; empty when it is
    loss: str  # of one that is lost: "died", "hung", "failed a step", "link", "not started"; else empty
    device: str
    address: str
    pid: int
    incarnation: str  # hex
    cells_used: int  # by sessions
    cells_cached: int  # held by the prefix cache alone, given up when sessions need them
    cells_usable: int
    sessions: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """How the service is."""

    service: str
    version: str
    uptime_s: float
    workers: tuple[WorkerState, ...]
    running: int  # generations with a step behind or under way
    waiting: int  # generations that wait for their first step
    counters: dict[str, int]  # name of the field in `microtome.v1.Counters` → its value
    ray_address: str  # "host:port" of the Ray cluster's head


_FINISH = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


_STATES = {
    pb.GENERATION_STATE_WAITING: GenerationState.WAITING,
    pb.GENERATION_STATE_RUNNING: GenerationState.RUNNING,
    pb.GENERATION_STATE_RETURNING: GenerationState.RETURNING,
    pb.GENERATION_STATE_ENDED: GenerationState.ENDED,
}
_REASONS = {
    pb.WAITING_REASON_UNSPECIFIED: WaitingReason.NOTHING,
    pb.WAITING_REASON_NOTHING: WaitingReason.NOTHING,
    pb.WAITING_REASON_NO_WORKER: WaitingReason.NO_WORKER,
    pb.WAITING_REASON_SEQUENCES: WaitingReason.SEQUENCES,
    pb.WAITING_REASON_CELLS: WaitingReason.CELLS,
    pb.WAITING_REASON_STEP_BUDGET: WaitingReason.STEP_BUDGET,
    pb.WAITING_REASON_PRIORITY: WaitingReason.PRIORITY,
    pb.WAITING_REASON_TENANT_SHARE: WaitingReason.TENANT_SHARE,
    pb.WAITING_REASON_OWN_SESSION: WaitingReason.OWN_SESSION,
    pb.WAITING_REASON_SHARED_PROMPT: WaitingReason.SHARED_PROMPT,
}


def update_of(message: pb.GenerateResponse) -> Update:
    """One message as an update. A finish reason this client does not know yet ends the completion as a stop does."""
    finish = None
    if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        finish = _FINISH.get(message.finish_reason, FinishReason.STOP)
    return Update(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        offset=message.offset,
        generation_id=message.generation_id,
        seed=message.seed,
        finish_reason=finish,
        usage=_usage_of(message.usage) if finish is not None else None,
        logprobs=_logprobs_of(message.logprobs, message.token_ids),
        prompt_token_ids=tuple(message.prompt_token_ids),
        prompt_logprobs=_logprobs_of(message.prompt_logprobs, message.prompt_token_ids),
        prompt_offset=message.prompt_offset,
    )


def _logprobs_of(message: Logprobs, token_ids: Sequence[int]) -> tuple[TokenLogprobs | None, ...]:
    """One per token, or none where none were asked for."""
    if not message.counts:
        return ()
    own, top = iter(message.logprobs), zip(message.top_tokens, message.top_logprobs, strict=True)
    return tuple(
        TokenLogprobs(token_id=token, logprob=next(own), top=tuple(islice(top, count - 1))) if count else None
        for token, count in zip(token_ids, message.counts, strict=True)
    )


def whereabouts_of(message: pb.Whereabouts) -> Whereabouts:
    """A state this client does not know yet is taken for running."""
    return Whereabouts(
        index=message.index,
        state=_STATES.get(message.state, GenerationState.RUNNING),
        waits_for=_REASONS.get(message.waits_for, WaitingReason.OTHER),
        position=message.position,
        predicted_ttft_s=message.predicted_ttft_ms / 1000 if message.HasField("predicted_ttft_ms") else None,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        worker=message.worker,
        parked=message.parked,
        moved=message.moved,
        age_s=message.age_ms / 1000,
        finish_reason=_FINISH.get(message.finish_reason),
    )


def listed_of(message: admin_pb2.ListedGeneration) -> ListedGeneration:
    return ListedGeneration(
        generation_id=message.generation_id,
        tenant=message.tenant,
        priority=message.priority,
        whereabouts=whereabouts_of(message.whereabouts),
    )


def completion_of(updates: Iterable[Update]) -> Completion:
    """The updates of one whole completion, in order and at least the last one, joined."""
    updates = list(updates)
    last = updates[-1] if updates else None
    assert last is not None  # a stream that ends without a finish reason raises before it comes here
    assert last.finish_reason is not None
    assert last.usage is not None
    return Completion(
        index=last.index,
        text="".join(one.text for one in updates),
        token_ids=tuple(token for one in updates for token in one.token_ids),
        logprobs=tuple(logprobs for one in updates for logprobs in one.logprobs),
        prompt_token_ids=tuple(token for one in updates for token in one.prompt_token_ids),
        prompt_logprobs=tuple(logprobs for one in updates for logprobs in one.prompt_logprobs),
        generation_id=last.generation_id,
        seed=last.seed,
        finish_reason=last.finish_reason,
        usage=last.usage,
    )


def model_of(message: pb.GetModelResponse) -> Model:
    return Model(
        name=message.name,
        architecture=message.architecture,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        context_tokens=message.context_tokens,
        end_token_ids=tuple(message.end_token_ids),
        has_chat_template=message.has_chat_template,
    )


def status_of(message: pb.StatusResponse) -> ServiceStatus:
    return ServiceStatus(
        service=message.service,
        version=message.version,
        uptime_s=message.uptime_ms / 1000,
        workers=tuple(_worker_of(worker) for worker in message.workers),
        running=message.running,
        waiting=message.waiting,
        counters={field.name: getattr(message.counters, field.name) for field in pb.Counters.DESCRIPTOR.fields},
        ray_address=message.ray_address,
    )


def _usage_of(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
    )


def _worker_of(message: pb.WorkerStatus) -> WorkerState:
    return WorkerState(
        name=message.name,
        state=message.state,
        cause=message.cause,
        loss=message.loss,
        device=message.device,
        address=message.address,
        pid=message.pid,
        incarnation=message.incarnation,
        cells_used=message.cells_used,
        cells_cached=message.cells_cached,
        cells_usable=message.cells_usable,
        sessions=message.sessions,
        steps=message.steps,
    )
