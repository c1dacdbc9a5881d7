"""The seam between planning and computing: what a real executor and a fake both promise."""

from typing import Protocol

from microtome.planner.types import Capability, SequenceSnapshot, StepPlan, StepResult


class Executor(Protocol):
    """Owns the bytes of one device. One thread calls it, one call at a time.

    It applies a plan's operations, runs its slices in order, and samples. A forward writes its tokens' cells before any
    of them reads: what an earlier input of a step writes, a later one may read. It trusts cells and sequences to be the
    planner's business, and checks what is cheap: counts, ranges, vocabulary, tiling.
    """

    def describe(self) -> Capability:
        """What this device is and can do. Constant for the executor's life."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises `StalePlan` with nothing touched, or `StepError` with the device's state unknown."""

    def snapshot(self) -> tuple[SequenceSnapshot, ...]:
        """Every live sequence, as of the last step run."""

    def probe(self) -> None:
        """Make the device do the least it can and wait for it; changes nothing. Raises `StepError` when it fails."""
