"""Sequences of integers as bytes and back, each entry as narrow as their values allow, and what reads such bytes.

A column is its entries' width, how many there are, and the entries, little-endian. Width 9 stands for floats of eight
bytes. `Reader` reads bytes from front to back; it raises `struct.error` or `IndexError` where they end too early.
"""

from collections.abc import Sequence
from struct import Struct, error, pack, unpack_from
from typing import Any

from microtome.planner.types import TokenLogprobs

_COLUMN = Struct("<BI")  # bytes of each entry, entries
_TEXT = Struct("<I")  # length
_FLOAT = 9
_CODES = {1: "B", 2: "H", 4: "I", 8: "q", _FLOAT: "d"}
_WIDER = {1: 2, 2: 4, 4: 8}


def column(values: Sequence[int], width: int = 1) -> bytes:
    """Entries of `width` bytes at least. Raises `struct.error` for an integer beyond 64 bits, signed.

    The first byte is the width it took: who writes the next column of its kind may ask for it, and saves the search.
    """
    if type(values) is not list and type(values) is not tuple:
        values = list(values)
    count = len(values)
    if count and width < 4:
        # What the ends need is known at once; what those between need, when it does not fit.
        ends = values[0] if values[0] > values[-1] else values[-1]
        if ends > 255:
            width = 4 if ends > 65535 else 2
    while True:
        try:
            if width == 1:
                return _COLUMN.pack(1, count) + bytes(values)
            return _COLUMN.pack(width, count) + pack(f"<{count}{_CODES[width]}", *values)
        except (error, ValueError):
            if width == 8:
                raise
            width = _WIDER[width]


def floats(values: Sequence[float]) -> bytes:
    return _COLUMN.pack(_FLOAT, len(values)) + pack(f"<{len(values)}d", *values)


def text(data: bytes) -> bytes:
    """Bytes behind their length."""
    return _TEXT.pack(len(data)) + data


def logprob_columns(logprobs: Sequence[TokenLogprobs | None]) -> list[bytes]:
    """Per token 0 for None or 1 and how many are beside it; all numbers; the tokens beside."""
    known = [one for one in logprobs if one is not None]
    return [
        column([0 if one is None else 1 + len(one.top) for one in logprobs]),
        floats([number for one in known for number in (one.logprob, *[logprob for _, logprob in one.top])]),
        column([token for one in known for token, _ in one.top]),
    ]


class Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def at(self) -> int:
        """Bytes read so far."""
        return self._at

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def numbers(self, kind: Struct) -> tuple[Any, ...]:
        begin = self._at
        self._at = begin + kind.size
        return kind.unpack_from(self._data, begin)

    def byte(self) -> int:
        """The next byte; it stays to be read."""
        return self._data[self._at]

    def skip(self) -> None:
        self._at += 1

    def take(self, count: int) -> bytes:
        begin = self._at
        self._at = begin + count
        if self._at > len(self._data):
            raise IndexError(f"{count} bytes at {begin} of {len(self._data)}")
        return self._data[begin : self._at]

    def text(self) -> bytes:
        return self.take(*self.numbers(_TEXT))

    def column(self) -> list[Any]:
        width, count = self.numbers(_COLUMN)
        begin = self._at
        self._at = begin + count * (8 if width == _FLOAT else width)
        if width == 1:
            return list(self._data[begin : self._at]) if self._at <= len(self._data) else self._short()
        return list(unpack_from(f"<{count}{_CODES[width]}", self._data, begin))

    def logprobs(self) -> list[TokenLogprobs | None]:
        counts, numbers, tokens = self.column(), iter(self.column()), iter(self.column())
        return [
            TokenLogprobs(next(numbers), tuple([(next(tokens), next(numbers)) for _ in range(count - 1)]))
            if count
            else None
            for count in counts
        ]

    def _short(self) -> list[int]:
        raise IndexError(f"a column ends at {self._at} of {len(self._data)} bytes")
