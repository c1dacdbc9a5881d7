"""What may be asked of one generation, and how it is put on the wire. Pure: knows no channel, clock or thread.

What the wire cannot carry is refused here, by name and value; whether a value makes sense for the model served is the
service's to say.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypedDict, TypeVar

from microtome.errors import InvalidRequest
from microtome.v1 import admin_pb2
from microtome.v1 import generation_pb2 as pb

__all__ = ["GenerateOptions", "Message"]

Message = Mapping[str, str]  # {"role": "user", "content": "..."}

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1
_REQUIRED_KEYS = ("role", "content")


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`, of both clients. None is the same as absent."""

    max_new_tokens: int | None  # 1 or more; absent: 256. Cut to what the context has room for
    temperature: float | None  # 0 or more; absent: 0, greedy
    top_k: int | None  # 0 or absent: off
    top_p: float | None  # above 0, at most 1; absent: off
    min_p: float | None  # 0 to 1; 0 or absent: off
    seed: int | None  # 64 bits, unsigned; absent: the service chooses, and every update says which
    repetition_penalty: float | None  # divides what is likely and was there, in prompt or output; absent: 1, off
    presence_penalty: float | None  # taken from the logit of a token that the output has; absent: 0, off
    frequency_penalty: float | None  # and once more for each time that it has it; absent: 0, off
    logit_bias: Mapping[int, float] | None  # by token id, added to its logit; 300 at most
    allowed_token_ids: Sequence[int] | None  # only these can be drawn; absent: all
    banned_token_ids: Sequence[int] | None  # these cannot; with the allowed ones 2048 at most
    min_new_tokens: int | None  # nothing stops the generation before; absent: 0
    stop: str | Sequence[str] | None  # text, or up to 16 texts, in front of which the generation ends
    stop_token_ids: Sequence[int] | None  # beside the model's own end tokens
    ignore_eos: bool | None  # True: the model's own end tokens do not stop
    generation_id: str | None  # absent: minted by the client
    resumable: bool | None  # True: lives on when the connection is lost, so that it can be resumed; see `resume`
    logprobs: int | None  # how likely each token was, and so many likeliest beside it, 0 to 20; absent: not told
    prompt_logprobs: int | None  # the same of the prompt's own tokens; absent: not told
    n: int | None  # completions of the prompt, 1 to 128; absent: 1. Updates say by `index` to which they belong
    priority: int | None  # higher first; absent: 0
    tenant: str | None  # whose share it counts against; absent: that of all who name none. Not in a session
    cache_salt: str | None  # cached prefixes are shared under equal salts only; absent: none. Not in a session
    ttft_target_s: float | None  # refused at once if its first token cannot be expected within; absent: no such bound
    timeout_s: float | None  # for the whole generation, retries included; absent: the client's, else none


def request_of(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """The request that stands for one call of `generate`; `timeout_s` is not in it.

    Raises InvalidRequest for a prompt that is given twice or not at all and for values the wire cannot carry, TypeError
    for an option that does not exist.
    """
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        names = ", ".join(GenerateOptions.__annotations__)
        raise TypeError(f"there is no option {unknown[0]!r}; the options are {names}")
    given = [
        name
        for name, value in (("prompt", prompt), ("messages", messages), ("token_ids", token_ids))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(f"give one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}")
    request = pb.GenerateRequest()
    if prompt is not None:
        request.text = _text("prompt", prompt)
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages))
    elif token_ids is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=_whole_numbers("token_ids", token_ids)))
    _fill(request, {name: value for name, value in options.items() if value is not None})
    return request


def scale_request_of(min_workers: int | None, max_workers: int | None) -> admin_pb2.ScaleRequest:
    """Raises InvalidRequest."""
    request = admin_pb2.ScaleRequest()
    if min_workers is not None:
        request.min_workers = _whole("min_workers", min_workers, 0, _UINT32_MAX)
    if max_workers is not None:
        request.max_workers = _whole("max_workers", max_workers, 0, _UINT32_MAX)
    return request


def resume_request_of(generation_id: str, offset: int | Sequence[int | None]) -> pb.ResumeRequest:
    """The request that goes on with a generation from `offset` on; or with each completion from its own, None: not."""
    generation_id = named_generation(generation_id)
    if not isinstance(offset, Sequence) or isinstance(offset, (str, bytes)):
        return pb.ResumeRequest(generation_id=generation_id, offset=_whole("offset", offset, 0, _UINT32_MAX))
    offsets = [
        pb.CompletionOffset(index=index, offset=_whole(f"offset[{index}]", one, 0, _UINT32_MAX))
        for index, one in enumerate(offset)
        if one is not None
    ]
    if not offsets:
        raise InvalidRequest("offset must name one completion or more to go on with; it names none")
    return pb.ResumeRequest(generation_id=generation_id, offsets=offsets)


def named_generation(generation_id: str) -> str:
    if not _text("generation_id", generation_id):
        raise InvalidRequest("generation_id must name a generation; it is empty")
    return generation_id


