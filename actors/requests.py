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
from microtome.planner.generations import MAX_LOGPROBS
from microtome.planner.sessions import LAST_SESSION_ID, life_of
from microtome.planner.types import FinishReason, GenerationOptions, SamplingParams, SessionId
from microtome.v1 import generation_pb2 as pb

DEFAULT_NEW_TOKENS = 256
MOST_COMPLETIONS = 128  # of one prompt
MOST_STOP_TOKENS = 1024
MOST_NAMED_TOKENS = 2048  # allowed and banned ones together: a plan that starts many generations is one message
MOST_BIASED_TOKENS = 300
MOST_STOP_TEXTS = 16
LONGEST_STOP_TEXT = 256  # characters
LARGEST_PENALTY = 1000  # and bias, either way: a logit is a few dozen
LONGEST_ID = 128  # characters of a caller's own generation id
LONGEST_LABEL = 128  # characters of a salt, and of a tenant's name
LONGEST_HANDLE = len(str(LAST_SESSION_ID))
LONGEST_SHOWN = 40  # characters of a refused text value that a message repeats
_SEEDS = 2**64
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
    if len(request.stop_token_ids) > MOST_STOP_TOKENS:
        raise BadInput(f"{len(request.stop_token_ids)} stop token ids are given, and {MOST_STOP_TOKENS} is the limit")
    _check_ids("stop token", request.stop_token_ids, model)
    _check_edits(request, model)
    _check_stops(request)
    for what in ("logprobs", "prompt_logprobs"):
        if request.HasField(what) and getattr(request, what) > MAX_LOGPROBS:
            raise BadInput(f"{what} {getattr(request, what)} is not in 0 to {MAX_LOGPROBS}")
    if request.HasField("n") and not 1 <= request.n <= MOST_COMPLETIONS:
        raise BadInput(f"n {request.n} is not in 1 to {MOST_COMPLETIONS}")
    _check_begun(request, model)
    _check_generated(request, request.generated_token_ids, request.HasField("seed"), model)
    if request.generated_token_ids and request.session_id:
        raise BadInput("generated_token_ids are given, and a session_id: the session has what was generated in it")
    if request.HasField("ttft_target_ms") and request.ttft_target_ms < 1:
        raise BadInput(f"ttft_target_ms {request.ttft_target_ms} is below 1")
    for what, label in (("tenant", request.tenant), ("cache_salt", request.cache_salt)):
        check_label(what, label)
        if label and request.session_id:
            raise BadInput(f"{what} {label!r} is given, and a session_id: the session has its own")
    name = request.generation_id
    if len(name) > LONGEST_ID or not name.isprintable():
        raise BadInput(f"generation id {name[:LONGEST_SHOWN]!r} is not at most {LONGEST_ID} printable characters")


def _check_edits(request: pb.GenerateRequest, model: ServedModel) -> None:
    """Penalties, bias, and tokens that may not be drawn."""
    if request.HasField("repetition_penalty") and not 0 < request.repetition_penalty <= LARGEST_PENALTY:
        raise BadInput(
            f"repetition_penalty {request.repetition_penalty:g} is not above 0 and at most {LARGEST_PENALTY}"
        )
    for what in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(request, what)) <= LARGEST_PENALTY:  # true for nan
            raise BadInput(f"{what} {getattr(request, what):g} is not in -{LARGEST_PENALTY} to {LARGEST_PENALTY}")
    if len(request.logit_bias) > MOST_BIASED_TOKENS:
        raise BadInput(f"{len(request.logit_bias)} logit biases are given, and {MOST_BIASED_TOKENS} is the limit")
    for token, bias in request.logit_bias.items():
        if not abs(bias) <= LARGEST_PENALTY:
            raise BadInput(f"the bias {bias:g} of token {token} is not in -{LARGEST_PENALTY} to {LARGEST_PENALTY}")
    _check_ids("biased token", sorted(request.logit_bias), model)
    allowed, banned = request.allowed_token_ids.ids, request.banned_token_ids
    if len(allowed) + len(banned) > MOST_NAMED_TOKENS:
        raise BadInput(
            f"{len(allowed)} allowed and {len(banned)} banned token ids are given, and {MOST_NAMED_TOKENS} together is "
            "the limit"
        )
    _check_ids("allowed token", allowed, model)
    _check_ids("banned token", banned, model)
    if request.HasField("allowed_token_ids") and not set(allowed) - set(banned):
        raise BadInput(f"no token is left: {len(allowed)} are allowed, and {len(banned)} banned")


def _check_stops(request: pb.GenerateRequest) -> None:
    limit = request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    if request.min_new_tokens > limit:
        raise BadInput(f"min_new_tokens {request.min_new_tokens} is above max_new_tokens {limit}")
    if len(request.stop) > MOST_STOP_TEXTS:
        raise BadInput(f"{len(request.stop)} texts to stop at are given, and {MOST_STOP_TEXTS} is the limit")
    for stop in request.stop:
        if not 1 <= len(stop) <= LONGEST_STOP_TEXT:
            shown = stop[:LONGEST_SHOWN]
            raise BadInput(f"the stop {shown!r} has {len(stop)} characters, not 1 to {LONGEST_STOP_TEXT}")


