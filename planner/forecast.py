"""When a first token can be expected, from the tokens before it and the worker's measured costs.

A step takes the decodes that run and fills the rest of its budget with prefill, so a prompt behind `ahead` tokens of
prefill needs as many full steps as those tokens and its own fill. No cost measured and no step seen: no forecast.
"""

from microtome.planner.worker_plan import WorkerPlan


def step_us(worker: WorkerPlan, tokens: int) -> int | None:
    """What a step of `tokens` tokens takes: by the cost table, else the mean of the steps seen."""
    if worker.slicer.measured:
        return worker.slicer.cost_ns(tokens) // 1000
    if worker.steps:
        return worker.step_us // worker.steps
    return None


def ttft_us(worker: WorkerPlan, ahead: int, own: int) -> int | None:
    """From now to the first token of a prompt with `own` tokens to prefill, `ahead` tokens of others going first."""
    budget = worker.limits.max_batch_tokens
    decodes = min(worker.running, worker.limits.max_decodes)
    prefill = budget - decodes
    full_steps, rest = divmod(worker.undone_tokens + ahead + own, prefill)
    full = step_us(worker, budget)
    last = step_us(worker, decodes + rest) if rest else 0
    if full is None or last is None:
        return None
    return (full_steps + len(worker.in_flight)) * full + last
