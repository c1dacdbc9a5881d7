"""Texts of a generation's completions on one output, as they come, one behind the other.

The first completion that has not ended is written as its text comes; what comes of later ones is kept until it is
their turn. Of several each begins with a line that counts it. Knows no channel: it is told what came.
"""

from collections.abc import Callable

from microtome.answers import Update

__all__ = ["TextPrinter"]


class TextPrinter:
    def __init__(self, n: int, write: Callable[[str], None]) -> None:
        """`n` completions are to come. `write` puts text out at once."""
        self._n = n
        self._write = write
        self._turn = 0  # the completion that is being written
        self._kept: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._open_line = False
        self._headed = False

    def add(self, update: Update) -> None:
        self._kept.setdefault(update.index, []).append(update.text)
        if update.finish_reason is not None:
            self._ended.add(update.index)
        while self._turn < self._n:
            self._put("".join(self._kept.pop(self._turn, [])))
            if self._turn not in self._ended:
                return
            self._head()  # of one without any text, too
            self._turn += 1
            if self._turn < self._n:
                self.end_line()
            self._headed = False

    def end_line(self) -> None:
        """What is written next begins a line."""
        if self._open_line:
            self._write("\n")
            self._open_line = False

    def _put(self, text: str) -> None:
        if text:
            self._head()
            self._write(text)
            self._open_line = not text.endswith("\n")

    def _head(self) -> None:
        if self._n > 1 and not self._headed:
            self._write(f"[{self._turn + 1} of {self._n}]\n")
        self._headed = True
