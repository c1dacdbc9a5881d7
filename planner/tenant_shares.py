"""How much each tenant has been served, and so whose turn it is.

A tenant's level grows by the tokens served to it, divided by its weight; the tenant with the lowest level goes first.
So of tenants that keep asking, each gets tokens in proportion to its weight, and one that floods waits for itself
alone. Idleness earns little: who comes new starts where the least served of the latest step stands, and nobody falls
behind that mark by more than a fixed credit, which lets a tenant pause while its token is under way.

Levels are integers; UNIT of them is one token at weight 1. A tenant that is gone is forgotten when it owes nothing.
Source of the rule: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from microtome.planner.errors import BadConfig

UNIT = 1 << 20
_STEPS_UNTIL_GONE = 16
_KEPT_AT_LEAST = 64  # tenants below which forgetting is not worth the look


@dataclass(slots=True)
class _Tenant:
    level: int
    order: int  # of arrival; settles equal levels
    per_token: int
    waiting: int = 0  # inputs
    last_step: int = 0  # in which something of it was queued or served


class TenantShares:
    def __init__(self, weights: Mapping[str, int], credit_tokens: int) -> None:
        """`weights`: tokens a tenant gets for each one of a tenant of weight 1, the weight of those not named.

        `credit_tokens`: how far behind the least served a tenant may stand. Raises `BadConfig` for a weight out of
        range.
        """
        for tenant, weight in weights.items():
            if not 1 <= weight <= UNIT:
                raise BadConfig(f"tenant {tenant!r} has weight {weight}, a weight is from 1 to {UNIT}")
        self._weights = dict(weights)
        self._credit = credit_tokens * UNIT
        self._tenants: dict[str, _Tenant] = {}
        self._arrivals = 0
        self._step = 0
        self._floor = 0  # where the least served of the latest step stood; never falls
        self._lowest: int | None = None  # level of a tenant served in this step, before it was
        self.served_now: set[str] = set()  # in this step
        self._sweep_above = _KEPT_AT_LEAST

    def __len__(self) -> int:
        return len(self._tenants)

    def next_step(self) -> None:
        """A new batch begins."""
        self._step += 1
        if self._lowest is not None:
            self._floor = max(self._floor, self._lowest)
            self._lowest = None
            self.served_now.clear()

    def key(self, tenant: str) -> tuple[int, int]:
        """The tenant with the lowest goes first. Only of a tenant something of which waits."""
        state = self._tenants[tenant]
        return (state.level, state.order)

    def queued(self, tenant: str) -> None:
        """One more input of a tenant waits."""
        state = self._tenants.get(tenant)
        if state is None:
            self._forget_gone()
            self._arrivals += 1
            state = _Tenant(self._floor, self._arrivals, UNIT // self._weights.get(tenant, 1))
            self._tenants[tenant] = state
        elif not state.waiting:
            state.level = max(state.level, self._floor - self._credit)
        state.waiting += 1
        state.last_step = self._step

    def dropped(self, tenant: str, inputs: int) -> None:
        """`inputs` of a tenant wait no longer, and were not served."""
        self._tenants[tenant].waiting -= inputs

    def served(self, tenant: str, inputs: int, tokens: int) -> None:
        """`inputs` of a tenant wait no longer: they run, `tokens` together."""
        state = self._tenants[tenant]
        if self._lowest is None or state.level < self._lowest:
            self._lowest = state.level
        self.served_now.add(tenant)
        state.level += tokens * state.per_token
        state.waiting -= inputs
        state.last_step = self._step

    def given_back(self, tenant: str, tokens: int) -> None:
        """An input of `tokens` that was served did not run after all, and waits again."""
        self.queued(tenant)
        state = self._tenants[tenant]
        state.level = max(state.level - tokens * state.per_token, self._floor - self._credit)

    def _forget_gone(self) -> None:
        """Paid for by the tenants that came since the last time."""
        if len(self._tenants) < self._sweep_above:
            return
        gone = [
            name
            for name, state in self._tenants.items()
            if not state.waiting and state.level <= self._floor and self._step - state.last_step > _STEPS_UNTIL_GONE
        ]
        for name in gone:
            del self._tenants[name]
        self._sweep_above = max(_KEPT_AT_LEAST, 2 * len(self._tenants))