def _check_begun(request: pb.GenerateRequest, model: ServedModel) -> None:
    n = request.n or 1
    if request.generated_token_ids and (request.begun or n > 1):
        raise BadInput(f"generated_token_ids are of 1 completion, and {n} are asked for: tell what is begun of each")
    if request.begun and request.session_id:
        raise BadInput("begun completions are given, and a session_id: the session has what was generated in it")
    if len(request.begun) > n:
        raise BadInput(f"{len(request.begun)} begun completions are given, and {n} are asked for")
    seen: set[int] = set()
    for begun in request.begun:
        if begun.index >= n:
            raise BadInput(f"begun completion {begun.index} is not below the {n} that are asked for")
        if begun.index in seen:
            raise BadInput(f"begun completion {begun.index} is given twice")
        seen.add(begun.index)
        _check_generated(request, begun.token_ids, begun.HasField("seed") or request.HasField("seed"), model)


def _check_generated(request: pb.GenerateRequest, ids: Sequence[int], seeded: bool, model: ServedModel) -> None:
    """What an earlier call has brought; its number first, since that many may come that looking at each takes long."""
    if len(ids) >= model.context_tokens:
        raise BadInput(
            f"{len(ids)} generated tokens are given, and {model.context_tokens - 1} is the limit: the context holds "
            f"{model.context_tokens}, the prompt among them"
        )
    _check_ids("generated token", ids, model)
    if ids and request.temperature and not seeded:
        raise BadInput("a sampled generation that goes on needs the seed that was in force")


def resume_offsets(request: pb.ResumeRequest) -> dict[int, int] | int:
    """Where to go on: by index of those completions that are wanted, or one offset for all. Raises `BadInput`."""
    if not request.offsets:
        return request.offset
    if request.offset:
        raise BadInput(f"offset {request.offset} is given, and offsets: each completion has its own")
    offsets: dict[int, int] = {}
    for place in request.offsets:
        if place.index in offsets:
            raise BadInput(f"the offset of completion {place.index} is given twice")
        offsets[place.index] = place.offset
    return offsets


def session_of(handle: str) -> SessionId:
    """The session that a client calls by this id. Raises `UnknownId` for one that no driver gives to clients."""
    session = SessionId(int(handle) if len(handle) <= LONGEST_HANDLE and _DECIMAL.fullmatch(handle) else 0)
    if not life_of(session):  # sessions that callers did not open have none
        raise UnknownId(f"no session {handle[:LONGEST_SHOWN]!r}")
    return session


def check_label(what: str, label: str) -> None:
    """Raises `BadInput`."""
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise BadInput(f"{what} {label[:LONGEST_SHOWN]!r} is not at most {LONGEST_LABEL} printable characters")


@dataclass(frozen=True, slots=True)
class Completion:
    """One of those that a request asks for."""

    index: int
    seed: int
    generated: tuple[int, ...]  # what an earlier call has brought of it


def completions_of(request: pb.GenerateRequest, seed: int) -> list[Completion]:
    """Those to be generated. `seed`: of the request, or chosen for it."""
    if request.begun:
        return [
            Completion(b.index, b.seed if b.HasField("seed") else seed_of(seed, b.index), tuple(b.token_ids))
            for b in request.begun
        ]
    generated = tuple(request.generated_token_ids)
    return [Completion(index, seed_of(seed, index), generated) for index in range(request.n or 1)]


def seed_of(seed: int, index: int) -> int:
    """The seed of a prompt's completion: the first one's is the caller's, the others' are scattered over 64 bits.

    So the completions of one seed differ from each other and from those of the seeds beside it. The mixing is that of
    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014; it is one to one.
    """
    if not index:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % _SEEDS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % _SEEDS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % _SEEDS
    return mixed ^ mixed >> 31


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
    request: pb.GenerateRequest,
    model: ServedModel,
    prompt_tokens: int,
    seed: int,
    deadline_us: int | None,
    before: int = 0,
    index: int = 0,
) -> GenerationOptions:
    """What the planner is asked for. The output never goes past the end of the context.

    `prompt_tokens` are the caller's own; the `before` tokens generated already follow them, and count towards the
    limit: a `max_new_tokens` of 0 says that none is missing. The completion of `index` 0 says how likely the prompt is,
    unless that was said before. Raises `BadInput` when more were generated than are asked for.
    """
    room = model.context_tokens - prompt_tokens
    wanted = request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    wanted = min(wanted, room)
    if before > wanted:
        raise BadInput(f"{before} generated tokens are given, and {wanted} is the limit of this generation")
    about_prompt = request.HasField("prompt_logprobs") and not before and not index
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
            repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=tuple(sorted(request.logit_bias.items())),
            allowed_tokens=_named(request.allowed_token_ids.ids) if request.HasField("allowed_token_ids") else None,
            banned_tokens=_named(request.banned_token_ids),
            min_new_tokens=request.min_new_tokens,
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            prompt_logprobs=request.prompt_logprobs if about_prompt else None,
            prompt_tokens=prompt_tokens,
        ),
        stop_token_ids=tuple(sorted({*end_tokens, *request.stop_token_ids})),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        deadline_us=deadline_us,
        ttft_target_us=request.ttft_target_ms * 1000 if request.HasField("ttft_target_ms") else None,
        delivered_before=before,
        stop_texts=tuple(dict.fromkeys(request.stop)),
    )


def _named(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ids)))


def _check_ids(what: str, ids: Sequence[int], model: ServedModel) -> None:
    if not ids or max(ids) < model.vocab_size:  # at the speed of C, for all that are in order
        return
    for place, token in enumerate(ids):
        if token >= model.vocab_size:
            raise BadInput(
                f"{what} id {token} (number {place + 1}) is not below the vocabulary size {model.vocab_size}"
            )
