"""A client's `GenerateRequest` checked and put into the planner's words.

Pure: no clock, no socket. Everything wrong with a request is one `BadInput` whose sentence names the value and the
limit, raised before anything changes. Widths count tokens.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from microtome.actors.text import Message
from microtome.planner.errors import BadInput, UnknownId
from microtome.planner.sessions import LAST_SESSION_ID, life_of
from microtome.planner.types import FinishReason, GenerationOptions, SamplingParams, SessionId
from microtome.v1 import generation_pb2 as pb

DEFAULT_NEW_TOKENS = 256
LONGEST_ID = 128  # characters of a caller's own generation id
LONGEST_SALT = 128  # characters
LONGEST_HANDLE = len(str(LAST_SESSION_ID))
LONGEST_SHOWN = 40  # characters of a refused text value that a message repeats
_DECIMAL = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What clients are told of the model, and what their requests are checked against."""

    name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int  # prompt and output of one generation together
    end_token_ids: tuple[int, ...]
    has_chat_template: bool
    architecture: str  # empty: the executor names none


def check_numbers(request: pb.GenerateRequest, model: ServedModel) -> None:
    """Everything that can be checked before the prompt is tokenized. Raises `BadInput`."""
    if request.HasField("max_new_tokens") and request.max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {request.max_new_tokens} is below 1")
    if request.HasField("temperature"):
        value = request.temperature
        if not (math.isfinite(value) and value >= 0):
            raise BadInput(f"temperature {value:g} is not a number of 0 or more")
    if request.HasField("top_k") and request.top_k > model.vocab_size:
        raise BadInput(f"top_k {request.top_k} is above the vocabulary size {model.vocab_size}")
    if request.HasField("top_p") and not 0 < request.top_p <= 1:  # false for nan
        raise BadInput(f"top_p {request.top_p:g} is not above 0 and at most 1")
    if request.HasField("min_p") and not 0 <= request.min_p <= 1:
        raise BadInput(f"min_p {request.min_p:g} is not in 0 to 1")
    _check_ids("stop token", request.stop_token_ids, model)
    _check_ids("generated token", request.generated_token_ids, model)
    if request.generated_token_ids and request.temperature and not request.HasField("seed"):
        raise BadInput("a sampled generation that goes on needs the seed that was in force")
    if request.generated_token_ids and request.session_id:
        raise BadInput("generated_token_ids are given, and a session_id: the session has what was generated in it")
    name = request.generation_id
    if len(name) > LONGEST_ID or not name.isprintable():
        raise BadInput(f"generation id {name[:LONGEST_SHOWN]!r} is not at most {LONGEST_ID} printable characters")


def session_of(handle: str) -> SessionId:
    """The session that a client calls by this id. Raises `UnknownId` for one that no driver gives to clients."""
    session = SessionId(int(handle) if len(handle) <= LONGEST_HANDLE and _DECIMAL.fullmatch(handle) else 0)
    if not life_of(session):  # sessions that callers did not open have none
        raise UnknownId(f"no session {handle[:LONGEST_SHOWN]!r}")
    return session


def check_salt(salt: str) -> None:
    """Raises `BadInput`."""
    if len(salt) > LONGEST_SALT or not salt.isprintable():
        raise BadInput(f"cache_salt {salt[:LONGEST_SHOWN]!r} is not at most {LONGEST_SALT} printable characters")


def text_prompt(request: pb.GenerateRequest) -> str | list[Message] | None:
    """The prompt where it is text or a chat, still to be tokenized; None: it is token ids. Raises `BadInput`."""
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise BadInput("the prompt is empty: it needs 1 character or more")
            return request.text
        case "chat":
            if not request.chat.messages:
                raise BadInput("the chat is empty: it needs 1 message or more")
            return [Message(message.role, message.content) for message in request.chat.messages]
        case "token_ids":
            return None
        case _:
            raise BadInput("the request has no prompt: give it text, a chat or token ids")


def check_prompt(prompt: Sequence[int], model: ServedModel) -> None:
    """Raises `BadInput` for a prompt that is empty, longer than the context, or not of this vocabulary."""
    if not prompt:
        raise BadInput("the prompt is empty: it needs 1 token or more")
    if len(prompt) >= model.context_tokens:
        raise BadInput(
            f"the prompt has {len(prompt)} tokens, and {model.context_tokens - 1} is the limit: the context holds "
            f"{model.context_tokens}, one of them generated"
        )
    _check_ids("token", prompt, model)


def finished_before(options: GenerationOptions, generated: Sequence[int]) -> FinishReason | None:
    """Why there is nothing to go on with behind what an earlier call has delivered; None: there is."""
    if generated and generated[-1] in options.stop_token_ids:
        return FinishReason.STOP
    return None if options.max_new_tokens > 0 else FinishReason.LENGTH


def generation_options(
    request: pb.GenerateRequest, model: ServedModel, prompt_tokens: int, seed: int, deadline_us: int | None
) -> GenerationOptions:
    """What the planner is asked for. The output never goes past the end of the context.

    `prompt_tokens` are the caller's own; what was generated already follows them, and counts towards the limit: a
    `max_new_tokens` of 0 says that none is missing. Raises `BadInput` when more were generated than are asked for.
    """
    room = model.context_tokens - prompt_tokens
    before = len(request.generated_token_ids)
    wanted = request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    wanted = min(wanted, room)
    if before > wanted:
        raise BadInput(f"{before} generated tokens are given, and {wanted} is the limit of this generation")
    # A checkpoint may name an end that its model cannot say.
    end_tokens = () if request.ignore_eos else tuple(t for t in model.end_token_ids if t < model.vocab_size)
    return GenerationOptions(
        max_new_tokens=wanted - before,
        sampling=SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p if request.HasField("top_p") else 1.0,
            min_p=request.min_p,
            seed=seed,
            prompt_tokens=prompt_tokens,
        ),
        stop_token_ids=tuple(sorted({*end_tokens, *request.stop_token_ids})),
        priority=request.priority,
        deadline_us=deadline_us,
        delivered_before=before,
    )


def _check_ids(what: str, ids: Iterable[int], model: ServedModel) -> None:
    for place, token in enumerate(ids):
        if token >= model.vocab_size:
            raise BadInput(
                f"{what} id {token} (number {place + 1}) is not below the vocabulary size {model.vocab_size}"
            )
