"""How many workers a service wants: from what waits, what is used, and how long a worker takes to start.

`Scaler.wanted(load)` is asked every second or so and answers with a number. Pure: time is what the load says.

Promises. The answer is never outside [min_workers, max_workers]. It rises at once, but not for a backlog that will be
gone before a new worker could help. It falls by one worker at a time, after the load has asked for fewer for
`settle_s` without a break, and not within `settle_s` of the last change; to zero only when nothing has been asked for
during `idle_s`. So a load that swings around a threshold moves nothing.
"""

from dataclasses import dataclass

from microtome.planner.errors import BadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Raises `BadConfig` naming the value and the limit."""

    min_workers: int = 1
    max_workers: int = 1
    target_wait_s: float = 2.0  # to a new prompt's first token, beyond its own prefill
    target_occupancy: float = 0.85  # of all cells, by sessions and by what waits
    settle_s: float = 30.0  # of a smaller load before a worker goes, and between two that go
    idle_s: float = 300.0  # without any generation before the last worker goes

    def __post_init__(self) -> None:
        if self.min_workers < 0:
            raise BadConfig(f"min_workers {self.min_workers} is below 0")
        if self.max_workers < max(1, self.min_workers):
            raise BadConfig(f"max_workers {self.max_workers} is below {max(1, self.min_workers)}")
        if not 0 < self.target_occupancy <= 1:
            raise BadConfig(f"target_occupancy {self.target_occupancy:g} is not in (0, 1]")
        for name in ("target_wait_s", "settle_s", "idle_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadConfig(f"{name} {getattr(self, name):g} is not 0 or more seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the service has to do, at one moment."""

    at_us: int
    ready: int  # workers that can take work
    starting: int  # workers that have their place and load
    generations: int  # running and waiting, and calls that wait for a first worker
    waiting_tokens: int  # of prompts in line
    cells_used: int  # by sessions, all workers
    cells_per_worker: int  # 0: no worker has ever joined
    sequences_per_worker: int  # 0: no worker has ever joined
    wait_us: int | None  # predicted, for a new prompt behind the line; None: nothing measured, or no worker
    start_us: int | None  # how long a worker took to start, lately; None: none has


class Scaler:
    """Remembers since when the load has asked for fewer. One caller."""

    def __init__(self, config: ScalingConfig, workers: int, at_us: int) -> None:
        self._config = config
        self._wanted = self._within(workers)
        self._fewer_since_us: int | None = None
        self._busy_us = at_us  # when there was last a generation
        self._changed_us = at_us

    @property
    def least(self) -> int:
        """Workers that are kept however little there is to do."""
        return self._config.min_workers

    def wanted(self, load: Load) -> int:
        config = self._config
        if load.generations:
            self._busy_us = load.at_us
        needed = self._within(self._needed(load))
        if needed > self._wanted:
            self._change(needed, load.at_us)
        elif needed == self._wanted:
            self._fewer_since_us = None
        else:
            if self._fewer_since_us is None:
                self._fewer_since_us = load.at_us
            settled_us = load.at_us - max(self._fewer_since_us, self._changed_us)
            # A worker that starts is never sent away: the load it was asked for may be what made the difference.
            if settled_us >= config.settle_s * 1e6 and not load.starting and self._may_fall(load):
                fewer_since_us = self._fewer_since_us
                self._change(self._wanted - 1, load.at_us)
                self._fewer_since_us = fewer_since_us
        return self._wanted

    def _may_fall(self, load: Load) -> bool:
        if self._wanted > 1:
            return True
        return not load.generations and load.at_us - self._busy_us >= self._config.idle_s * 1e6

    def _needed(self, load: Load) -> int:
        if not load.generations:
            return 0
        needed = 1
        if load.cells_per_worker:
            cells = load.cells_used + load.waiting_tokens
            needed = max(needed, _ceil(cells, int(load.cells_per_worker * self._config.target_occupancy) or 1))
        if load.sequences_per_worker:
            needed = max(needed, _ceil(load.generations, load.sequences_per_worker))
        if load.wait_us is not None and load.ready:
            target_us = int(self._config.target_wait_s * 1e6)
            if load.wait_us > max(target_us, load.start_us or 0):
                needed = max(needed, _ceil(load.wait_us * load.ready, max(target_us, 1)))
            elif load.wait_us > target_us:  # the backlog will be gone before a worker has come
                needed = max(needed, self._wanted)
        return needed

    def _within(self, workers: int) -> int:
        return max(self._config.min_workers, min(self._config.max_workers, workers))

    def _change(self, workers: int, at_us: int) -> None:
        self._wanted, self._changed_us, self._fewer_since_us = workers, at_us, None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
