"""Which worker a generation starts on.

A session with cells on a worker stays there (X8), and so does one of n completions whose leader's prompt it clones. Any
other goes where its first token is nearest: the worker with the fewest tokens to prefill before it, its own uncached
ones included, each running session counted as one token. Equal scores prefer fewer cells in use, then the worker that
joined first, so equal states give equal answers. A lookup costs the matched prefix on each worker.
"""

from collections.abc import Iterable

from microtome.planner.generations import Generation
from microtome.planner.worker_plan import WorkerPlan


def can_hold(worker: WorkerPlan, generation: Generation) -> bool:
    """Whether the generation fits there to its last token, with nobody beside it."""
    return generation.generated_from + generation.limit <= worker.max_session_tokens


def by_preference(generation: Generation, workers: Iterable[WorkerPlan]) -> list[WorkerPlan]:
    """Those of `workers` that could hold the generation, best first."""
    session = generation.session
    able = [w for w in workers if can_hold(w, generation)]
    home = session.resident
    leader = generation.leader.session.resident if generation.leader and not generation.delivered else None
    if home is None and leader is not None:
        home = leader
    if home is not None:
        bound = [w for w in able if w.id == home.worker]
        if bound or session.resident is not None:
            return bound
    if len(able) < 2:
        return able

    def score(w: WorkerPlan) -> tuple[int, int]:
        own = len(session.transcript) - w.cached_tokens(session)
        return own + w.undone_tokens + w.running, w.table.used_cells - w.cells_cached

    return sorted(able, key=score)
