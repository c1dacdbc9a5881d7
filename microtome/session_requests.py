"""What may be asked of a session, and how it is put on the wire. Pure: knows no channel, clock or thread.

What both clients share of sessions beside it: opening and cloning are never tried again, since an attempt that seemed
lost may have opened one; the other calls are, for they come to the same when they are made twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from microtome.sampling import Message, request_of, text_of, token_count_of
from microtome.v1 import generation_pb2 as pb


def open_request_of(cache_salt: str, tenant: str) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(cache_salt=text_of("cache_salt", cache_salt), tenant=text_of("tenant", tenant))


def clone_request_of(session_id: str, upto: int | None) -> pb.CloneSessionRequest:
    return pb.CloneSessionRequest(session_id=session_id, upto=None if upto is None else token_count_of("upto", upto))


def rewind_request_of(session_id: str, position: int) -> pb.RewindSessionRequest:
    return pb.RewindSessionRequest(session_id=session_id, position=token_count_of("position", position))


def generate_request_of(
    session_id: str,
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """As `request_of`, behind the session's history."""
    request = request_of(prompt, messages, token_ids, options)
    request.session_id = session_id
    return request
