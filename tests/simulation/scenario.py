"""What one seed is about: the sizes, the traffic and the faults of one simulated life."""

from dataclasses import dataclass, replace
from random import Random

from microtome.planner.config import PlannerConfig
from microtome.planner.policies import POLICIES
from microtome.planner.scaling import ScalingConfig
from microtome.planner.types import MethodTable
from tests.support.fake_executor import method_table

VOCAB = 50  # small, so that prompts share prefixes and stops are hit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    config: PlannerConfig
    table: MethodTable
    workers: int
    usable_cells: int
    max_sequences: int
    clients: int  # callers with one generation after the other
    horizon_us: int  # when traffic and faults end
    fault_rate: float  # of a step
    death_every_us: int  # mean time between a worker's deaths; 0: none
    restart_at_us: int  # the driver dies and comes back; 0: it does not
    scaling: ScalingConfig | None  # the planner starts and drains the workers itself, `workers` of them at first
    update_at_us: int  # every worker gets other settings; 0: none does
    crowded: bool = False  # callers come at the same moments, and say much the same

    @property
    def max_tokens(self) -> int:
        """Prompt and output of one generation together, at most."""
        return min(self.usable_cells, self.config.max_session_tokens or self.usable_cells)


def scenario(rng: Random) -> Scenario:
    usable_cells = rng.choice((24, 40, 64, 100, 200, 400))
    widths = rng.choice(((1, 2, 4, 8), (1, 4, 16), (1,), (2, 8)))
    max_step_tokens = rng.choice((8, 16, 32))
    faulty = rng.random() < 0.6
    config = PlannerConfig(
        policy=rng.choice(sorted(POLICIES)),
        plan_ahead=rng.choice((1, 2, 2, 2, 3)),
        max_waiting=rng.choice((4, 16, 64)),
        max_waiting_tokens=rng.choice((200, 5000)),
        max_sessions=rng.choice((3, 8)),
        max_session_tokens=rng.choice((None, usable_cells // 2)),
        prefix_cache=rng.random() < 0.75,
        headroom_tokens=rng.choice((0, 1, 4, 16)),
        step_attempts=rng.choice((1, 2, 3)),
        step_timeout_ms=60,
        priority_ageing_ms=rng.choice((1, 20, 1000)),
        tenant_weights=("a=3",),
        target_step_ms=rng.choice((None, None, 1.2)),
    )
    plot = Scenario(
        config=config,
        table=method_table(widths, max_step_tokens),
        workers=rng.choice((1, 1, 2, 3)),
        usable_cells=usable_cells,
        max_sequences=rng.choice((1, 2, 4, 12)),
        clients=rng.choice((2, 5, 10)),
        horizon_us=rng.choice((100_000, 250_000)),
        fault_rate=rng.choice((0.002, 0.02, 0.08)) if faulty else 0.0,
        death_every_us=rng.choice((0, 40_000, 150_000)) if faulty else 0,
        restart_at_us=rng.choice((0, 0, 60_000)),
        scaling=None,
        update_at_us=0,
    )
    if rng.random() < 0.6:
        return plot
    least = rng.choice((0, 1, 2))
    scaling = ScalingConfig(
        min_workers=least,
        max_workers=max(1, least) + rng.choice((0, 1, 2)),
        target_wait_s=rng.choice((0.002, 0.02)),
        target_occupancy=rng.choice((0.5, 0.9)),
        settle_s=rng.choice((0.01, 0.05)),
        idle_s=rng.choice((0.01, 0.05)),
    )
    return replace(plot, scaling=scaling, update_at_us=rng.choice((0, 30_000, 90_000)))


def crowd(rng: Random) -> Scenario:
    """Many callers who come together with long beginnings in common, on few workers, in chunks and under pressure."""
    plot = scenario(rng)
    config = replace(plot.config, prefix_cache=True, max_session_tokens=None, max_waiting=64, max_waiting_tokens=5000)
    return replace(
        plot,
        config=config,
        usable_cells=rng.choice((64, 100, 200, 400)),
        max_sequences=rng.choice((4, 12)),
        workers=rng.choice((1, 1, 2)),
        clients=12,
        crowded=True,
    )
