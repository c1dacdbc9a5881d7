"""What is wrong with a worker's answer, if anything."""

from microtome.planner.types import StepResult
from microtome.planner.worker_plan import Step, WorkerPlan


def fault_of(result: StepResult, step: Step, w: WorkerPlan) -> str | None:
    """In one sentence; None: it is sound. Checked as if the worker were wrong (D15, H9)."""
    if result.step != step.number:
        return f"step {result.step} was answered where step {step.number} was due"
    if w.refusing:
        return f"step {result.step} was run behind a refused one"
    if len(result.tokens) != step.outputs:
        return f"step {result.step} was answered with {len(result.tokens)} tokens, {step.outputs} were asked for"
    if result.logprobs and len(result.logprobs) != step.outputs:
        return f"step {result.step} was answered with {len(result.logprobs)} logprobs for {step.outputs} tokens"
    if len(result.prompt_logprobs) != step.prompt_rows:
        asked = f"{step.prompt_rows} were asked for"
        return f"step {result.step} was answered with {len(result.prompt_logprobs)} logprobs of prompts, {asked}"
    if result.tokens and (min(result.tokens) < 0 or max(result.tokens) >= w.capability.vocab_size):
        return f"step {result.step} brought a token that is not below the vocabulary size {w.capability.vocab_size}"
    return None
