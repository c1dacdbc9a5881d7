"""Simulated lives of a whole cluster, a seed each. `python -m tests.simulation.soak` runs many more."""

import pytest

from tests.simulation import siege
from tests.simulation.world import live

SEEDS = 200
SIEGES = 80
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_life_keeps_every_promise(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        live(seed)


@pytest.mark.parametrize("first", range(0, SIEGES, AT_ONCE))
def test_no_caller_and_no_worker_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        siege.live(seed)
