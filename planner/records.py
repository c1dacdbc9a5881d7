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

CLASSES: dict[str, type] = {  # by name: every dataclass and enum that a record may hold
    name: kind
    for module in (types, events, config, scaling)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
}
_FIELDS: dict[type, list[tuple[str, object]]] = {  # name and default of what a constructor takes
    kind: [(one.name, one.default) for one in dataclasses.fields(kind) if one.init]
    for kind in CLASSES.values()
    if dataclasses.is_dataclass(kind)
}
_encode = json.JSONEncoder(separators=(",", ":")).encode  # making one for each record takes longer than the record
_PLAIN = {type(None), bool, int, float, str}
_ERRORS: dict[str, type[BatchingError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BatchingError)
}


def to_json(value: object) -> bytes:
    """Raises `TypeError` for a value that is none of the planner's."""
    return _encode(_plain(value)).encode()


def from_json(data: bytes, **further: object) -> Any:
    """`further`: fields that are written elsewhere. Raises `BadInput` for bytes that `to_json` did not write."""
    try:
        record = json.loads(data)
        if further:
            record.update(further)
        return _value(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"not a record of the planner's: {data[:60]!r} ({error})") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    fields = _FIELDS.get(kind)
    if fields is not None:
        record = {"!": kind.__name__}
        for name, default in fields:
            part = getattr(value, name)
            if part is default:
                continue
            if default == () and type(part) is not tuple:
                part = tuple(part)  # what holds a sequence makes no difference
            if default is dataclasses.MISSING or part != default:
                record[name] = part if type(part) in _PLAIN else _plain(part)
        return record
    if kind is tuple or kind is list:
        # Columns of numbers are long: they are not walked one by one in Python.
        return value if _PLAIN.issuperset(map(type, value)) else [_plain(part) for part in value]
    match value:
        case int() | float() | str():
            return value
        case bytes():
            return {"!": "bytes", "base64": base64.b64encode(value).decode()}
        case Enum():
            return {"!": kind.__name__, "value": value.value}
        case BatchingError():
            return {"!": kind.__name__, "args": [_plain(part) for part in value.args]}
        case _:
            return [_plain(part) for part in value]


def _value(record: Any) -> Any:
    if isinstance(record, list | tuple):
        return tuple(_value(part) for part in record)
    if not isinstance(record, dict):
        return record
    name = record.pop("!")
    if name == "bytes":
        return base64.b64decode(record["base64"])
    if name in _ERRORS:
        return _ERRORS[name](*(_value(part) for part in record["args"]))
    kind = CLASSES[name]
    if issubclass(kind, Enum):
        return kind(record["value"])
    return kind(**{key: _value(part) for key, part in record.items()})
