"""Log-probabilities of a run of tokens, packed: four bytes a number, where objects of Python's would take fifty.

Owns its columns. Entries are put behind the last one, and forgotten at either end. Indices count from the first.
"""

from array import array
from collections.abc import Iterable, Sequence

from microtome.planner.types import TokenLogprobs


class PackedLogprobs:
    __slots__ = ("_ends", "_known", "_own", "_tokens", "_values")

    def __init__(self) -> None:
        self._known = bytearray()  # per token: 1 where anything is known of it
        self._own = array("f")  # per token
        self._ends = array("I")  # per token: where its likeliest end in the columns below
        self._tokens = array("I")
        self._values = array("f")

    def __len__(self) -> int:
        return len(self._known)

    @property
    def numbers(self) -> int:
        """What is held, in numbers."""
        return 2 * (len(self._own) + len(self._tokens))

    def extend(self, logprobs: Iterable[TokenLogprobs | None]) -> None:
        for one in logprobs:
            self._known.append(one is not None)
            self._own.append(0.0 if one is None else one.logprob)
            if one is not None:
                self._tokens.extend([token for token, _ in one.top])
                self._values.extend([value for _, value in one.top])
            self._ends.append(len(self._tokens))

    def columns(self, begin: int, end: int) -> tuple[Sequence[int], Sequence[float], Sequence[int], Sequence[float]]:
        """Of the entries in [begin, end): per token 0, or 1 and its likeliest; own of those known; tokens; theirs."""
        first = self._begin_of(begin)
        ends, known = self._ends[begin:end], self._known[begin:end]
        last = ends[-1] if ends else first
        counts = []
        before = first
        for at, is_known in zip(ends, known, strict=True):
            counts.append(1 + at - before if is_known else 0)
            before = at
        own = [value for value, is_known in zip(self._own[begin:end], known, strict=True) if is_known]
        return counts, own, self._tokens[first:last], self._values[first:last]

    def entries(self, begin: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        found: list[TokenLogprobs | None] = []
        for at in range(begin, min(end, len(self))):
            first, last = self._begin_of(at), self._ends[at]
            top = tuple(zip(self._tokens[first:last], self._values[first:last], strict=True))
            found.append(TokenLogprobs(self._own[at], top) if self._known[at] else None)
        return tuple(found)

    def cut(self, length: int) -> None:
        """Keep the first `length`."""
        if length < len(self):
            beside = self._begin_of(length)
            for column, kept in ((self._known, length), (self._own, length), (self._ends, length)):
                del column[kept:]
            del self._tokens[beside:]
            del self._values[beside:]

    def forget(self, count: int) -> None:
        """Drop the first `count`."""
        beside = self._begin_of(count)
        del self._known[:count]
        del self._own[:count]
        self._ends = array("I", [end - beside for end in self._ends[count:]])
        del self._tokens[:beside]
        del self._values[:beside]

    def _begin_of(self, at: int) -> int:
        return self._ends[at - 1] if at else 0
