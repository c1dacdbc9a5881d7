"""Runs plans on one executor, behind the fence. Everything here happens on the step thread.

A plan ends in one of three ways: a result; a refusal, with nothing touched; or a failure, after which the device's
state is unknown, nothing more is run, and the process has to end (`failure` says why).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from microtome.actors.last_words import LastWords
from microtome.actors.wire import Snapshot, StepFault
from microtome.planner.errors import BatchingError, Refused
from microtome.planner.fence import StepFence
from microtome.planner.protocols import Executor
from microtome.planner.types import Capability, StepPlan, StepResult

logger = logging.getLogger(__name__)


class StepRunner:
    """`kept_results`: how many of the newest answer a repeat. `now_ns`: a monotonic clock.

    `words` are kept up to date, so that a process that dies in a step has said so.
    """

    def __init__(
        self,
        executor: Executor,
        kept_results: int,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        words: LastWords | None = None,
    ) -> None:
        self._executor = executor
        self._capability = executor.describe()
        self._fence = StepFence(self._capability.incarnation, self._capability.table.digest, kept_results)
        self._now_ns = now_ns
        self._words = words
        self._result_ns: int | None = None  # when the newest result was there
        self._failure: str | None = None

    @property
    def capability(self) -> Capability:
        return self._capability

    @property
    def failure(self) -> str | None:
        """Why the device's state is unknown; None while it is known."""
        return self._failure

    def run(self, plan: StepPlan) -> StepResult | StepFault:
        """`step_us` and `idle_us` of the result are measured here; idle counts from the step before's result."""
        try:
            repeated = self._fence.check(plan)
            if repeated is not None:
                return repeated
            if self._words is not None:
                self._words.began(plan.step)
            started_ns = self._now_ns()
            result = self._executor.run(plan)
        except Refused as error:
            logger.warning("step refused step=%d cause=%r", plan.step, str(error))
            if self._words is not None:
                self._words.ended(self._fence.last_step)
            return StepFault(incarnation=plan.incarnation, step=plan.step, refused=True, message=str(error))
        except BaseException as error:  # one that calls `sys.exit` must not end this thread, and only this thread
            return self._failed(plan, error)
        ended_ns = self._now_ns()
        if self._words is not None:
            self._words.ended(plan.step)
        idle_ns = 0 if self._result_ns is None else started_ns - self._result_ns
        self._result_ns = ended_ns
        result = replace(result, step_us=(ended_ns - started_ns) // 1000, idle_us=idle_ns // 1000)
        self._fence.done(result)
        return result

    def snapshot(self) -> Snapshot:
        return Snapshot(
            incarnation=self._capability.incarnation,
            last_step=self._fence.last_step,
            sequences=self._executor.snapshot(),
        )

    def probe(self) -> bool:
        """Does the device answer? False, once, makes it a failure."""
        if self._failure is None:
            try:
                self._executor.probe()
            except BaseException as error:
                logger.exception("probe failed")
                self._close(f"an idle probe failed: {_sentence(error)}")
        return self._failure is None

    def _failed(self, plan: StepPlan, error: BaseException) -> StepFault:
        logger.exception("step failed step=%d", plan.step)
        self._close(f"step {plan.step} failed: {_sentence(error)}")
        return StepFault(incarnation=plan.incarnation, step=plan.step, refused=False, message=_sentence(error))

    def _close(self, cause: str) -> None:
        self._failure = cause
        self._fence.close(cause)


def _sentence(error: BaseException) -> str:
    """One line, with the kind of error unless it is ours: device errors come with pages of advice."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    if not text:
        return kind
    text = text if isinstance(error, BatchingError) else f"{kind}: {text}"
    return text if len(text) <= 500 else text[:499] + "…"
