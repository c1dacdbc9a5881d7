"""A wanted step time, from the configuration down to the steps: decodes are not held up by somebody's long prompt."""

import pytest

from microtome.planner.config import PlannerConfig
from tests.support.small_cluster import SmallCluster

# A step of the fake executor costs 1 ms and 20 us a token: 50 tokens take 2 ms.
LONG = list(range(300))


def steps_until(cluster: SmallCluster, end: str) -> list[tuple[int, int]]:
    """Run until a generation ends: (decodes, tokens) of each step."""
    steps = []
    while end not in cluster.ends:
        plan = cluster.plans["w0"][0]
        steps.append((list(plan.widths).count(1), len(plan.cells)))
        cluster.answer()
    return steps


def decoding(cluster: SmallCluster, count: int) -> None:
    for number in range(count):
        cluster.submit([number + 1, 7], 200)
    for _ in range(4):
        cluster.answer()


@pytest.mark.parametrize("decodes", [1, 20])
def test_a_long_prompt_joins_decodes_up_to_the_wanted_step_time_and_moves_on_in_every_step(decodes: int) -> None:
    cluster = SmallCluster(PlannerConfig(target_step_ms=2.0))
    decoding(cluster, decodes)
    prompt = cluster.submit(LONG, 1)
    steps = [(own, tokens) for own, tokens in steps_until(cluster, prompt) if tokens > decodes]
    assert all(tokens <= 50 for _, tokens in steps)
    assert len(steps) <= 300 // 16 + 2


def test_without_a_wanted_step_time_a_long_prompt_takes_what_the_step_holds() -> None:
    cluster = SmallCluster(PlannerConfig())
    decoding(cluster, 1)
    prompt = cluster.submit(LONG, 1)
    assert max(tokens for _, tokens in steps_until(cluster, prompt)) > 50
