"""Is a step finishing? Healthy means: a step, or an idle probe, finished within a given time.

No clock of its own: times are seconds of one monotonic clock, handed in. One thread calls it.
"""


class StepHealth:
    def __init__(self, within_s: float, now_s: float) -> None:
        self._within_s = within_s
        self._finished_s = now_s
        self._probing = False

    def finished(self, at_s: float) -> None:
        """A step finished."""
        self._finished_s = max(self._finished_s, at_s)

    def probed(self, at_s: float) -> None:
        """The probe that `wants_probe` asked for finished."""
        self._probing = False
        self.finished(at_s)

    def wants_probe(self, now_s: float) -> bool:
        """True once per probe: when nothing has finished for a third of the time. The caller runs it."""
        if self._probing or now_s - self._finished_s < self._within_s / 3:
            return False
        self._probing = True
        return True

    def serving(self, now_s: float) -> bool:
        return now_s - self._finished_s <= self._within_s
