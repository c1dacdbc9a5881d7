"""What an observer may know of a `Control`, as plain values: a snapshot, consistent in itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from microtome.planner.counters import Counters
from microtome.planner.generations import State
from microtome.planner.tenant_counters import TenantCounters
from microtome.planner.types import GenerationId, Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    worker: WorkerId
    incarnation: Incarnation
    draining: bool
    revision: int  # of the settings it was started with
    cells_used: int  # by sessions; those that only the prefix cache holds are not among them
    cells_cached: int  # held by the prefix cache alone
    cells_usable: int
    sessions: int  # with a place on it, idle ones included
    running: int  # sessions with a generation
    steps: int  # settled
    steps_in_flight: int
    step_us: int  # sum over settled steps, on the worker
    idle_us: int  # sum of the gaps between them while work waited, on the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    workers: tuple[WorkerStatus, ...]
    running: int  # generations with a place on a worker
    waiting: int  # generations in line, parked and moved ones included
    sessions: int  # opened by callers
    waiting_tokens: int  # of the transcripts of those in line
    wait_us: int | None  # predicted, to the first token of a short prompt submitted now; None: nothing measured
    counters: Counters
    tenants: Mapping[str, TenantCounters]  # those that the configuration names, and under "" all others together


class Waiting(Enum):
    """Why a generation makes no step."""

    NOTHING = "nothing"  # it runs
    NO_WORKER = "no worker"
    SEQUENCES = "sequences"  # the workers hold as many sessions as they can
    CELLS = "cells"
    STEP_BUDGET = "step budget"
    PRIORITY = "priority"
    TENANT_SHARE = "tenant share"
    OWN_SESSION = "own session"  # the generation before it on its session has a step under way
    SHARED_PROMPT = "shared prompt"  # the first of n completions runs the prompt for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where one generation is.

    `position`: generations that start before it; 0: next, or running. Of one that is not in line yet, which waits for
    its own session or a shared prompt: all that are in line.
    """

    state: State
    position: int
    waits_for: Waiting
    predicted_ttft_us: int | None  # from now; None: no measured cost, or the first token is out
    delivered: int
    worker: WorkerId | None
    prompt_tokens: int
    submitted_us: int
    parked: int  # times it gave up its cells for another
    moved: int  # times it lost its worker, or left it

    @property
    def running(self) -> bool:
        """It has a place on a worker."""
        return self.state is State.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One generation among all that have not ended."""

    generation: GenerationId
    tenant: str
    priority: int
    whereabouts: Whereabouts
