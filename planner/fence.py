"""`StepFence`: which plans one incarnation of a worker may run, and what it answers instead.

Owns the number of the newest step that ran, and the plans and results of the newest few. One thread calls it, around
each run: `check`, then the run, then `done`. It touches no device; a refusal changes nothing.

Promises: a plan for another incarnation or another method table never runs; steps run in the order of their numbers,
each once; a plan sent again, because its answer may have been lost, is answered from the stored result. How many
results are kept is how many steps the driver may have unanswered: older repeats are refused, for nobody waits for them.
"""

from collections import deque

from microtome.planner.errors import StalePlan
from microtome.planner.types import Incarnation, StepNumber, StepPlan, StepResult

_COLUMNS = (
    "sequences",
    "starts",
    "widths",
    "flags",
    "cells",
    "tokens",
    "slice_offsets",
    "slice_lengths",
    "slice_methods",
)


class StepFence:
    """`kept`: how many of the newest results answer a repeat; 1 or more."""

    def __init__(self, incarnation: Incarnation, table_digest: int, kept: int = 1) -> None:
        assert kept >= 1
        self._incarnation = incarnation
        self._table_digest = table_digest
        self._last_step = StepNumber(0)
        self._answered: deque[tuple[StepPlan, StepResult]] = deque(maxlen=kept)  # oldest first
        self._admitted: StepPlan | None = None  # checked, its result not in yet
        self._closed: str | None = None

    @property
    def last_step(self) -> StepNumber:
        """The newest step that ran; 0: none has."""
        return self._last_step

    def check(self, plan: StepPlan) -> StepResult | None:
        """None: run it, then call `done`. A result: the plan has run already, answer with this.

        Raises `StalePlan` naming both sides' value, with nothing changed.
        """
        if plan.incarnation != self._incarnation:
            raise StalePlan(f"the plan is for incarnation {plan.incarnation or 'none'}, this is {self._incarnation}")
        if plan.table_digest != self._table_digest:
            raise StalePlan(f"the plan is for method table {plan.table_digest:#x}, this is {self._table_digest:#x}")
        if self._closed is not None:
            raise StalePlan(f"step {plan.step} comes after the end of this incarnation: {self._closed}")
        if plan.step == self._last_step + 1:
            self._admitted = plan
            return None
        for answered, result in self._answered:
            if answered.step == plan.step:
                if not _same(answered, plan):
                    raise StalePlan(f"step {plan.step} has run already, with another plan")
                return result
        newest = f"the newest that ran is {self._last_step}"
        if plan.step > self._last_step:
            raise StalePlan(f"step {plan.step} skips ahead, {newest}")
        raise StalePlan(f"step {plan.step} is too old to be repeated, {newest}")

    def done(self, result: StepResult) -> None:
        """The plan that `check` let through has run, with this result."""
        assert self._admitted is not None
        assert result.step == self._admitted.step == self._last_step + 1
        self._answered.append((self._admitted, result))
        self._last_step, self._admitted = self._admitted.step, None

    def close(self, cause: str) -> None:
        """The device's state is unknown: refuse every plan from now on, repeats included."""
        self._closed = cause


def _same(a: StepPlan, b: StepPlan) -> bool:
    """Equal in every number, whatever sequence type holds them."""
    return a.ops == b.ops and all(list(getattr(a, column)) == list(getattr(b, column)) for column in _COLUMNS)
