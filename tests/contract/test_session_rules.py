"""Sessions, rule by rule of the contract's (d), on the planner with fake workers."""

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, BadInput, UnknownId, WrongState
from microtome.planner.events import GiveUpWorker, StepDone
from microtome.planner.sessions import LAST_LIFE, LAST_SESSION_ID, Sessions, life_of
from microtome.planner.types import (
    CloneSequence,
    FinishReason,
    InputFlag,
    SessionId,
    StepResult,
    TruncateSequence,
    WorkerId,
)
from tests.support.small_cluster import SmallCluster, expected

PROMPT = (5, 6, 7, 8)


def spoken(cluster: SmallCluster, tokens: int = 3) -> tuple[int, list[int]]:
    """A session after one generation, and its transcript."""
    session = cluster.open()
    cluster.submit(PROMPT, tokens, session=session)
    cluster.run()
    return session, [*PROMPT, *expected(PROMPT, tokens)]


def test_D1_an_input_under_way_is_committed_though_its_generation_was_cancelled() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.cancel(cluster.submit(PROMPT, 9, session=session))
    assert cluster.length(session) == 4
    cluster.run()
    assert cluster.length(session) == 4
    assert cluster.cells_used() == 4


def test_D2_a_sampled_token_becomes_history_when_it_is_given_back() -> None:
    cluster = SmallCluster(PlannerConfig(plan_ahead=1))
    session = cluster.open()
    cluster.submit(PROMPT, 9, session=session)
    cluster.answer()
    assert (len(cluster.transcript(session)), cluster.length(session)) == (5, 4)
    cluster.answer()
    assert (len(cluster.transcript(session)), cluster.length(session)) == (6, 5)


def test_D3_nothing_is_delivered_after_a_stop_though_a_step_beyond_it_was_under_way() -> None:
    second = expected(PROMPT, 2)[1]
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9, stop_token_ids=(second,))
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 2)
    assert cluster.control.status().counters.overshoot_tokens == 1
    assert cluster.cells_used() == 0


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_D3_a_limit_reached_by_count_is_never_overshot(plan_ahead: int) -> None:
    cluster = SmallCluster(PlannerConfig(plan_ahead=plan_ahead))
    cluster.submit(PROMPT, 5)
    steps = cluster.run()
    assert cluster.control.status().counters.overshoot_tokens == 0
    assert steps == 5 + 1  # the last tells what ended


def test_D4_the_last_delivered_token_is_pending_and_not_committed() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    assert cluster.transcript(session) == transcript
    assert cluster.length(session) == len(transcript) - 1
    assert cluster.cells_used() == len(transcript) - 1


def test_D4_a_stop_that_was_overshot_leaves_the_same_session_as_one_that_was_not() -> None:
    second = expected(PROMPT, 2)[1]
    lengths = []
    for plan_ahead in (1, 2, 3):
        cluster = SmallCluster(PlannerConfig(plan_ahead=plan_ahead, prefix_cache=False))
        session = cluster.open()
        cluster.submit(PROMPT, 9, session=session, stop_token_ids=(second,))
        cluster.run()
        lengths.append((cluster.transcript(session), cluster.length(session), cluster.cells_used()))
    assert lengths == [([*PROMPT, *expected(PROMPT, 2)], 5, 5)] * 3


def test_D5_the_next_generation_runs_the_pending_token_before_the_callers_own() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    name = cluster.submit((9, 10), 3, session=session)
    plan = cluster.plans["w0"][0]
    assert (list(plan.starts), list(plan.widths)) == ([len(transcript) - 1], [3])
    assert list(plan.tokens) == [transcript[-1], 9, 10]
    assert list(plan.flags) == [InputFlag.WANTS_OUTPUT]
    cluster.run()
    assert cluster.tokens[name] == expected([*transcript, 9, 10], 3)
    assert cluster.usage(name).prompt_tokens == 2


