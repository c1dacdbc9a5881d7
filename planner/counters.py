"""Counts what happened, since the start; nothing is decided by it."""

from dataclasses import dataclass

from microtome.planner.types import FinishReason


@dataclass(slots=True)
class Counters:
    """Only grows. `Control` adds to its own; others get copies."""

    generations_started: int = 0  # accepted
    generations_finished: int = 0
    stopped: int = 0
    reached_limit: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # at submission; not among those started
    prompt_tokens: int = 0  # of accepted generations
    output_tokens: int = 0  # delivered
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prefilled_tokens: int = 0  # given tokens that were run: of prompts, and again of what was parked or moved
    overshoot_tokens: int = 0  # decoded after a stop that was not yet known
    parked: int = 0  # times a running generation gave up its cells for another
    moved: int = 0  # times one lost its worker, or left it
    steps: int = 0
    failed_steps: int = 0
    step_us: int = 0  # in steps, all workers
    idle_us: int = 0  # between steps, all workers

    def count_end(self, reason: FinishReason) -> None:
        self.generations_finished += 1
        match reason:
            case FinishReason.STOP:
                self.stopped += 1
            case FinishReason.LENGTH:
                self.reached_limit += 1
            case FinishReason.CANCELLED:
                self.cancelled += 1
            case FinishReason.FAILED:
                self.failed += 1
