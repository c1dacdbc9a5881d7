"""How dataclasses that are written often become bytes: numbers in a struct, and little else when little is new.

A layout is made from a dataclass's own fields, those of the dataclasses in it included, so one that is added later is
carried without a word here. It describes itself in plain values: who reads bytes makes the layout from the description
that was written with them, and gives fields that it lacks their defaults. Each field is in one of four groups:

- `own`: integers, booleans and floats that differ in each value, at a fixed place;
- `steady`: those that mostly are as in the value before, all of them or none written;
- `fresh`: text and columns that differ in each value;
- `kept`: the rest, each written where it is not what it was in the value before. What may hold a float, or is a class
  of its own, is written as JSON where it is not the default.

Values come back equal, of the types that the dataclass declares: a sequence as a tuple, a whole number in a float's
place as a float, and a value that equals the one before it (0.0 and -0.0 do) as that one.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from struct import Struct, error
from typing import Any

from microtome.planner.columns import Reader, column, logprob_columns, text
from microtome.planner.errors import BadInput
from microtome.planner.records import CLASSES, from_json, to_json
from microtome.planner.types import TokenLogprobs

Fields = tuple[tuple[str, str], ...]  # of a group: path, form
Description = tuple[str, Fields, Fields, Fields, Fields]  # class, own, steady, fresh, kept
Memory = dict[str, tuple[tuple[Any, ...] | None, tuple[Any, ...]]]  # by class, of the last one: steady numbers, kept

_NUMBERS = {int: "q", bool: "?", float: "d"}
_NUMBER_FORMS = {"q", "Q", "?", "d"}
_UNSIGNED = {"seed"}  # fields that use all 64 bits
_OPTIONAL = Struct("<?q")
_MASK = Struct("<H")  # bit 0: steady numbers are written; then one bit per kept field
_NOTHING_NEW = _MASK.pack(0)
_ABSENT: Any = object()  # before the first value; and the default of a field that has none
Tree = list[tuple[str, "str | tuple[type, Tree]"]]  # per field of a class: the path of its value, or the class in it


class Layout:
    """One dataclass's. Raises `BadInput` for a description that does not fit the class."""

    def __init__(self, kind: type, description: Description) -> None:
        self.kind = kind
        self.description = description
        name, own, steady, fresh, kept = description
        self._name = name
        self._paths = [path for path, _ in (*own, *steady, *fresh, *kept)]
        defaults = {path: default for path, _, default in _leaves(kind)}
        if len(kept) > 15:
            raise BadInput(f"{name} has {len(kept)} kept fields: 15 at most have a bit")
        unknown = sorted(set(self._paths) - set(defaults))
        if unknown:
            raise BadInput(f"it holds {name}.{unknown[0]}, which this version does not know")
        if not {form for _, form in (*own, *steady)} <= _NUMBER_FORMS:
            raise ValueError(f"numbers of forms {[form for _, form in (*own, *steady)]}")
        self._own = Struct("<" + "".join(form for _, form in own))
        self._steady = Struct("<" + "".join(form for _, form in steady))
        self._fresh_forms = [_form(form) for _, form in fresh]
        self._kept_forms = [_form(form) for _, form in kept]
        self._forgotten = [(k, defaults[path]) for k, (path, form) in enumerate(kept) if form in ("value", "logprobs")]
        self._first = (None, self._remembered((_ABSENT,) * len(kept)))
        self._remembers = bool(steady or kept)
        self._take: Callable[[Any], Any] = _may_not_write
        self._tree = _tree(kind, self._paths)

    def can_write(self) -> None:
        """For one that was made from a class; never for a description from a file, which becomes source text here."""
        _, own, steady, fresh, kept = self.description
        self._take = _taker(self._own, own, steady, kept, fresh)

    def encode(self, value: Any, memory: Memory) -> bytes | None:
        """None for a value that does not fit, such as an integer of more than 64 bits: nothing is remembered of it."""
        try:
            own, steady, kept, fresh = self._take(value)
            if not self._remembers:
                return own + fresh  # type: ignore[no-any-return]
            steady_before, kept_before = memory.get(self._name, self._first)
            if steady == steady_before and kept == kept_before:
                return own + _NOTHING_NEW + fresh  # type: ignore[no-any-return]
            mask, pieces = 0, [fresh]
            if steady != steady_before:
                mask = 1
                pieces.append(self._steady.pack(*steady))
            for k, (part, before) in enumerate(zip(kept, kept_before, strict=True)):
                if part != before:
                    mask |= 2 << k
                    pieces.append(self._kept_forms[k][0](part))
        except (error, OverflowError, UnicodeEncodeError):
            return None
        memory[self._name] = (steady, self._remembered(kept))
        return b"".join([own, _MASK.pack(mask), *pieces])

    def decode(self, r: Reader, memory: Memory) -> Any:
        values = [*r.numbers(self._own)]
        (mask,) = r.numbers(_MASK) if self._remembers else (0,)
        steady, kept_before = memory.get(self._name, self._first)
        fresh = [read(r) for _, read in self._fresh_forms]
        if mask & 1:
            steady = r.numbers(self._steady)
        kept = tuple([read(r) if mask & (2 << k) else kept_before[k] for k, (_, read) in enumerate(self._kept_forms)])
        if mask:
            memory[self._name] = (steady, self._remembered(kept))
        return _built(
            self.kind, self._tree, dict(zip(self._paths, [*values, *(steady or ()), *fresh, *kept], strict=True))
        )

    def _remembered(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `part == before` may take long for, or may not tell, is compared with its default each time."""
        if not self._forgotten:
            return kept
        remembered = list(kept)
        for k, default in self._forgotten:
            remembered[k] = default
        return tuple(remembered)


def layout(kind: type, *, own: Sequence[str] = (), fresh: Sequence[str] = ()) -> Layout:
    """A class's layout, from its fields. `own`: numbers of dataclasses inside it that differ in each value."""
    groups: dict[str, list[tuple[str, str]]] = {"own": [], "steady": [], "fresh": [], "kept": []}
    for path, form, _ in _leaves(kind):
        if path in fresh:
            group = "fresh"
        elif form in _NUMBER_FORMS:
            group = "steady" if "." in path and path not in own else "own"
        else:
            group = "kept"
        groups[group].append((path, form))
    made = Layout(kind, (kind.__name__, *(tuple(fields) for fields in groups.values())))  # type: ignore[arg-type]
    made.can_write()
    return made


LOGPROBS_HAVE_COLUMNS = [one.name for one in dataclasses.fields(TokenLogprobs)] == ["logprob", "top"]  # all of them


class Rest:
    """The fields of a class beside those that its writer knows: ones that were added later."""

    def __init__(self, kind: type, *known: str) -> None:
        fields = [one for one in dataclasses.fields(kind) if one.init and one.name not in known]
        self._defaults = [(one.name, _default(one)) for one in fields]
        self.none = not fields

    def of(self, value: object) -> bytes:
        """Those that are not their defaults; empty for none. Raises `TypeError` for what is none of the planner's."""
        if self.none:
            return b""
        new = tuple((name, getattr(value, name)) for name, default in self._defaults if getattr(value, name) != default)
        return to_json(new) if new else b""

    @staticmethod
    def read(data: bytes) -> dict[str, Any]:
        """By name, for a constructor; of nothing: nothing."""
        return dict(from_json(data)) if data else {}


# --- fields ---


def _default(one: "dataclasses.Field[Any]") -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return _ABSENT if one.default is dataclasses.MISSING else one.default


def _leaves(kind: type, prefix: str = "") -> list[tuple[str, str, Any]]:
    """Path, form and default of every field, in order; those of a dataclass in it instead of it."""
    hints = typing.get_type_hints(kind)
    leaves: list[tuple[str, str, Any]] = []
    for one in dataclasses.fields(kind):
        if not one.init:
            continue
        hint = _plain(hints[one.name])
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            leaves += _leaves(hint, f"{prefix}{one.name}.")
        else:
            leaves.append((prefix + one.name, _form_of(hint, one.name), _default(one)))
    return leaves


def _plain(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def _form_of(hint: Any, name: str) -> str:
    if hint in _NUMBERS:
        return "Q" if name in _UNSIGNED else _NUMBERS[hint]
    if hint is str:
        return "text"
    if hint is bytes:
        return "bytes"
    origin, arguments = typing.get_origin(hint), tuple(map(_plain, typing.get_args(hint)))
    if origin is tuple and arguments == (TokenLogprobs | None, Ellipsis) and LOGPROBS_HAVE_COLUMNS:
        return "logprobs"
    if origin in (tuple, Sequence) and arguments[0] is int and arguments[1:] in ((), (Ellipsis,)):
        return "column"
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is types.NoneType:
        inner = arguments[0]
        if inner is int:
            return "number or none"
        if isinstance(inner, type) and issubclass(inner, Enum):
            return "plain value"
        if dataclasses.is_dataclass(inner) and all(_plain(h) is int for h in typing.get_type_hints(inner).values()):
            names = [one.name for one in dataclasses.fields(inner) if one.init]
            return " ".join(["numbers of", getattr(inner, "__name__", ""), *names])
        if _form_of(inner, name) == "column":
            return "plain value"
    return "value"


def _may_not_write(value: Any) -> Any:
    raise TypeError(f"a layout that was read writes nothing: {type(value).__name__}")


def _taker(packer: Struct, own: Fields, steady: Fields, kept: Fields, fresh: Fields) -> Callable[[Any], Any]:
    """What takes a value apart: its own numbers and its fresh fields as bytes, and the other two groups as tuples.

    It is made from source text, as dataclasses make their methods: this runs for every event, and getters by name take
    four times as long.
    """
    names: dict[str, Any] = {"pack": packer.pack}
    written = ['b""']
    for number, (path, form) in enumerate(fresh):
        names[f"write_{number}"] = _form(form)[0]
        written.append(f"write_{number}(value.{path})")
    tuples = ["".join(f"value.{path}, " for path, _ in fields) for fields in (own, steady, kept)]
    source = f"lambda value: (pack({tuples[0]}), ({tuples[1]}), ({tuples[2]}), {' + '.join(written[1:] or written)})"
    taker: Callable[[Any], Any] = eval(source, names)
    return taker


def _tree(kind: type, paths: Sequence[str], prefix: str = "") -> Tree:
    hints = typing.get_type_hints(kind)
    tree: Tree = []
    for one in dataclasses.fields(kind):
        path = prefix + one.name
        if path in paths:
            tree.append((one.name, path))
        elif any(other.startswith(path + ".") for other in paths):
            inner = _plain(hints[one.name])
            tree.append((one.name, (inner, _tree(inner, paths, path + "."))))
    return tree


def _built(kind: type, tree: Tree, values: dict[str, Any]) -> Any:
    return kind(**{name: values[of] if isinstance(of, str) else _built(of[0], of[1], values) for name, of in tree})


# --- how they are written ---

Form = tuple[Callable[[Any], bytes], Callable[[Reader], Any]]


def _write_text(value: str) -> bytes:
    return text(value.encode())


def _write_optional(value: int | None) -> bytes:
    return _OPTIONAL.pack(value is not None, value or 0)


def _read_optional(r: Reader) -> int | None:
    there, value = r.numbers(_OPTIONAL)
    return value if there else None


def _write_value(value: Any) -> bytes:
    return text(to_json(value))


_FORMS: dict[str, Form] = {
    "text": (_write_text, lambda r: r.text().decode()),
    "bytes": (text, Reader.text),
    "column": (column, lambda r: tuple(r.column())),
    "logprobs": (lambda logprobs: b"".join(logprob_columns(logprobs)), lambda r: tuple(r.logprobs())),
    "number or none": (_write_optional, _read_optional),
    "plain value": (_write_value, lambda r: from_json(r.text())),
    "value": (_write_value, lambda r: from_json(r.text())),
}


def _form(name: str) -> Form:
    if name.startswith("numbers of "):
        return _numbers_of(*name.split(" ")[2:])
    return _FORMS[name]


def _numbers_of(kind: str, *names: str) -> Form:
    """An optional dataclass of integers."""
    if unknown := set(names) - {one.name for one in dataclasses.fields(CLASSES[kind])}:
        raise ValueError(f"{kind} has no {sorted(unknown)}")
    numbers = Struct("<" + "q" * len(names))
    take = attrgetter(*names)

    def write(value: Any) -> bytes:
        return b"\0" if value is None else b"\1" + numbers.pack(*(take(value) if len(names) > 1 else (take(value),)))

    def read(r: Reader) -> Any:
        there = r.byte()
        r.skip()
        return CLASSES[kind](**dict(zip(names, r.numbers(numbers), strict=True))) if there else None

    return write, read
