"""Where the time of a start goes: named stages in seconds, in order. Each is logged when it ends."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("microtome.runtime")


class StartUp:
    """A stage inside another is its own: the outer one counts what is left."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner_s = [0.0]

    @contextmanager
    def stage(self, name: str, says: str = "", *, compiles: bool = False) -> Iterator[None]:
        """`says`: what is logged when it begins, for who waits. `compiles`: it takes minutes, as only compiling may."""
        _log.info("%s …", says or name, extra={"stage": says or name, "compiles": compiles})
        started_s = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            whole_s = time.perf_counter() - started_s
            own_s = whole_s - self._inner_s.pop()
            self._inner_s[-1] += whole_s
            self.seconds[name] = self.seconds.get(name, 0.0) + own_s
            _log.info("%s: %.1f s", name, own_s)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
