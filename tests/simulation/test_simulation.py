"""Simulated lives of a whole cluster, a seed each. `python -m tests.simulation.soak` runs many more."""

import pytest

from tests.simulation import siege
from tests.simulation.world import live, live_crowded

SEEDS = 200
CROWDS = 60
SIEGES = 80
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_life_keeps_every_promise(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        live(seed)


@pytest.mark.parametrize("first", range(0, CROWDS, AT_ONCE))
def test_what_a_crowd_has_in_common_is_shared_and_no_promise_broken(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        live_crowded(seed)


@pytest.mark.parametrize("first", range(0, SIEGES, AT_ONCE))
def test_no_caller_and_no_worker_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        siege.live(seed)
