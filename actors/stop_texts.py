"""Finds the texts that end a generation, in text that comes piece by piece.

Promises: nothing of a stop is ever shown, and nothing else is held back longer than until it is known not to be the
beginning of one. The stop that is complete first counts; of two that are complete at once, the one that began first. So
the pieces make no difference. One thread at a time.
"""

from collections.abc import Sequence


class StopTexts:
    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: one or more, none of them empty."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """What can be shown by now, and whether a stop is complete: then nothing may be pushed any more."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at = min(found)
            self._held = ""
            return text[:at], True
        shown = len(text) - self._beginning(text)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What was held back: it is no stop after all."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Characters at the end of `text` that a stop may begin with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
