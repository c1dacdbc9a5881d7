"""Where a generation is: every reason for which one waits is really told, with its place and its forecast."""

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput
from microtome.planner.generations import State
from microtome.planner.status import Waiting, Whereabouts
from microtome.planner.types import FinishReason, GenerationId
from tests.support.small_cluster import SmallCluster, expected

NARROW = {"max_batch_tokens": 4, "max_decodes": 1, "max_prefill_tokens": 3}  # a step runs little
LONG = range(60)


def where(cluster: SmallCluster, name: str) -> Whereabouts:
    found = cluster.control.where(GenerationId(name))
    assert found is not None
    return found


def test_a_running_generation_waits_for_nothing_while_its_input_is_under_way() -> None:
    cluster = SmallCluster()
    name = cluster.submit(LONG)
    found = where(cluster, name)
    assert (found.state, found.position, found.waits_for, found.worker) == (State.RUNNING, 0, Waiting.NOTHING, "w0")
    assert (found.prompt_tokens, found.delivered, found.parked, found.moved) == (60, 0, 0, 0)
    cluster.answer()
    found = where(cluster, name)
    assert (found.delivered, found.predicted_ttft_us) == (1, None)


@pytest.mark.parametrize(
    ("policy", "first", "second", "reason"),
    [
        ("decode-first", {}, {}, Waiting.STEP_BUDGET),
        ("priority", {}, {"priority": 5}, Waiting.PRIORITY),
        ("fair", {"tenant": "flood"}, {"tenant": "modest"}, Waiting.TENANT_SHARE),
    ],
)
def test_a_running_generation_whose_chunk_waits_says_what_the_policy_puts_first(
    policy: str, first: dict[str, object], second: dict[str, object], reason: Waiting
) -> None:
    cluster = SmallCluster(PlannerConfig(policy=policy, prefix_cache=False, **NARROW))  # type: ignore[arg-type]
    earlier = cluster.submit(LONG, **first)  # type: ignore[arg-type]
    later = cluster.submit(range(100, 160), **second)  # type: ignore[arg-type]
    seen: set[Waiting] = set()
    for _ in range(8):
        seen.add(where(cluster, earlier if reason is not Waiting.STEP_BUDGET else later).waits_for)
        cluster.answer()
    assert reason in seen
    assert seen <= {Waiting.NOTHING, Waiting.STEP_BUDGET, reason}


def test_the_next_turn_of_a_session_waits_for_what_is_under_way_of_the_last_one() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    first = cluster.submit(range(20), 50, session=session)
    cluster.answer()
    cluster.cancel(first)
    second = cluster.submit((1, 2), session=session)
    found = where(cluster, second)
    assert (found.state, found.waits_for) == (State.SETTLING, Waiting.OWN_SESSION)
    cluster.run()
    assert cluster.finish(second) is FinishReason.LENGTH


def test_completions_that_wait_for_their_prompt_are_promised_the_time_of_the_one_that_runs_it() -> None:
    cluster = SmallCluster()
    cluster.submit(LONG, name="a", siblings=[("b", 1)])
    leader, sibling = where(cluster, "a"), where(cluster, "b")
    assert sibling.waits_for is Waiting.SHARED_PROMPT
    assert leader.predicted_ttft_us is not None
    assert sibling.predicted_ttft_us == leader.predicted_ttft_us


def test_a_parked_and_a_moved_generation_say_that_they_return_and_how_often() -> None:
    cluster = SmallCluster(PlannerConfig(headroom_tokens=0, prefix_cache=False), usable_cells=40)
    senior, junior = cluster.submit(range(12), 20), cluster.submit(range(100, 112), 20)
    while not where(cluster, junior).parked:
        cluster.answer()
    found = where(cluster, junior)
    assert (found.state, found.waits_for, found.position) == (State.RETURNING, Waiting.CELLS, 0)
    assert where(cluster, senior).parked == 0
    cluster.lose()
    cluster.plans["w0"].clear()
    found = where(cluster, senior)
    assert (found.state, found.waits_for, found.moved, found.worker) == (State.RETURNING, Waiting.NO_WORKER, 1, None)
    cluster.join()
    cluster.run()
    assert cluster.tokens[senior] == expected(range(12), 20)
    assert cluster.tokens[junior] == expected(range(100, 112), 20)


def test_a_drained_generation_has_moved() -> None:
    cluster = SmallCluster(workers=2)
    name = cluster.submit(range(20), 30)
    home = where(cluster, name).worker
    assert home is not None
    cluster.drain(home)
    cluster.run()
    assert cluster.tokens[name] == expected(range(20), 30)
    cluster = SmallCluster(workers=2)
    name = cluster.submit(range(20), 30)
    home = where(cluster, name).worker
    assert home is not None
    cluster.answer(home)
    cluster.drain(home)
    while where(cluster, name).worker in (home, None):
        cluster.answer(home)
    assert where(cluster, name).moved == 1


