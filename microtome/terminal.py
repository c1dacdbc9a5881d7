"""Text from elsewhere, made fit for a terminal: no control characters, and no more than there is room for."""

import unicodedata
from collections.abc import Iterable

from rich.cells import cell_len, get_character_cell_size

__all__ = ["head", "one_line", "printable", "tail"]


def printable(text: str) -> str:
    """`text` without what could move the cursor, ring or recolour: only newlines and tabs of the controls are kept."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))


def one_line(text: str) -> str:
    """`text` on one line: every run of white space is one blank."""
    return " ".join(printable(text).split())


def tail(line: str, width: int, ellipsis: str = "…") -> str:
    """The end of `line` in at most `width` terminal cells, marked when the beginning is missing."""
    if cell_len(line) <= width:
        return line
    return ellipsis[: max(width, 0)] + _fitting(reversed(line), width - cell_len(ellipsis))[::-1]


def head(line: str, width: int, ellipsis: str = "…") -> str:
    """The beginning of `line` in at most `width` terminal cells, marked when the end is missing."""
    if cell_len(line) <= width:
        return line
    return _fitting(iter(line), width - cell_len(ellipsis)).rstrip() + ellipsis[: max(width, 0)]


def _fitting(characters: Iterable[str], width: int) -> str:
    fitting: list[str] = []
    for character in characters:
        width -= get_character_cell_size(character)
        if width < 0:
            break
        fitting.append(character)
    return "".join(fitting)
