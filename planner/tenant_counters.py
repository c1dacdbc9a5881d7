"""What each tenant was served, since the start; nothing is decided by it.

Counted by name are those that the configuration names, the rest together: so what is kept stays bounded, however many
names callers make up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from microtome.planner.generations import Generation

OTHERS = ""  # under this name those that the configuration does not name


@dataclass(slots=True)
class TenantCounters:
    """Only grows."""

    generations: int = 0  # ended
    refused: int = 0  # at submission; not among those ended
    prompt_tokens: int = 0  # of ended generations, as all below
    cached_tokens: int = 0  # of those, found in the prefix cache
    output_tokens: int = 0
    first_tokens: int = 0  # generations that had one
    ttft_us: int = 0  # from submission to the first token, their sum


class TenantTally:
    """`Control` counts; others get copies."""

    def __init__(self, named: Iterable[str]) -> None:
        self._counters = {name: TenantCounters() for name in (*named, OTHERS)}

    def ended(self, g: Generation) -> None:
        counters = self._of(g.options.tenant)
        counters.generations += 1
        counters.prompt_tokens += g.prompt_tokens
        counters.cached_tokens += g.cached_tokens
        counters.output_tokens += g.delivered
        if g.first_token_us:  # None of one that an earlier driver has seen to its first token
            counters.first_tokens += 1
            counters.ttft_us += g.first_token_us - g.submitted_us

    def refused(self, tenant: str) -> None:
        self._of(tenant).refused += 1

    def snapshot(self) -> dict[str, TenantCounters]:
        """By name; `OTHERS` is always among them."""
        return {name: replace(counters) for name, counters in self._counters.items()}

    def _of(self, tenant: str) -> TenantCounters:
        return self._counters.get(tenant, self._counters[OTHERS])
