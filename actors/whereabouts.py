"""What is told of where a generation is: the planner's words put on the wire, counted as the caller counts.

Pure. The planner knows a completion until it has ended; of one that has ended its stream tells.
"""

from microtome.actors.streams import FINISH, Stream, call_of
from microtome.planner.generations import State
from microtome.planner.status import Listed, Waiting, Whereabouts
from microtome.v1 import admin_pb2
from microtome.v1 import generation_pb2 as pb

_STATES = {
    State.SETTLING: pb.GENERATION_STATE_WAITING,
    State.WAITING: pb.GENERATION_STATE_WAITING,
    State.RUNNING: pb.GENERATION_STATE_RUNNING,
    State.RETURNING: pb.GENERATION_STATE_RETURNING,
    State.ENDED: pb.GENERATION_STATE_ENDED,
}
_REASONS = {
    Waiting.NOTHING: pb.WAITING_REASON_NOTHING,
    Waiting.NO_WORKER: pb.WAITING_REASON_NO_WORKER,
    Waiting.SEQUENCES: pb.WAITING_REASON_SEQUENCES,
    Waiting.CELLS: pb.WAITING_REASON_CELLS,
    Waiting.STEP_BUDGET: pb.WAITING_REASON_STEP_BUDGET,
    Waiting.PRIORITY: pb.WAITING_REASON_PRIORITY,
    Waiting.TENANT_SHARE: pb.WAITING_REASON_TENANT_SHARE,
    Waiting.OWN_SESSION: pb.WAITING_REASON_OWN_SESSION,
    Waiting.SHARED_PROMPT: pb.WAITING_REASON_SHARED_PROMPT,
}


def where_is(stream: Stream, found: Whereabouts | None, now_us: int) -> pb.Whereabouts:
    """One completion. `found`: what the planner says of it; None: it knows it no more."""
    if found is not None:
        return _told(found, stream.index, stream.prompt_tokens, stream.base, (now_us - stream.created_us) // 1000)
    return pb.Whereabouts(
        index=stream.index,
        # What it has brought last is still being put into text.
        state=pb.GENERATION_STATE_ENDED if stream.ended else pb.GENERATION_STATE_RUNNING,
        waits_for=pb.WAITING_REASON_UNSPECIFIED if stream.ended else pb.WAITING_REASON_NOTHING,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.expected,
        age_ms=(now_us - stream.created_us) // 1000,
        finish_reason=FINISH.get(stream.finish, pb.FINISH_REASON_UNSPECIFIED) if stream.finish is not None else None,
    )


def listed(one: Listed, stream: Stream | None, now_us: int) -> admin_pb2.ListedGeneration:
    """`stream` None: nobody listens to it any more."""
    call, index, _ = call_of(one.generation)
    found = one.whereabouts
    prompt_tokens, base = (found.prompt_tokens, 0) if stream is None else (stream.prompt_tokens, stream.base)
    return admin_pb2.ListedGeneration(
        generation_id=call,
        tenant=one.tenant,
        priority=one.priority,
        whereabouts=_told(found, index, prompt_tokens, base, (now_us - found.submitted_us) // 1000),
    )


def _told(found: Whereabouts, index: int, prompt_tokens: int, base: int, age_ms: int) -> pb.Whereabouts:
    ttft_us = found.predicted_ttft_us
    return pb.Whereabouts(
        index=index,
        state=_STATES[found.state],
        waits_for=_REASONS[found.waits_for],
        position=found.position,
        predicted_ttft_ms=None if ttft_us is None or base else -(-ttft_us // 1000),
        prompt_tokens=prompt_tokens,
        output_tokens=base + found.delivered,
        worker=found.worker or "",
        parked=found.parked,
        moved=found.moved,
        age_ms=max(0, age_ms),
    )
