"""Which workers there are: started for a load, sent away without it, replaced by an update. No token differs."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import WorkerLost, WrongState
from microtome.planner.events import CallersWait, ReleaseWorker, Scale, StartWorker, Submit, WorkerDraining
from microtome.planner.scaling import ScalingConfig
from microtome.planner.types import FinishReason, GenerationId, GenerationOptions, WorkerId
from tests.support.fake_model import generate
from tests.support.scaled_cluster import ScaledCluster
from tests.support.small_cluster import expected

S = 1_000_000
SCALING = ScalingConfig(min_workers=0, max_workers=4, target_wait_s=1, target_occupancy=0.8, settle_s=5, idle_s=10)
FIXED = ScalingConfig(min_workers=2, max_workers=2)
ONE = ScalingConfig(min_workers=1, max_workers=1)
LONG = 200


def started(cluster: ScaledCluster) -> list[str]:
    return [i.worker for i in cluster.told if isinstance(i, StartWorker)]


def fleet(scaling: ScalingConfig = FIXED, *, config: PlannerConfig | None = None, **more: object) -> ScaledCluster:
    """A cluster whose first workers are there."""
    cluster = ScaledCluster(scaling, scaling.min_workers, config=config, **more)  # type: ignore[arg-type]
    cluster.advance(2 * S)
    assert len(cluster.names) == scaling.min_workers
    return cluster


# --- how many ---


def test_planner_without_bounds_starts_nobody() -> None:
    cluster = ScaledCluster(SCALING)
    silent = type(cluster.control)(PlannerConfig())
    told = silent.handle(
        Submit(at_us=0, generation=GenerationId("g"), prompt=(1,), options=GenerationOptions(max_new_tokens=1))
    )
    assert told == []


def test_request_at_no_worker_starts_one_at_once_and_is_served() -> None:
    cluster = ScaledCluster(SCALING)
    cluster.advance(3 * S)
    assert started(cluster) == []
    name = cluster.submit((1, 2, 3), 5)
    assert started(cluster) == ["worker-1"], "it had to wait for a tick"
    cluster.advance(2 * S)
    assert cluster.tokens[name] == expected((1, 2, 3), 5)


def test_call_that_cannot_be_checked_yet_is_a_reason_to_start_one() -> None:
    cluster = ScaledCluster(SCALING)
    cluster.handle(CallersWait(at_us=0, count=1))
    assert started(cluster) == ["worker-1"]
    cluster.advance(2 * S)
    cluster.advance(30 * S)
    assert cluster.names == [], "a call that waited once is counted for ever"


def test_request_whose_deadline_passes_while_no_worker_comes_ends_with_it() -> None:
    cluster = ScaledCluster(SCALING, start_us=60 * S)
    name = cluster.submit((1,), 5, deadline_us=2 * S)
    cluster.advance(3 * S)
    assert cluster.finish(name) is FinishReason.FAILED


def test_idle_service_sends_its_last_worker_away_and_forgets_no_session() -> None:
    cluster = ScaledCluster(SCALING)
    session = cluster.open()
    cluster.submit((1, 2), 3, session=session)
    cluster.advance(3 * S)
    assert cluster.names == ["worker-1"]
    cluster.advance(12 * S)
    assert cluster.names == []
    again = cluster.submit((7,), 3, session=session)
    cluster.advance(2 * S)
    assert cluster.tokens[again] == expected([1, 2, *expected((1, 2), 3), 7], 3)
    assert cluster.names == ["worker-2"]


def test_full_pool_brings_another_worker_and_the_one_with_least_to_move_goes_first() -> None:
    cluster = ScaledCluster(SCALING, config=PlannerConfig(prefix_cache=False), usable_cells=512, max_sequences=16)
    names = [cluster.submit([n] * 100, LONG) for n in range(6)]
    cluster.advance(4 * S)
    assert len(cluster.names) >= 2
    cluster.advance(60 * S)
    assert [cluster.tokens[name] for name in names] == [expected([n] * 100, LONG) for n in range(6)]
    assert cluster.names == []


def test_victim_is_the_worker_with_the_fewest_cells_of_sessions() -> None:
    cluster = fleet(replace(SCALING, min_workers=2, max_workers=2), config=PlannerConfig(prefix_cache=False))
    cluster.submit([1] * 300, 1500)
    cluster.submit([2] * 20, 1500)
    cluster.advance(1 * S)
    used = {name: cluster.cells_used(name) for name in cluster.names}
    assert min(used.values()) < 100 < max(used.values())
    cluster.handle(Scale(at_us=cluster.now_us, scaling=ONE, count=1))
    drained = [worker for _, what, worker in cluster.changes if what == "drain"]
    assert drained == [min(used, key=lambda name: used[name])]


def test_worker_that_loads_is_never_sent_away_and_one_without_a_place_is() -> None:
    for place_us, released in ((0, False), (60 * S, True)):
        cluster = ScaledCluster(SCALING, place_us=place_us, start_us=60 * S)
        name = cluster.submit((1,), 5)
        cluster.advance(1 * S)
        cluster.cancel(name)
        cluster.advance(40 * S)
        assert any(isinstance(i, ReleaseWorker) for i in cluster.told) is released
        cluster.advance(40 * S)
        assert started(cluster) == ["worker-1"]


def test_start_that_fails_is_tried_again_ever_later_and_one_at_a_time() -> None:
    cluster = ScaledCluster(FIXED, 2, start_us=100_000)
    cluster.fail = {0}
    cluster.advance(20 * S)
    times = [at for at, what, _ in cluster.changes if what == "start"]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert 4 <= len(gaps) <= 7
    assert all(later > 1.5 * sooner for sooner, later in itertools.pairwise(gaps))
    cluster.fail = set()
    cluster.advance(60 * S)
    assert len(cluster.names) == 2


def test_dead_worker_is_replaced_under_a_new_name() -> None:
    cluster = fleet()
    name = cluster.submit([5] * 9, 100)
    cluster.advance(S // 2)
    cluster.die("worker-1")
    cluster.advance(10 * S)
    assert sorted(cluster.names) == ["worker-2", "worker-3"]
    assert cluster.tokens[name] == expected([5] * 9, 100)


def test_steady_load_moves_no_worker_once_it_is_met() -> None:
    cluster = ScaledCluster(SCALING, usable_cells=1024, max_sequences=16, config=PlannerConfig(prefix_cache=False))
    for second in range(60):
        cluster.submit([second] * 60, 100)
        cluster.advance(S)
    late = [change for change in cluster.changes if change[0] > 30 * S]
    assert late == [], f"a steady load is answered by {late}"
    assert cluster.names


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 80)), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_no_load_flaps_the_workers_or_leaves_anybody_behind(bursts: list[tuple[int, int, int]], start_s: int) -> None:
    cluster = ScaledCluster(
        SCALING, start_us=start_s * S // 10, usable_cells=512, max_sequences=8, config=PlannerConfig(prefix_cache=False)
    )
    asked: dict[str, tuple[list[int], int]] = {}
    for pause_s, count, tokens in bursts:
        for n in range(count):
            prompt = [n + 1] * tokens
            asked[cluster.submit(prompt, tokens)] = (prompt, tokens)
        cluster.advance(pause_s * S)
    cluster.advance(80 * S)
    for name, (prompt, tokens) in asked.items():
        assert cluster.tokens[name] == expected(prompt, tokens)
    assert cluster.names == []
    assert not cluster.coming
    drains = [at for at, what, _ in cluster.changes if what == "drain"]
    assert all(later - sooner >= SCALING.settle_s * S * 0.99 for sooner, later in itertools.pairwise(drains))
    starts = sum(what == "start" for _, what, _ in cluster.changes)
    assert starts <= SCALING.max_workers + len(bursts) * SCALING.max_workers


# --- drain ---


def test_worker_that_drains_is_missed_before_it_is_gone() -> None:
    cluster = fleet(ONE)
    name = cluster.submit([3] * 5, 300)
    cluster.advance(S // 2)
    cluster.drain("worker-1")
    assert started(cluster)[-1] == "worker-2"
    cluster.advance(10 * S)
    assert cluster.names == ["worker-2"]
    assert not cluster.finish(name)
    cluster.advance(10 * S)
    assert cluster.tokens[name] == expected([3] * 5, 300)
    assert cluster.control.status().counters.moved == 1


def test_drain_that_nobody_can_take_over_from_ends_at_its_deadline_and_its_sessions_wait() -> None:
    cluster = fleet(ONE)
    cluster.start_us = 20 * S
    name = cluster.submit([3] * 5, 300)
    cluster.advance(S)
    cluster.handle(
        WorkerDraining(at_us=cluster.now_us, worker=WorkerId("worker-1"), deadline_us=cluster.now_us + 2 * S)
    )
    cluster.advance(1 * S)
    assert cluster.names == ["worker-1"]
    cluster.advance(2 * S)
    assert cluster.names == [], "its node was taken with the session still on it"
    cluster.advance(40 * S)
    assert cluster.tokens[name] == expected([3] * 5, 300)


def test_released_worker_is_forgotten_and_its_late_answers_are_dropped() -> None:
    cluster = fleet()
    incarnation = cluster.executors["worker-1"].describe().incarnation
    cluster.drain("worker-1")
    assert [w.worker for w in cluster.control.status().workers] == ["worker-2"]
    assert incarnation in cluster.control._roster._fenced


# --- update ---


@pytest.mark.parametrize("surge", [True, False])
def test_update_of_the_settings_moves_every_stream_and_drops_none(surge: bool) -> None:
    cluster = fleet(config=PlannerConfig(drain_timeout_ms=1000))
    names = [cluster.submit([n] * 10, 400) for n in range(6)]
    cluster.advance(S)
    cluster.update(1, surge=surge)
    lowest = 2
    for _ in range(60):
        cluster.advance(S // 5)
        lowest = min(lowest, len(cluster.names))
    assert [(u.revision, u.error) for u in cluster.updates] == [(1, None)]
    assert {w.revision for w in cluster.control.status().workers} == {1}
    assert len(cluster.names) == 2
    assert lowest == (2 if surge else 1)
    cluster.advance(30 * S)
    assert [cluster.tokens[name] for name in names] == [expected([n] * 10, 400) for n in range(6)]


def test_update_to_another_model_ends_old_streams_on_the_old_one_and_begins_new_ones_on_the_new() -> None:
    cluster = fleet()
    cluster.models[1] = {"vocab_size": 500, "fingerprint": "0ddb"}
    old = [cluster.submit([n] * 10, 400) for n in range(4)]
    cluster.advance(S)
    cluster.update(1)
    cluster.advance(2 * S)
    new = [cluster.submit([n] * 10, 50) for n in range(4)]
    assert not any(cluster.finish(name) for name in old)
    cluster.advance(40 * S)
    assert [cluster.tokens[name] for name in old] == [expected([n] * 10, 400) for n in range(4)]
    for n, name in enumerate(new):
        sampling = GenerationOptions(max_new_tokens=1).sampling
        assert cluster.tokens[name] == generate([n] * 10, replace(sampling, prompt_tokens=10), 50, (), 500)
    assert [(u.revision, u.error) for u in cluster.updates] == [(1, None)]
    assert len(cluster.names) == 2
    assert cluster.control._models.replaced == ()


def test_tokens_of_the_old_model_that_come_late_go_to_it_while_it_is_there_and_are_refused_after() -> None:
    cluster = fleet(ONE)
    cluster.models[1] = {"vocab_size": 500, "fingerprint": "0ddb"}
    running = cluster.submit([1] * 10, 300)
    cluster.update(1)
    cluster.advance(2 * S)

    def submit_old(name: str) -> None:
        options = GenerationOptions(max_new_tokens=5)
        cluster.handle(
            Submit(
                at_us=cluster.now_us,
                generation=GenerationId(name),
                prompt=(7,),
                options=options,
                fingerprint="fa4e" * 16,
            )
        )

    submit_old("late")
    cluster.advance(20 * S)
    assert cluster.tokens["late"] == expected((7,), 5)
    assert cluster.tokens[running] == expected([1] * 10, 300)
    submit_old("too late")
    assert isinstance(cluster.error("too late"), WrongState)


def test_stream_of_a_replaced_model_has_only_so_much_time() -> None:
    cluster = fleet(ONE, config=PlannerConfig(drain_timeout_ms=3000))
    cluster.models[1] = {"fingerprint": "0ddb"}
    name = cluster.submit([1] * 10, 3000)
    cluster.update(1)
    cluster.advance(10 * S)
    assert cluster.finish(name) is FinishReason.FAILED
    assert isinstance(cluster.error(name), WorkerLost)
    assert cluster.updates[-1].error is None
    assert cluster.names == ["worker-2"]


def test_worker_of_a_replaced_model_that_dies_gets_a_successor_for_what_it_held() -> None:
    cluster = fleet(ONE)
    cluster.models[1] = {"vocab_size": 500, "fingerprint": "0ddb"}
    name = cluster.submit([1] * 10, 400)
    cluster.update(1)
    cluster.advance(2 * S)
    assert not cluster.finish(name)
    cluster.die("worker-1")
    cluster.advance(30 * S)
    assert cluster.tokens[name] == expected([1] * 10, 400)
    assert {w.revision for w in cluster.control.status().workers} == {1}


def test_update_whose_first_worker_does_not_start_is_taken_back() -> None:
    cluster = fleet()
    cluster.fail = {1}
    name = cluster.submit([1] * 10, 300)
    cluster.update(1)
    cluster.advance(5 * S)
    assert [(u.revision, u.error) for u in cluster.updates] == [(1, "as the test says")]
    assert cluster.names == ["worker-1", "worker-2"]
    cluster.die("worker-1")
    cluster.advance(10 * S)
    assert [w.revision for w in cluster.control.status().workers] == [0, 0]
    assert cluster.tokens[name] == expected([1] * 10, 300)


def test_update_at_no_worker_is_done_at_once_and_the_next_worker_has_it() -> None:
    cluster = ScaledCluster(SCALING)
    cluster.update(1)
    cluster.tick()
    assert [(u.revision, u.error) for u in cluster.updates] == [(1, None)]
    cluster.submit((1,), 3)
    cluster.advance(2 * S)
    assert [w.revision for w in cluster.control.status().workers] == [1]


def test_worker_of_an_unknown_model_that_no_update_announced_is_given_up() -> None:
    cluster = fleet(ONE)
    cluster.models[0] = {"fingerprint": "0ddb"}
    cluster.die("worker-1")
    cluster.advance(3 * S)
    assert any("its model is" in getattr(i, "cause", "") for i in cluster.told)


def test_session_of_a_model_that_is_served_no_more_is_told_so() -> None:
    cluster = fleet(ONE)
    session = cluster.open()
    cluster.submit((1, 2), 3, session=session)
    cluster.advance(S)
    cluster.models[1] = {"fingerprint": "0ddb"}
    cluster.update(1)
    cluster.advance(10 * S)
    name = cluster.submit((7,), 3, session=session)
    assert isinstance(cluster.error(name), WrongState)
