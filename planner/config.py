"""`PlannerConfig`: what the planner is told once. Frozen, checks itself, names both numbers when two contradict.

Limits that depend on a worker (its widest method, its sequences) are worked out by `limits_for` when it joins; `None`
means "let the worker decide".
"""

from dataclasses import dataclass

from microtome.planner.errors import BadConfig
from microtome.planner.policies import POLICIES
from microtome.planner.scheduler import Limits
from microtome.planner.tenant_shares import UNIT as HEAVIEST
from microtome.planner.types import Capability


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Raises `BadConfig` in one sentence with the value and the limit."""

    policy: str = "decode-first"  # or "priority", "fair", "fair-priority": who goes first when not all fit
    plan_ahead: int = 2  # steps in flight per worker
    max_batch_tokens: int | None = None  # of one step; None: the worker's widest method
    max_decodes: int | None = None  # of one step; None: half the batch, within the worker's output rows
    max_prefill_tokens: int | None = None  # of one prompt's chunk; None: what the decodes leave of the batch
    target_step_ms: float | None = None  # prefill joins a step only up to this predicted time; None: no such bound
    max_session_tokens: int | None = None  # prompt and output together; None: what the worker's rows hold
    max_sessions: int = 4096  # opened by callers and not yet closed
    session_idle_ms: int = 3_600_000  # one that is open and not used for this long is closed; 0: never
    max_waiting: int = 1024  # generations without a first step
    max_waiting_tokens: int = 4_194_304  # their prompts together
    prefix_cache: bool = True  # sessions share the cells of equal beginnings
    headroom_tokens: int = 16  # per running session, kept free when one more starts; what runs out anyway is parked
    step_attempts: int = 3  # failed steps after which a generation in all of them is failed
    step_timeout_ms: int = 60_000  # a step unanswered for this long, beside its predicted time, is a hang
    drain_timeout_ms: int = 300_000  # what a draining worker holds and nobody else can take may stay this long
    priority_ageing_ms: int = 10_000  # waiting this long is worth one step of priority
    tenant_weights: tuple[str, ...] = ()  # "tenant=weight"; 1 for those not named

    def __post_init__(self) -> None:
        _at_least("plan_ahead", self.plan_ahead, 1)
        _at_least("max_sessions", self.max_sessions, 1)
        _at_least("session_idle_ms", self.session_idle_ms, 0)
        _at_least("max_waiting", self.max_waiting, 1)
        _at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        _at_least("headroom_tokens", self.headroom_tokens, 0)
        _at_least("step_attempts", self.step_attempts, 1)
        _at_least("step_timeout_ms", self.step_timeout_ms, 1)
        _at_least("drain_timeout_ms", self.drain_timeout_ms, 0)
        _at_least("priority_ageing_ms", self.priority_ageing_ms, 1)
        _at_least("max_batch_tokens", self.max_batch_tokens, 2)
        _at_least("max_decodes", self.max_decodes, 1)
        _at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        _at_least("max_session_tokens", self.max_session_tokens, 2)
        if self.target_step_ms is not None and not 0 < self.target_step_ms < float("inf"):
            raise BadConfig(f"target_step_ms {self.target_step_ms:g} is not a positive number of milliseconds")
        if self.policy not in POLICIES:
            raise BadConfig(f"policy {self.policy!r} is none of {', '.join(POLICIES)}")
        self.weights()

    def weights(self) -> dict[str, int]:
        """`tenant_weights` as a mapping."""
        weights: dict[str, int] = {}
        for text in self.tenant_weights:
            tenant, _, number = text.rpartition("=")
            if not tenant or not number.isdecimal() or int(number) < 1:
                raise BadConfig(f"tenant weight {text!r} is not 'tenant=weight' with a whole weight of 1 or more")
            if int(number) > HEAVIEST:
                raise BadConfig(f"tenant weight {text!r} is above {HEAVIEST}")
            if tenant in weights:
                raise BadConfig(f"tenant weight {text!r} is the second one of {tenant!r}")
            weights[tenant] = int(number)
        return weights

    def limits_for(self, capability: Capability) -> Limits:
        """The scheduler's limits on this worker.

        A step's sampled rows are bounded by `max_output_rows`: one per decode and one per finished chunk. So decodes
        take half of them at most, and chunks are what the batch has beside them. Raises `BadConfig` when the numbers
        contradict each other.
        """
        batch = self.max_batch_tokens or max(2, capability.table.widest)
        decodes = self.max_decodes or max(1, min(batch // 2, capability.max_output_rows, capability.max_sequences))
        prefill = self.max_prefill_tokens or max(1, batch - decodes)
        return Limits(max_batch_tokens=batch, max_decodes=decodes, max_prefill_tokens=prefill)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise BadConfig(f"{name} {value} is below {least}")
