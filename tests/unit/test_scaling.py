"""The wanted number of workers follows the load up at once and down with care."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.planner.errors import BadConfig
from microtome.planner.scaling import Load, Scaler, ScalingConfig

S = 1_000_000
CONFIG = ScalingConfig(min_workers=0, max_workers=8, target_wait_s=2, target_occupancy=0.5, settle_s=30, idle_s=300)
IDLE = Load(
    at_us=0,
    ready=1,
    starting=0,
    generations=0,
    waiting_tokens=0,
    cells_used=0,
    cells_per_worker=1000,
    sequences_per_worker=100,
    wait_us=None,
    start_us=None,
)
BUSY = replace(IDLE, generations=5, cells_used=400)


def test_first_generation_at_no_worker_wants_one() -> None:
    scaler = Scaler(CONFIG, 0, 0)
    assert scaler.wanted(replace(IDLE, ready=0, cells_per_worker=0)) == 0
    assert scaler.wanted(replace(IDLE, ready=0, cells_per_worker=0, generations=1)) == 1


def test_cells_in_use_and_waiting_prompts_ask_for_more() -> None:
    scaler = Scaler(CONFIG, 1, 0)
    assert scaler.wanted(replace(BUSY, cells_used=500)) == 1
    assert scaler.wanted(replace(BUSY, cells_used=500, waiting_tokens=1)) == 2
    assert scaler.wanted(replace(BUSY, cells_used=900, waiting_tokens=700)) == 4


def test_more_generations_than_the_workers_can_hold_ask_for_more() -> None:
    scaler = Scaler(CONFIG, 1, 0)
    assert scaler.wanted(replace(BUSY, generations=100)) == 1
    assert scaler.wanted(replace(BUSY, generations=101)) == 2


def test_predicted_wait_above_the_target_asks_for_as_many_as_bring_it_down() -> None:
    scaler = Scaler(CONFIG, 1, 0)
    assert scaler.wanted(replace(BUSY, wait_us=2 * S)) == 1
    assert scaler.wanted(replace(BUSY, wait_us=5 * S)) == 3


def test_backlog_that_is_gone_before_a_worker_could_start_asks_for_none() -> None:
    scaler = Scaler(CONFIG, 1, 0)
    assert scaler.wanted(replace(BUSY, wait_us=5 * S, start_us=60 * S)) == 1
    assert scaler.wanted(replace(BUSY, wait_us=61 * S, start_us=60 * S)) == 8


def test_smaller_load_sends_one_worker_away_at_a_time_after_it_has_settled() -> None:
    scaler = Scaler(CONFIG, 4, 0)
    wanted = [scaler.wanted(replace(BUSY, at_us=at * S, ready=4)) for at in range(0, 121, 10)]
    assert wanted == [4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]


def test_load_that_swings_moves_nothing() -> None:
    scaler = Scaler(CONFIG, 2, 0)
    more, fewer = replace(BUSY, cells_used=600), replace(BUSY, cells_used=100)
    for at in range(0, 600, 10):
        load = more if at % 20 == 0 else fewer
        assert scaler.wanted(replace(load, at_us=at * S, ready=2)) == 2


def test_no_worker_goes_while_another_starts() -> None:
    scaler = Scaler(CONFIG, 3, 0)
    for at in range(0, 200, 10):
        assert scaler.wanted(replace(BUSY, at_us=at * S, ready=2, starting=1)) == 3


def test_last_worker_goes_only_after_an_idle_time_and_comes_back_at_once() -> None:
    scaler = Scaler(CONFIG, 1, 0)
    assert scaler.wanted(replace(BUSY, at_us=100 * S)) == 1
    assert scaler.wanted(replace(IDLE, at_us=399 * S)) == 1
    assert scaler.wanted(replace(IDLE, at_us=430 * S)) == 0
    assert scaler.wanted(replace(IDLE, at_us=431 * S, ready=0, generations=1)) == 1


def test_floor_of_one_is_kept_however_idle() -> None:
    scaler = Scaler(replace(CONFIG, min_workers=1), 1, 0)
    assert scaler.wanted(IDLE) == 1
    assert scaler.wanted(replace(IDLE, at_us=10_000 * S)) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9)), max_size=30
    )
)
def test_answer_is_always_within_its_bounds_and_never_falls_by_two(steps: list[tuple[int, int, int, int]]) -> None:
    scaler = Scaler(replace(CONFIG, min_workers=1, max_workers=5), 3, 0)
    at, before = 0, 3
    for generations, cells, waiting, wait_us in steps:
        at += 20 * S
        wanted = scaler.wanted(
            replace(IDLE, at_us=at, generations=generations, cells_used=cells, waiting_tokens=waiting, wait_us=wait_us)
        )
        assert 1 <= wanted <= 5
        assert wanted >= before - 1
        before = wanted


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_workers": -1}, "min_workers -1 is below 0"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers 2 is below 3"),
        ({"max_workers": 0, "min_workers": 0}, "max_workers 0 is below 1"),
        ({"target_occupancy": 0.0}, "target_occupancy 0 is not in (0, 1]"),
        ({"settle_s": -1.0}, "settle_s -1 is not 0 or more seconds"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadConfig) as refused:
        ScalingConfig(**settings)  # type: ignore[arg-type]
    assert str(refused.value) == sentence
