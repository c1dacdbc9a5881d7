"""Planner values ↔ JSON, for whatever is written rarely enough: exact both ways, and readable without this code.

A dataclass is an object with its class under "!" and the fields that differ from their defaults; an error is its class
and arguments; an enum its class and value; bytes are base64. Sequences come back as tuples, whatever they were.
"""

import base64
import dataclasses
import json
from enum import Enum
from typing import Any

from microtome.planner import config, errors, events, scaling, types
from microtome.planner.errors import BadInput, BatchingError

_CLASSES: dict[str, type] = {
    name: kind
    for module in (types, events, config, scaling)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
}
_ERRORS: dict[str, type[BatchingError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BatchingError)
}


def to_json(value: object) -> bytes:
    """Raises `TypeError` for a value that is none of the planner's."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def from_json(data: bytes) -> Any:
    """Raises `BadInput` for bytes that `to_json` did not write."""
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"not a record of the planner's: {data[:60]!r} ({error})") from error


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"!": "bytes", "base64": base64.b64encode(value).decode()}
        case Enum():
            return {"!": type(value).__name__, "value": value.value}
        case BatchingError():
            return {"!": type(value).__name__, "args": [_plain(part) for part in value.args]}
        case _ if dataclasses.is_dataclass(value):
            return _plain_fields(value)
        case _:
            return [_plain(part) for part in value]  # type: ignore[attr-defined]


def _plain_fields(value: Any) -> dict[str, object]:
    record: dict[str, object] = {"!": type(value).__name__}
    for one in dataclasses.fields(value):
        part = getattr(value, one.name)
        if one.init and not (one.default is not dataclasses.MISSING and part == one.default):
            record[one.name] = _plain(part)
    return record


def _value(record: Any) -> Any:
    if isinstance(record, list):
        return tuple(_value(part) for part in record)
    if not isinstance(record, dict):
        return record
    name = record.pop("!")
    if name == "bytes":
        return base64.b64decode(record["base64"])
    if name in _ERRORS:
        return _ERRORS[name](*(_value(part) for part in record["args"]))
    kind = _CLASSES[name]
    if issubclass(kind, Enum):
        return kind(record["value"])
    return kind(**{key: _value(part) for key, part in record.items()})