def one_only(options: Mapping[str, Any]) -> None:
    """For a call that brings one completion."""
    n = options.get("n")
    if n is not None and n != 1:
        raise InvalidRequest(f"complete brings 1 completion, and n {n} are asked for: completions brings them all")


def text_of(name: str, value: object) -> str:
    return _text(name, value)


def token_count_of(name: str, value: object) -> int:
    return _whole(name, value, 0, _UINT32_MAX)


def seconds_or_none(name: str, value: object) -> float | None:
    return None if value is None else positive_seconds(name, value)


def positive_seconds(name: str, value: object) -> float:
    seconds = _real(name, value)
    if not 0 < seconds < math.inf:  # a NaN fails both
        raise InvalidRequest(f"{name} must be above 0 seconds and finite, not {seconds:g}")
    return seconds


def _fill(request: pb.GenerateRequest, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        match name:
            case "max_new_tokens" | "n":
                setattr(request, name, _whole(name, value, 1, _UINT32_MAX))
            case "ttft_target_s":
                milliseconds = math.ceil(positive_seconds(name, value) * 1000)
                request.ttft_target_ms = _whole(f"{name} in ms", milliseconds, 1, _UINT32_MAX)
            case "top_k" | "min_new_tokens" | "logprobs" | "prompt_logprobs":
                setattr(request, name, _whole(name, value, 0, _UINT32_MAX))
            case "seed":
                request.seed = _whole(name, value, 0, _UINT64_MAX)
            case "priority":
                request.priority = _whole(name, value, -_INT32_MAX - 1, _INT32_MAX)
            case "temperature" | "top_p" | "min_p" | "repetition_penalty" | "presence_penalty" | "frequency_penalty":
                setattr(request, name, _real(name, value))
            case "logit_bias":
                _fill_bias(request, value)
            case "allowed_token_ids":
                request.allowed_token_ids.CopyFrom(pb.TokenIds(ids=_whole_numbers(name, value)))
            case "stop_token_ids" | "banned_token_ids":
                getattr(request, name).extend(_whole_numbers(name, value))
            case "stop":
                request.stop.extend(_texts(name, value))
            case "ignore_eos" | "resumable":
                if not isinstance(value, bool):
                    _wrong_kind(name, "True or False", value)
                setattr(request, name, value)
            case "generation_id" | "tenant" | "cache_salt":
                setattr(request, name, _text(name, value))


def _fill_bias(request: pb.GenerateRequest, biases: object) -> None:
    if not isinstance(biases, Mapping):
        _wrong_kind("logit_bias", "a mapping of token ids to numbers", biases)
    for token, bias in biases.items():
        token = _whole("a token id of logit_bias", token, 0, _UINT32_MAX)
        request.logit_bias[token] = _real(f"logit_bias[{token}]", bias)


def _chat(messages: Sequence[Message]) -> pb.Chat:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        _wrong_kind("messages", "a list of messages", messages)
    if not messages:
        raise InvalidRequest("messages must hold 1 message or more, not 0")
    chat = pb.Chat()
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if not isinstance(message, Mapping):
            _wrong_kind(name, "a mapping with role and content", message)
        missing = [key for key in _REQUIRED_KEYS if key not in message]
        if missing:
            raise InvalidRequest(f"{name} has no {missing[0]!r}")
        extra = sorted(str(key) for key in message if key not in _REQUIRED_KEYS)
        if extra:
            raise InvalidRequest(f"{name} has {extra[0]!r}, which is not sent; a message is role and content")
        role, content = (_text(f"{name}[{key!r}]", message[key]) for key in _REQUIRED_KEYS)
        chat.messages.add(role=role, content=content)
    return chat


_T = TypeVar("_T")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _wrong_kind(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, such as a file name or sys.argv may hold
        raise InvalidRequest(f"{name} is not valid Unicode at character {error.start}") from error
    return value


def _texts(name: str, values: object) -> list[str]:
    """One text, or several."""
    if isinstance(values, str):
        return [_text(name, values)]
    if isinstance(values, (bytes, Mapping)) or not isinstance(values, Iterable):
        _wrong_kind(name, "text, or a list of texts", values)
    return [_text(f"{name}[{place}]", value) for place, value in enumerate(values)]


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        _wrong_kind(name, "a whole number", value)
    number = value.__index__()
    assert isinstance(number, int)
    if not least <= number <= most:
        raise InvalidRequest(f"{name} must be {least} to {most}, not {number}")
    return number


def _whole_numbers(name: str, values: object) -> list[int]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        _wrong_kind(name, "a list of token ids", values)
    return [_whole(f"{name}[{place}]", value, 0, _UINT32_MAX) for place, value in enumerate(values)]


def _real(name: str, value: object) -> float:
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        _wrong_kind(name, "a number", value)
    return float(value)


def _wrong_kind(name: str, wanted: str, value: object) -> NoReturn:
    raise InvalidRequest(f"{name} must be {wanted}, not {value!r:.60}")
