"""The scheduling policies by name: the one place where a policy is registered.

Every factory takes the same keywords and ignores those that its policy has no use for, so that a configuration can
change the name alone. Each policy's promises are in the header of the module it comes from.
"""

from collections.abc import Mapping
from typing import Protocol

from microtome.planner.decode_first import DecodeFirstScheduler
from microtome.planner.scheduler import Limits, Scheduler


class PolicyFactory(Protocol):
    def __call__(
        self,
        *,
        max_batch_tokens: int,
        max_decodes: int,
        max_prefill_tokens: int,
        target_step_tokens: int | None = None,
        patience_steps: int = 8,
        ageing_steps: int = 64,
        tenant_weights: Mapping[str, int] | None = None,
    ) -> Scheduler:
        """Build a scheduler for one worker. Raises `BadConfig` for limits that do not fit each other.

        `target_step_tokens`: prefill joins decodes up to this many tokens a step; None: up to the batch's own limit.
        `patience_steps`: a chunk that does not fit the target goes after so many steps all the same.
        `ageing_steps`: steps of waiting that one level of priority is worth.
        `tenant_weights`: tokens a tenant gets for each one of a tenant not named.
        """


def _policy(*, priorities: bool, tenants: bool) -> PolicyFactory:
    def build(
        *,
        max_batch_tokens: int,
        max_decodes: int,
        max_prefill_tokens: int,
        target_step_tokens: int | None = None,
        patience_steps: int = 8,
        ageing_steps: int = 64,
        tenant_weights: Mapping[str, int] | None = None,
    ) -> Scheduler:
        limits = Limits(
            max_batch_tokens=max_batch_tokens, max_decodes=max_decodes, max_prefill_tokens=max_prefill_tokens
        )
        return DecodeFirstScheduler(
            limits,
            ageing_steps=ageing_steps if priorities else None,
            tenant_weights=(tenant_weights or {}) if tenants else None,
            target_step_tokens=target_step_tokens,
            patience_steps=patience_steps,
        )

    return build


POLICIES: Mapping[str, PolicyFactory] = {
    "decode-first": _policy(priorities=False, tenants=False),  # in turns, as they came
    "priority": _policy(priorities=True, tenants=False),  # higher priority first
    "fair": _policy(priorities=False, tenants=True),  # the tenant served least first
    "fair-priority": _policy(priorities=True, tenants=True),  # and inside a tenant higher priority first
}