def test_those_in_line_are_listed_in_the_order_in_which_they_start() -> None:
    # Two priorities, so that the order by rank and the order by priority differ: waiting outweighs one step of it.
    cluster = SmallCluster(PlannerConfig(priority_ageing_ms=1), max_sequences=1)
    cluster.submit(LONG, 3, name="runs")
    for number, (priority, tenant) in enumerate([(0, "a"), (0, "b"), (9, "a"), (0, "a"), (1, "b"), (9, "b"), (0, "b")]):
        cluster.now_us += 2500
        cluster.submit((number + 1, 5), 2, name=f"n{number}", priority=priority, tenant=tenant)
    listed = cluster.control.listed(100)
    waiting = [one.generation for one in listed if one.whereabouts.state is State.WAITING]
    assert [one.whereabouts.position for one in listed] == [0, 1, 2, 3, 4, 5, 6, 0]
    assert listed[-1].generation == "runs"
    for one in listed:
        assert one.whereabouts == where(cluster, one.generation)
    started: list[str] = []
    for _ in range(200):
        for name in waiting:
            if name not in started and (name in cluster.ends or where(cluster, name).running):
                started.append(name)
        if not any(cluster.plans.values()):
            break
        cluster.answer()
    assert started == waiting
    assert {(one.tenant, one.priority) for one in listed[:7]} == {("a", 0), ("b", 0), ("a", 9), ("b", 1), ("b", 9)}


def test_a_list_is_no_longer_than_was_asked_for_and_names_those_that_settle_too() -> None:
    cluster = SmallCluster()
    cluster.submit(LONG, name="a", siblings=[("b", 1), ("c", 2)])
    assert [one.generation for one in cluster.control.listed(100)] == ["b", "c", "a"]
    assert [one.generation for one in cluster.control.listed(2)] == ["b", "c"]
    assert cluster.control.listed(0) == []


def test_what_lies_on_a_worker_already_is_not_counted_as_time_to_a_sessions_next_token() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False, max_batch_tokens=64))
    session = cluster.open()
    cluster.submit(range(400), 2, session=session)
    cluster.run()
    forecast = cluster.control._outlook.forecast(0, 403)
    assert forecast is not None
    fresh = cluster.submit(range(400, 804), ttft_target_us=forecast - 1)
    assert isinstance(cluster.error(fresh), AtCapacity)
    turn = cluster.submit((1, 2), 2, session=session, ttft_target_us=forecast - 1)
    cluster.run()
    assert cluster.finish(turn) is FinishReason.LENGTH


def test_a_sessions_generation_is_cut_to_what_the_context_has_left() -> None:
    cluster = SmallCluster(usable_cells=64)
    session = cluster.open()
    cluster.submit(range(30), 10, session=session)
    cluster.run()
    turn = cluster.submit((1, 2), 500, session=session)
    cluster.run()
    assert cluster.finish(turn) is FinishReason.LENGTH
    assert len(cluster.tokens[turn]) == 64 - 42
    full = cluster.submit((1, 2), 500, session=session)
    assert isinstance(cluster.error(full), BadInput)
    assert str(cluster.error(full)) == "a history of 66 tokens and 1 more do not fit a context of 64 tokens"


def test_what_is_generated_in_a_session_counts_against_its_tenant() -> None:
    cluster = SmallCluster(max_sequences=1)
    cluster.submit(LONG, 50)
    session = cluster.open(tenant="acme")
    cluster.submit((1, 2), session=session)
    assert [one.tenant for one in cluster.control.listed(10)] == ["acme", ""]


def test_many_are_looked_up_at_once_as_each_is_alone() -> None:
    cluster = SmallCluster(max_sequences=2)
    cluster.submit(LONG, 9, name="runs", priority=5)
    session = cluster.open()
    names = [cluster.submit((n, 2), 3, priority=n % 3, name=f"n{n}") for n in range(5)]
    cluster.submit((8, 8), 3, name="a", siblings=[("b", 1), ("c", 2)])
    cluster.submit((9, 9), 3, name="turn", session=session)
    everyone = [GenerationId(name) for name in (*names, "c", "a", "b", "turn", "runs", "nobody")]
    found = cluster.control.places(everyone)
    assert set(found) == set(everyone) - {"nobody"}
    for name, place in found.items():
        assert place == where(cluster, name)
    assert {one.generation: one.whereabouts for one in cluster.control.listed(100)} == found