def test_D6_a_rewind_drops_history_and_the_next_generation_starts_there() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    answer = cluster.rewind(session, 3)
    assert (answer.error, answer.length) == (None, 3)
    assert cluster.cells_used() == 3
    name = cluster.submit((9,), 2, session=session)
    told, run = cluster.plans["w0"]
    assert TruncateSequence(run.sequences[0], 3) in told.ops
    assert list(run.tokens) == [9]
    cluster.run()
    assert cluster.tokens[name] == expected([*transcript[:3], 9], 2)


def test_D6_a_rewind_to_the_length_itself_drops_the_pending_token_only() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    cluster.rewind(session, len(transcript) - 1)
    assert cluster.transcript(session) == transcript[:-1]
    assert cluster.length(session) == len(transcript) - 1


@pytest.mark.parametrize("position", [-1, 7])
def test_D6_a_rewind_beyond_the_committed_length_is_refused(position: int) -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    assert len(transcript) - 1 == 6
    assert isinstance(cluster.rewind(session, position).error, BadInput)
    assert cluster.transcript(session) == transcript


def test_D6_a_rewind_while_generating_is_refused() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, session=session)
    assert isinstance(cluster.rewind(session, 2).error, WrongState)


def test_D8_a_session_that_is_not_empty_cannot_be_rewound_to_0() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    assert isinstance(cluster.rewind(session, 0).error, BadInput)
    assert cluster.transcript(session) == transcript
    assert cluster.rewind(cluster.open(), 0).error is None


def test_D9_reaching_the_limit_exactly_is_allowed_and_one_more_is_refused() -> None:
    cluster = SmallCluster(max_session_tokens=12)
    assert isinstance(cluster.error(cluster.submit(PROMPT, 9)), BadInput)
    name = cluster.submit(PROMPT, 8)
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 8)


def test_D9_the_limit_counts_a_sessions_whole_history_and_its_generation_is_cut_there() -> None:
    cluster = SmallCluster(max_session_tokens=12)
    session, said = spoken(cluster, 3)
    name = cluster.submit((1, 2), 400, session=session)
    cluster.run()
    assert cluster.finish(name) is FinishReason.LENGTH
    assert cluster.tokens[name] == expected([*said, 1, 2], 3)
    assert len(cluster.transcript(session)) == 12
    assert isinstance(cluster.error(cluster.submit((1,), 1, session=session)), BadInput)
    assert cluster.length(session) == 11


def test_D10_a_refused_generation_changes_nothing_of_its_session() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    for bad in ((), (5000,)):
        assert isinstance(cluster.error(cluster.submit(bad, session=session)), BadInput)
        assert cluster.transcript(session) == transcript
        assert cluster.length(session) == len(transcript) - 1


def test_D11_session_ids_grow_by_one_and_are_never_used_again() -> None:
    cluster = SmallCluster()
    first, second = cluster.open(), cluster.open()
    cluster.close(first)
    cluster.close(second)
    clone_source = cluster.open()
    assert (first, second, clone_source) == (1, 2, 3)
    assert cluster.clone(clone_source).session == 4


def test_D11_after_the_largest_id_opening_is_refused_for_good() -> None:
    sessions = Sessions(max_opened=4)
    sessions.restore(SessionId(LAST_SESSION_ID), "", "", opened=True)
    for _ in range(2):
        with pytest.raises(AtCapacity, match="session ids"):
            sessions.open("", "", opened=True)


# holds B7
def test_D11_a_driver_that_lives_again_gives_none_of_its_earlier_ids() -> None:
    earlier, later = Sessions(max_opened=9), Sessions(max_opened=9)
    given = [earlier.open("", "", opened=True, life=life).id for life in (1, LAST_LIFE)]
    given.append(earlier.clone(earlier.get(given[0]), None, life=1).id)
    later.restore(given[0], "", "", opened=True)
    fresh = [later.open("", "", opened=True, life=2).id for _ in range(4)]
    fresh.append(later.open("", "", opened=False).id)
    assert len({*given, *fresh}) == 8
    assert [life_of(session) for session in (*given, *fresh)] == [1, LAST_LIFE, 1, 2, 2, 2, 2, 0]
    assert max(given) <= LAST_SESSION_ID


