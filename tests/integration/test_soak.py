"""Clients under load while workers, the driver and clients are killed and stopped at random: no token differs.

A minute of what `make soak` does for ten. A failing run prints its seed and its story.
"""

import time

import pytest

from tests.integration.soak import CLIENTS, soak

SECONDS = 60.0


@pytest.mark.timeout(SECONDS + 240)
async def test_a_minute_of_kills_costs_no_token_and_leaves_nothing_behind(service_name: str) -> None:
    story, growth = await soak(service_name, SECONDS, seed=time.time_ns() % 2**32)
    print(story)
    print(growth)
    assert story.counts["complete"] > CLIENTS
    assert sum(story.counts[act] for act in ("worker killed", "driver killed", "worker stopped", "client killed")) >= 10
    # Memory takes longer than a minute to be judged.
    assert growth.flat(at_least_s=SECONDS / 4, memory=False) == [], f"{growth}\n{story}"
