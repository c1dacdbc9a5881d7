"""Picks the inputs of the next step: what every policy promises.

A scheduler owns the inputs that wait for one worker. It calls nobody: what it picks or drops it returns, and the caller
deals with it. One thread calls it. It reads ids, kinds, starts and widths, never token values; where K and V live is
`cells`' business. Widths and budgets count tokens.

An input is identified by its session and start. Inputs of one session and kind run in the order in which they were
submitted, a decode and a prefill of one session never in one step. Whatever was accepted comes back exactly once: from
`next_batch`, `more`, `cancel`, `dismiss` or `clear`; an input given back with `put_back` waits again. What `skip`
passes over does not come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from microtome.planner.errors import BadConfig
from microtome.planner.types import Batch, Input, SessionId


class Behind(Enum):
    """What a waiting session waits for, as far as the scheduler decides it."""

    STEP_BUDGET = "step budget"  # others came first, and a step holds only so much
    PRIORITY = "priority"  # a session that came later has a higher priority
    TENANT_SHARE = "tenant share"  # its tenant has had more than others


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands among those that wait with the same kind of input."""

    ahead: int  # sessions that are served before it; 0: it is next
    behind: Behind


class Scheduler(Protocol):
    """Picks the inputs of the next step. See the module for what all policies promise."""

    def admit(self, session: SessionId, *, priority: int = 0, tenant: str = "") -> None:
        """Say how a session's inputs rank, those submitted from now on. A session never admitted has the defaults.

        A policy that does not look at priorities or tenants ignores them. Remembered until `dismiss`.
        """

    def submit(self, inputs: Sequence[Input]) -> bool:
        """Queue inputs, of one session or of several, all or none. False: refused, nothing was queued.

        Refused if one is empty, is a decode of more than one token, is a prefill wider than `max_prefill_tokens`, or
        has the session and start of one that waits. An empty sequence is accepted and does nothing. Never splits an
        input.
        """

    def next_batch(self, max_tokens: int | None = None) -> Batch:
        """Hand out the next step's inputs, each once, in the order to run.

        Decodes first, at most one per session and `max_decodes` in all; then prefill. Within the batch budget, and
        within `max_tokens` if given (the free cells, say). Not empty if something waits, unless `max_tokens` is too
        small for it.
        """

    def more(self, unused: Sequence[tuple[SessionId, int]]) -> Batch:
        """Of the batch handed out last these sessions' tokens need not be run after all: more prefill in their place.

        Within what is left of that batch's budget, in turns as before. May be empty. Nobody is charged for tokens that
        do not run.
        """

    def skip(self, session: SessionId, position: int) -> None:
        """What waits of a session's prefill before `position` need not be run: it waits no more. Its turn stays."""

    def put_back(self, inputs: Sequence[Input]) -> None:
        """Let inputs that were handed out and did not run wait again, ahead of everything, in the order given.

        A whole refused batch, or the inputs of one that found no cell. Of several batches the newest is put back first.
        Never refused; an input that waits already must not be given.
        """

    def cancel(self, session: SessionId) -> list[Input]:
        """Drop and return what still waits of a session, in order.

        An input handed out is the caller's. Unknown: empty.
        """

    def dismiss(self, session: SessionId) -> list[Input]:
        """`cancel`, and forget how the session ranks: it is over."""

    def clear(self) -> list[Input]:
        """Drop and return everything that waits."""

    @property
    def has_work(self) -> bool:
        """True exactly while something waits."""

    @property
    def waiting_tokens(self) -> int:
        """Width of everything that waits."""

    def standing(self, session: SessionId) -> Standing | None:
        """Where a session stands; None if nothing of it waits.

        Costs time in proportion to what waits: not for every step.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a batch may hold. Checks itself: `BadConfig` names both numbers.

    A batch has room for a full set of decodes and one full chunk beside them, or a chunk could wait for ever.
    """

    max_batch_tokens: int = 544
    max_decodes: int = 32
    max_prefill_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_decodes", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} {getattr(self, name)} is below 1")
        if self.max_decodes >= self.max_batch_tokens:
            raise BadConfig(f"max_decodes {self.max_decodes} >= max_batch_tokens {self.max_batch_tokens}")
        if self.max_prefill_tokens > self.max_batch_tokens - self.max_decodes:
            limit = f"max_batch_tokens {self.max_batch_tokens} - max_decodes {self.max_decodes}"
            raise BadConfig(f"max_prefill_tokens {self.max_prefill_tokens} > {limit}")