def test_D12_opening_beyond_the_capacity_is_refused_and_clones_count() -> None:
    cluster = SmallCluster(PlannerConfig(max_sessions=2))
    source = cluster.open()
    assert cluster.clone(source).session == 2
    assert isinstance(cluster.clone(source).error, AtCapacity)
    cluster.close(source)
    assert cluster.open() == 3


def test_D12_a_session_that_nobody_uses_is_closed_in_its_time_and_one_that_generates_is_not() -> None:
    cluster = SmallCluster(PlannerConfig(max_sessions=4, session_idle_ms=1000))
    idle, _ = spoken(cluster)
    source, busy = cluster.open(), cluster.open()
    cluster.now_us = 500_000
    twin = cluster.clone(source).session
    assert twin is not None
    running = cluster.submit(PROMPT, 9, session=busy)
    cluster.tick(999_999)
    assert cluster.control.status().sessions == 4
    assert cluster.cells_used() > 0
    cluster.tick(1_000_000)
    assert isinstance(cluster.rewind(idle, 1).error, UnknownId)
    assert cluster.clone(source).error is None  # the first clone was its last use
    cluster.tick(1_700_000)
    assert isinstance(cluster.close(twin).error, UnknownId)
    cluster.now_us = 2_000_000
    cluster.run()
    assert cluster.tokens[running] == expected(PROMPT, 9)
    cluster.tick(2_900_000)
    assert cluster.control.status().sessions == 1
    cluster.tick(3_000_000)
    assert cluster.control.status().sessions == 0
    assert cluster.cells_used() == 0


def test_D12_no_session_is_closed_for_being_idle_where_that_is_switched_off() -> None:
    cluster = SmallCluster(PlannerConfig(session_idle_ms=0))
    session, history = spoken(cluster)
    cluster.tick(10**15)
    assert cluster.transcript(session) == history


def test_D12_a_restored_session_is_closed_too_when_nobody_comes_for_it() -> None:
    cluster = SmallCluster(PlannerConfig(session_idle_ms=1000))
    spoken(cluster)
    cluster.restart_driver()
    cluster.tick(999_999)
    assert cluster.control.status().sessions == 1
    cluster.tick(1_000_000)
    assert cluster.control.status().sessions == 0
    assert cluster.cells_used() == 0


def test_D13_closing_frees_cells_and_a_second_close_is_an_unknown_id() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False))
    session, _ = spoken(cluster)
    assert cluster.cells_used() == 6
    assert cluster.close(session).error is None
    assert cluster.cells_used() == 0
    assert isinstance(cluster.close(session).error, UnknownId)
    cluster.run()
    assert cluster.executors["w0"].snapshot() == ()


def test_D14_sessions_of_a_failed_step_are_rebuilt_and_go_on() -> None:
    cluster = SmallCluster(workers=2)
    session = cluster.open()
    name = cluster.submit(PROMPT, 9, session=session)
    at = next(w for w, plans in cluster.plans.items() if plans)
    cluster.executors[at].fail_at = 3
    for _ in range(3):
        told = cluster.answer(at)
    assert any(isinstance(i, GiveUpWorker) for i in told)
    cluster.plans[at].clear()
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9)
    again = cluster.submit((1,), 2, session=session)
    cluster.run()
    assert cluster.tokens[again] == expected([*PROMPT, *expected(PROMPT, 9), 1], 2)


@pytest.mark.parametrize("tokens", [(), (1, 2), (1000,), (-1,)])
def test_D15_a_malformed_answer_fences_the_worker_and_delivers_nothing(tokens: tuple[int, ...]) -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT)
    plan = cluster.plans["w0"].popleft()
    result = StepResult(incarnation=plan.incarnation, step=plan.step, tokens=tokens)
    told = cluster.handle(StepDone(at_us=0, worker=WorkerId("w0"), result=result))
    assert [type(i) for i in told] == [GiveUpWorker]
    assert cluster.tokens.get(name, []) == []
    cluster.join()
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT)


