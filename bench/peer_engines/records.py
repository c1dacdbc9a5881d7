"""What an engine did with one request, as every engine's process tells it. Standard library only."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.peer_engines.workload import Asked


@dataclass
class Record:
    """Seconds of the process's monotonic clock. An engine may hand out several tokens at once."""

    submitted_s: float
    times_s: list[float] = field(default_factory=list)  # of each hand-out
    counts: list[int] = field(default_factory=list)  # tokens in it
    tokens: list[int] = field(default_factory=list)  # empty where the engine tells counts only

    def note(self, at_s: float, count: int, tokens: Sequence[int] = ()) -> None:
        if count:
            self.times_s.append(at_s)
            self.counts.append(count)
            self.tokens += tokens


Handed = tuple[int, Sequence[int], bool]  # the request's index, its new tokens, whether it is finished


def step_through(
    requests: Sequence[Asked],
    in_flight: int,
    submit: Callable[[int, Asked], None],
    step: Callable[[], Iterable[Handed]],
) -> list[Record]:
    """Run requests on an engine that is driven by a `step` call; a new one is submitted when one has finished.

    Tokens count as handed out when `step` returns.
    """
    waiting = deque(enumerate(requests))
    records: list[Record] = []
    unfinished = 0
    while waiting or unfinished:
        while waiting and unfinished < in_flight:
            index, asked = waiting.popleft()
            records.append(Record(time.perf_counter()))
            submit(index, asked)
            unfinished += 1
        handed = list(step())
        now_s = time.perf_counter()
        for index, tokens, finished in handed:
            records[index].note(now_s, len(tokens), tokens)
            unfinished -= finished
    return records
