"""Virtual time: calls in the order of their times, equal times in the order they were asked for."""

import heapq
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now_us = 0
        self._asked = 0
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._last: dict[str, int] = {}

    def after(self, delay_us: int, call: Callable[[], None]) -> None:
        self._at(self.now_us + delay_us, call)

    def after_in_order(self, channel: str, delay_us: int, call: Callable[[], None]) -> None:
        """Not before anything asked for earlier on the same channel."""
        at_us = max(self.now_us + delay_us, self._last.get(channel, 0))
        self._last[channel] = at_us
        self._at(at_us, call)

    def _at(self, at_us: int, call: Callable[[], None]) -> None:
        self._asked += 1
        heapq.heappush(self._calls, (at_us, self._asked, call))

    @property
    def pending(self) -> int:
        return len(self._calls)

    def step(self) -> bool:
        """Make the next call; False: there is none."""
        if not self._calls:
            return False
        self.now_us, _, call = heapq.heappop(self._calls)
        call()
        return True