def test_D16_a_refused_step_leaves_every_session_sound() -> None:
    cluster = SmallCluster(refuse_at=3)
    names = [cluster.submit((n, *PROMPT), 6) for n in range(5)]
    cluster.run()
    for n, name in enumerate(names):
        assert cluster.tokens[name] == expected((n, *PROMPT), 6)
    assert cluster.control.status().counters.failed_steps == 2  # it, and the one sent behind it


def test_D17_a_clone_shares_the_prefix_and_neither_gains_the_others_tokens() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    twin = cluster.clone(session, 5).session
    assert twin is not None
    one, other = cluster.submit((1,), 3, session=session), cluster.submit((2,), 3, session=twin)
    plan = cluster.plans["w0"][-1]
    assert any(isinstance(op, CloneSequence) and op.upto == 5 for p in cluster.plans["w0"] for op in p.ops)
    assert list(plan.widths)[-1] == 1  # the clone's own token alone
    cluster.run()
    assert cluster.tokens[one] == expected([*transcript, 1], 3)
    assert cluster.tokens[other] == expected([*transcript[:5], 2], 3)


def test_D17_a_clone_has_nothing_pending() -> None:
    cluster = SmallCluster()
    session, transcript = spoken(cluster)
    twin = cluster.clone(session)
    assert twin.length == len(transcript) - 1
    assert cluster.transcript(twin.session or 0) == transcript[:-1]


@pytest.mark.parametrize("upto", [-1, 7, 8])
def test_D18_a_clone_beyond_the_committed_length_is_refused(upto: int) -> None:
    cluster = SmallCluster()
    session, _ = spoken(cluster)
    assert isinstance(cluster.clone(session, upto).error, BadInput)
    assert cluster.control.status().sessions == 1


def test_D18_a_clone_of_an_unknown_session_is_refused() -> None:
    assert isinstance(SmallCluster().clone(9).error, UnknownId)


def test_D19_a_clone_may_be_asked_for_while_the_source_generates() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 9, session=session)
    for _ in range(4):
        cluster.answer()
    twin = cluster.clone(session)
    said = [*PROMPT, *cluster.tokens[name]][: twin.length]
    assert twin.length == 7
    cluster.close(session)  # a clone ordered before the source's close succeeds
    assert cluster.finish(name) is FinishReason.CANCELLED
    other = cluster.submit((2,), 3, session=twin.session)
    cluster.run()
    assert cluster.tokens[other] == expected([*said, 2], 3)


def test_D20_the_empty_prefix_gives_an_empty_session_that_works() -> None:
    cluster = SmallCluster()
    session, _ = spoken(cluster)
    twin = cluster.clone(session, 0)
    assert twin.length == 0
    name = cluster.submit(PROMPT, 2, session=twin.session)
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 2)


def test_a_session_works_on_after_its_idle_cells_were_given_to_others() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False), usable_cells=16)
    session, transcript = spoken(cluster)
    other = cluster.submit(range(10), 4)
    cluster.run()
    assert cluster.tokens[other] == expected(range(10))
    assert cluster.cells_used() == 0  # the idle session gave way
    name = cluster.submit((1,), 2, session=session)
    cluster.run()
    assert cluster.tokens[name] == expected([*transcript, 1], 2)


def test_a_generation_asked_for_while_the_last_one_settles_waits_for_it() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    second = expected(PROMPT, 2)[1]
    cluster.submit(PROMPT, 9, session=session, stop_token_ids=(second,))
    cluster.answer()
    cluster.answer()  # the stop; one step beyond it is under way
    name = cluster.submit((3,), 2, session=session)
    assert cluster.control.status().waiting == 1
    cluster.run()
    assert cluster.tokens[name] == expected([*PROMPT, *expected(PROMPT, 2), 3], 2)
