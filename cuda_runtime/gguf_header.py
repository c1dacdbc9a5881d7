"""What a GGUF file says of itself, from its first bytes: numbers and texts by key, and the names of its tensors.

Reads nothing else: no list's values, no weight. That takes milliseconds where the library's reader, which unpacks
every list, takes many seconds; so what cannot serve is refused at once. Layout: the GGUF specification, versions 2
and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    fields: Mapping[str, int | float | bool | str]  # lists are left out
    tensors: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises `OSError`, or `ValueError` with a few words, for a file that ends early or is none of the two versions."""
    with path.open("rb") as stream:
        magic = stream.read(4)
        if magic != MAGIC:
            raise ValueError(f"it starts with {magic!r}, not {MAGIC!r}")
        version = _number(stream, "I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, not 2 or 3")
        tensors, fields = int(_number(stream, "Q")), int(_number(stream, "Q"))
        found: dict[str, int | float | bool | str] = {}
        for _ in range(fields):
            key, kind = _text(stream), int(_number(stream, "I"))
            if kind == _ARRAY:
                _skip_array(stream)
            else:
                found[key] = _text(stream) if kind == _STRING else _number(stream, _format(kind))
        names = []
        for _ in range(tensors):
            names.append(_text(stream))
            dimensions = int(_number(stream, "I"))
            _read(stream, dimensions * 8 + 4 + 8)  # its shape, type and offset
        return GgufHeader(found, tuple(names))


def _skip_array(stream: BinaryIO) -> None:
    kind, count = int(_number(stream, "I")), int(_number(stream, "Q"))
    if kind == _ARRAY:
        for _ in range(count):
            _skip_array(stream)
    elif kind == _STRING:
        for _ in range(count):
            _read(stream, int(_number(stream, "Q")))
    else:
        _read(stream, count * struct.calcsize("<" + _format(kind)))


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it holds a value of kind {kind}, which is none of the format's")
    return _NUMBERS[kind]


def _number(stream: BinaryIO, form: str) -> int | float | bool:
    value: int | float | bool = struct.unpack("<" + form, _read(stream, struct.calcsize("<" + form)))[0]
    return value


def _text(stream: BinaryIO) -> str:
    return _read(stream, int(_number(stream, "Q"))).decode("utf-8", errors="replace")


def _read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count) if count < 1 << 30 else b""  # no header is a gigabyte: such a length is damage
    if len(data) != count:
        raise ValueError("it ends before its header does")
    return data
