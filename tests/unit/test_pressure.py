"""What gives way when cells run out, and that all goes on."""

from microtome.planner.config import PlannerConfig
from microtome.planner.types import DropSequence
from tests.support.small_cluster import SmallCluster, expected

TIGHT = PlannerConfig(headroom_tokens=0)  # starts whatever fits now, so that cells run out later


def prompt(n: int, length: int = 6) -> tuple[int, ...]:
    return tuple(range(70 * n, 70 * n + length))


def test_cached_prefixes_go_before_any_session() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=24)
    cluster.submit(prompt(1, 10), 4)
    cluster.run()
    assert cluster.control.status().workers[0].cells_cached > 0
    name = cluster.submit(prompt(2, 12), 12)
    cluster.run()
    assert cluster.tokens[name] == expected(prompt(2, 12), 12)
    assert cluster.control.status().counters.parked == 0


def test_the_newest_session_is_parked_first_and_its_stream_shows_only_a_pause() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=24)
    old, new = cluster.submit(prompt(1), 16), cluster.submit(prompt(2), 16)
    ended: list[str] = []
    while cluster.plans["w0"]:
        cluster.answer()
        ended += [name for name in cluster.ends if name not in ended]
    assert cluster.control.status().counters.parked >= 1
    assert ended == [old, new]
    assert cluster.tokens[old] == expected(prompt(1), 16)
    assert cluster.tokens[new] == expected(prompt(2), 16)


def test_a_lower_priority_is_parked_before_a_newer_session() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=24)
    low, high = cluster.submit(prompt(1), 16, priority=-1), cluster.submit(prompt(2), 16)
    ended: list[str] = []
    while cluster.plans["w0"]:
        cluster.answer()
        ended += [name for name in cluster.ends if name not in ended]
    assert ended == [high, low]
    assert cluster.tokens[low] == expected(prompt(1), 16)


def test_an_idle_session_gives_way_before_a_running_one() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=30)
    session = cluster.open()
    cluster.submit(prompt(1), 4, session=session)
    cluster.run()
    names = [cluster.submit(prompt(n), 6) for n in (2, 3)]
    cluster.run()
    assert cluster.control.status().counters.parked == 0
    for n, name in zip((2, 3), names, strict=True):
        assert cluster.tokens[name] == expected(prompt(n), 6)
    assert any(isinstance(op, DropSequence) for i in cluster.told if hasattr(i, "plan") for op in i.plan.ops)


def test_an_idle_session_gives_its_sequence_to_a_generation_that_waits_for_one() -> None:
    cluster = SmallCluster(max_sequences=1)
    session = cluster.open()
    cluster.submit(prompt(1), 4, session=session)
    cluster.run()
    name = cluster.submit(prompt(2), 4)
    cluster.run()
    assert cluster.tokens[name] == expected(prompt(2), 4)


def test_a_parked_session_comes_back_to_what_the_cache_kept_of_it() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=30)
    old, new = cluster.submit(prompt(1), 12), cluster.submit(prompt(2, 12), 12)
    cluster.run()
    assert cluster.control.status().counters.parked >= 1
    assert cluster.tokens[new] == expected(prompt(2, 12), 12)
    assert cluster.tokens[old] == expected(prompt(1), 12)
    prefilled = sum(len(i.plan.tokens) for i in cluster.told if hasattr(i, "plan"))
    assert prefilled < 6 + 12 + (12 + 12)  # less than the whole transcript was run again


def test_many_sessions_in_a_pool_for_two_all_end() -> None:
    for headroom in (0, 4):
        cluster = SmallCluster(PlannerConfig(headroom_tokens=headroom), usable_cells=40, max_sequences=8)
        names = [cluster.submit(prompt(n, 3 + n % 7), 14, seed=n) for n in range(12)]
        cluster.run()
        for n, name in enumerate(names):
            assert cluster.tokens[name] == expected(prompt(n, 3 + n % 7), 14, seed=n)
        assert cluster.cells_used() == 0


def test_a_generation_that_needs_the_whole_pool_gets_it() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=24)
    small = [cluster.submit(prompt(n), 9) for n in range(3)]
    whole = cluster.submit(prompt(9, 12), 12)
    cluster.run()
    assert cluster.tokens[whole] == expected(prompt(9, 12), 12)
    for n, name in enumerate(small):
        assert cluster.tokens[name] == expected(prompt(n), 9)


def test_headroom_keeps_one_more_session_waiting_while_others_grow() -> None:
    cluster = SmallCluster(PlannerConfig(headroom_tokens=4), usable_cells=40)
    cluster.submit(prompt(1, 15), 15)
    cluster.submit(prompt(2, 15), 15)
    status = cluster.control.status()
    assert (status.running, status.waiting) == (2, 0)
    cluster.submit(prompt(3, 6), 4)
    assert cluster.control.status().waiting == 1
    cluster.run()
    assert cluster.control.status().waiting == 0


def test_a_higher_priority_starts_in_a_full_pool_and_a_lower_one_gives_way() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=30)
    low = cluster.submit(prompt(1, 20), 10, priority=-1)
    same = cluster.submit(prompt(2, 15), 4)
    assert cluster.control.status().workers[0].running == 1
    ended: list[str] = []
    while cluster.plans["w0"]:
        cluster.answer()
        ended += [name for name in cluster.ends if name not in ended]
    assert ended == [same, low]
    assert cluster.tokens[low] == expected(prompt(1, 20), 10)
    assert cluster.tokens[same] == expected(prompt(2, 15), 4)


def test_an_equal_does_not_make_anybody_give_way_to_start() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=30)
    first, second = cluster.submit(prompt(1, 20), 10), cluster.submit(prompt(2, 15), 4)
    cluster.run()
    assert cluster.control.status().counters.parked == 0
    assert cluster.tokens[first] == expected(prompt(1, 20), 10)
    assert cluster.tokens[second] == expected(prompt(2, 15), 4)


def test_a_higher_priority_gets_the_sequence_of_a_lower_one() -> None:
    cluster = SmallCluster(max_sequences=2)
    low = [cluster.submit(prompt(n), 12, priority=-n) for n in range(2)]
    high = cluster.submit(prompt(5), 3, priority=4)
    ended: list[str] = []
    while cluster.plans["w0"]:
        cluster.answer()
        ended += [name for name in cluster.ends if name not in ended]
    assert ended == [high, *low]
    assert cluster.control.status().counters.parked == 1


def test_nobody_gives_way_when_it_would_not_be_enough() -> None:
    cluster = SmallCluster(TIGHT, usable_cells=60)
    cluster.submit(prompt(1, 20), 15)
    low = cluster.submit(prompt(2, 8), 8, priority=-1)
    high = cluster.submit(prompt(3, 50), 5)
    while high not in cluster.ends and low not in cluster.ends:
        cluster.answer()
    assert low in cluster.ends
    assert cluster.control.status().counters.parked == 0


def test_waiting_long_enough_keeps_a_place_against_any_priority() -> None:
    cluster = SmallCluster(PlannerConfig(headroom_tokens=0, priority_ageing_ms=1), usable_cells=30)
    old = cluster.submit(prompt(1, 20), 10)
    cluster.now_us = 5000
    high = cluster.submit(prompt(2, 15), 4, priority=4)
    cluster.run()
    assert list(cluster.ends) == [old, high]
