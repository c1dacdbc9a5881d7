"""The decode-first scheduler, rule by rule. Without priorities and tenants, the rules hold for every policy."""

import pytest

from microtome.planner.errors import BadConfig
from microtome.planner.policies import POLICIES
from microtome.planner.scheduler import Limits, Scheduler
from microtome.planner.types import Batch, Input, SessionId
from tests.support.builders import chunks, decode, prefill


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def scheduler(policy: str) -> Scheduler:
    """Room for 4 decodes and one full chunk of 8."""
    return POLICIES[policy](max_batch_tokens=12, max_decodes=4, max_prefill_tokens=8)


def shape(batch: Batch) -> list[tuple[int, int, int]]:
    return [(item.session, item.start, item.width) for item in batch]


def sessions(batch: Batch) -> list[int]:
    return [item.session for item in batch]


# --- limits ---


def test_C1_the_default_limits_are_544_tokens_32_decodes_and_chunks_of_256() -> None:
    limits = Limits()
    assert (limits.max_batch_tokens, limits.max_decodes, limits.max_prefill_tokens) == (544, 32, 256)


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_decodes", "max_prefill_tokens"])
def test_C2_a_limit_of_zero_is_refused(policy: str, name: str) -> None:
    limits = {"max_batch_tokens": 288, "max_decodes": 32, "max_prefill_tokens": 256, name: 0}
    with pytest.raises(BadConfig, match=f"{name} 0 is below 1"):
        POLICIES[policy](**limits)


def test_C2_as_many_decodes_as_the_budget_are_refused() -> None:
    with pytest.raises(BadConfig, match="max_decodes 32 >= max_batch_tokens 32"):
        Limits(max_batch_tokens=32, max_decodes=32, max_prefill_tokens=1)


def test_C2_the_floor_under_the_budget_is_exact() -> None:
    Limits(max_batch_tokens=288, max_decodes=32, max_prefill_tokens=256)
    with pytest.raises(BadConfig, match="max_prefill_tokens 256 > max_batch_tokens 287 - max_decodes 32"):
        Limits(max_batch_tokens=287, max_decodes=32, max_prefill_tokens=256)


def test_C2_a_huge_budget_is_fine(policy: str) -> None:
    scheduler = POLICIES[policy](max_batch_tokens=2**80, max_decodes=2**70, max_prefill_tokens=2**64)
    assert scheduler.submit([prefill(1, 2**64), decode(2)])
    assert sessions(scheduler.next_batch()) == [2, 1]


# --- submission ---


def test_B2_a_prefill_of_one_token_waits_as_prefill(scheduler: Scheduler) -> None:
    assert scheduler.submit([prefill(1, 1), decode(2), decode(3)])
    assert sessions(scheduler.next_batch(max_tokens=2)) == [2, 3]
    assert scheduler.next_batch() == (prefill(1, 1),)


@pytest.mark.parametrize(
    "bad",
    [
        prefill(1, 0, start=4),
        prefill(1, -1, start=4),
        prefill(1, 9, start=4),
        prefill(2, 3, start=5),
        decode(3, start=7),
        prefill(1, 2, start=0),
    ],
    ids=["empty", "negative", "wider than a chunk", "queued prefill", "queued decode", "twice in the group"],
)
def test_C3_one_bad_input_rejects_its_whole_group_and_queues_nothing(scheduler: Scheduler, bad: Input) -> None:
    assert scheduler.submit([prefill(2, 3, start=5), decode(3, start=7)])
    assert not scheduler.submit([prefill(1, 4), decode(4), bad])
    assert shape(scheduler.next_batch()) == [(3, 7, 1), (2, 5, 3)]
    assert not scheduler.has_work


def test_C3_a_decode_of_more_than_one_token_is_rejected(scheduler: Scheduler) -> None:
    wide = decode(1)
    object.__setattr__(wide, "width", 2)
    assert not scheduler.submit([wide])
    assert not scheduler.has_work


def test_C3_an_empty_group_is_accepted_and_does_nothing(scheduler: Scheduler) -> None:
    assert scheduler.submit([])
    assert not scheduler.has_work


def test_C3_a_chunk_of_the_limit_is_accepted_and_never_split(scheduler: Scheduler) -> None:
    assert scheduler.submit([prefill(1, 8), prefill(1, 8, start=8)])
    assert shape(scheduler.next_batch()) == [(1, 0, 8)]
    assert shape(scheduler.next_batch()) == [(1, 8, 8)]


def test_C4_decodes_go_in_order_of_arrival(scheduler: Scheduler) -> None:
    for session in (3, 1, 2):
        assert scheduler.submit([decode(session)])
    assert sessions(scheduler.next_batch()) == [3, 1, 2]


def test_C4_a_session_enters_the_rotation_at_the_back_and_only_when_it_gains_a_queue(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 4))
    assert scheduler.submit(chunks(2, 4))
    assert scheduler.submit(chunks(1, 4, start=4))
    # Session 1 has one place, in front: no second one from its second group.
    assert shape(scheduler.next_batch()) == [(1, 0, 4), (2, 0, 4), (1, 4, 4)]


def test_C5_dispatch_frees_an_inputs_identity(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), prefill(2, 4)])
    assert not scheduler.submit([decode(1)])
    assert not scheduler.submit([prefill(2, 4)])
    scheduler.next_batch()
    assert scheduler.submit([decode(1), prefill(2, 4)])


def test_C5_dispatch_of_a_chunk_frees_its_identity_while_its_sessions_others_wait(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8, 8))
    assert shape(scheduler.next_batch()) == [(1, 0, 8)]
    assert not scheduler.submit([prefill(1, 8, start=8)])
    assert scheduler.submit([prefill(1, 8)])


def test_C5_cancelling_frees_an_inputs_identity(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), prefill(2, 4), decode(3)])
    scheduler.cancel(SessionId(1))
    scheduler.cancel(SessionId(2))
    assert scheduler.submit([decode(1), prefill(2, 4)])
    assert sessions(scheduler.next_batch()) == [3, 1, 2]


# --- forming a batch ---


def test_C6_a_batch_takes_one_decode_per_session_up_to_the_limit(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(session) for session in range(6)])
    assert sessions(scheduler.next_batch()) == [0, 1, 2, 3]
    assert sessions(scheduler.next_batch()) == [4, 5]


def test_C6_a_second_decode_of_a_session_waits_at_the_head_and_stops_nobody(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(1, 1), decode(2), decode(3), decode(4), decode(5)])
    assert shape(scheduler.next_batch()) == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 1)]
    assert shape(scheduler.next_batch()) == [(1, 1, 1), (5, 0, 1)]


def test_C6_second_decodes_return_in_order_of_arrival(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(2), decode(2, 1), decode(1, 1)])
    assert sessions(scheduler.next_batch()) == [1, 2]
    assert sessions(scheduler.next_batch()) == [2, 1]


def test_C7_prefill_spends_the_rest_of_the_budget_in_passes(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(9)])
    assert scheduler.submit(chunks(1, 3, 3, 3))
    assert scheduler.submit(chunks(2, 2))
    assert shape(scheduler.next_batch()) == [(9, 0, 1), (1, 0, 3), (2, 0, 2), (1, 3, 3), (1, 6, 3)]


def test_C8_a_session_that_decodes_in_the_batch_has_no_prefill_in_it(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), prefill(1, 2, start=1), prefill(2, 2)])
    assert shape(scheduler.next_batch()) == [(1, 0, 1), (2, 0, 2)]
    assert shape(scheduler.next_batch()) == [(1, 1, 2)]


def test_C8_a_chunk_that_does_not_fit_is_passed_by_smaller_ones_behind(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 7) + chunks(2, 6) + chunks(3, 5))
    assert sessions(scheduler.next_batch()) == [1, 3]
    assert sessions(scheduler.next_batch()) == [2]


def test_C9_after_a_pass_skipped_sessions_are_in_front_and_served_ones_at_the_back(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 5, 5) + chunks(2, 8) + chunks(3, 7) + chunks(4, 8))
    # 1 goes, 2 is skipped, 3 goes and spends the budget; 4 is never reached.
    assert shape(scheduler.next_batch()) == [(1, 0, 5), (3, 0, 7)]
    assert shape(scheduler.next_batch()) == [(2, 0, 8)]
    assert shape(scheduler.next_batch()) == [(4, 0, 8)]
    assert shape(scheduler.next_batch()) == [(1, 5, 5)]


def test_C10_a_lone_prompt_may_fill_a_batch_with_several_chunks(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 4, 4, 4, 4))
    assert shape(scheduler.next_batch()) == [(1, 0, 4), (1, 4, 4), (1, 8, 4)]


def test_C10_two_prompts_interleave(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 3, 3) + chunks(2, 3, 3))
    assert sessions(scheduler.next_batch()) == [1, 2, 1, 2]


def test_C10_a_long_prompt_cannot_keep_others_out(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, *[8] * 50))
    assert sessions(scheduler.next_batch()) == [1]
    assert scheduler.submit(chunks(2, 8))
    assert [sessions(scheduler.next_batch()) for _ in range(3)] == [[1], [2], [1]]


def test_C11_at_most_one_input_of_a_session_asks_for_output_in_a_batch(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 2, 2, 2))
    assert [item.wants_output for item in scheduler.next_batch()] == [False, False, True]
    assert scheduler.submit([decode(1, 6), decode(1, 7)])
    assert len(scheduler.next_batch()) == 1


def test_C11_positions_are_not_checked(scheduler: Scheduler) -> None:
    assert scheduler.submit([prefill(1, 2, start=9), prefill(1, 2, start=3)])
    assert shape(scheduler.next_batch()) == [(1, 9, 2), (1, 3, 2)]


def test_C12_decodes_come_before_prefill_and_no_batch_exceeds_the_budget(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(7, 8, 8) + [decode(session) for session in range(6)])
    assert shape(scheduler.next_batch()) == [*((session, 0, 1) for session in range(4)), (7, 0, 8)]
    assert shape(scheduler.next_batch()) == [(4, 0, 1), (5, 0, 1), (7, 8, 8)]


# --- cancel and clear ---


def test_C13_cancel_removes_and_returns_what_waits_of_a_session_once(scheduler: Scheduler) -> None:
    first, *rest = chunks(1, 8, 8, 8)
    assert scheduler.submit([first, *rest, decode(2)])
    assert scheduler.next_batch() == (decode(2), first)
    assert scheduler.cancel(first.session) == rest
    assert scheduler.cancel(first.session) == []
    assert scheduler.cancel(SessionId(2)) == []
    assert scheduler.cancel(SessionId(77)) == []


def test_C14_a_session_cancelled_and_back_before_the_next_batch_keeps_its_single_place(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 3, 3) + chunks(2, 3, 3))
    scheduler.cancel(SessionId(1))
    assert scheduler.submit(chunks(1, 3, 3))
    assert sessions(scheduler.next_batch()) == [1, 2, 1, 2]


def test_C15_cancelled_inputs_in_the_middle_disturb_nobody(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(2), decode(3), *chunks(4, 2), *chunks(5, 2), *chunks(6, 2)])
    scheduler.cancel(SessionId(2))
    scheduler.cancel(SessionId(5))
    assert scheduler.has_work
    assert sessions(scheduler.next_batch()) == [1, 3, 4, 6]
    assert not scheduler.has_work


def test_C15_nothing_but_cancelled_inputs_is_no_work(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), *chunks(2, 4, 4)])
    scheduler.cancel(SessionId(1))
    scheduler.cancel(SessionId(2))
    assert not scheduler.has_work
    assert scheduler.next_batch() == ()


def test_C16_clear_returns_everything_queued_and_nothing_dispatched(scheduler: Scheduler) -> None:
    waiting = [decode(1, 1), *chunks(3, 8, 8)]
    assert scheduler.submit([decode(1), *waiting, decode(2)])
    dispatched = scheduler.next_batch()
    cleared = scheduler.clear()
    assert sorted(map(repr, (*dispatched, *cleared))) == sorted(map(repr, (decode(1), decode(2), *waiting)))
    assert not scheduler.has_work
    assert scheduler.clear() == []


def test_C17_has_work_is_true_exactly_while_something_waits(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    assert scheduler.submit([decode(1), decode(1, 1)])
    assert scheduler.has_work
    scheduler.next_batch()
    assert scheduler.has_work
    scheduler.next_batch()
    assert not scheduler.has_work


def test_C18_every_accepted_input_comes_back_exactly_once(scheduler: Scheduler) -> None:
    accepted = [item for session in range(5) for item in chunks(session, 3, 8, 1)]
    accepted += [decode(session, 20) for session in range(3, 9)]
    assert scheduler.submit(accepted)
    back = [*scheduler.next_batch(), *scheduler.cancel(SessionId(2)), *scheduler.next_batch(), *scheduler.clear()]
    assert sorted(map(repr, back)) == sorted(map(repr, accepted))


def test_C18_a_batch_is_never_empty_while_something_waits(scheduler: Scheduler) -> None:
    assert scheduler.submit([item for session in range(20) for item in chunks(session, 8, 8)])
    batches = 0
    while scheduler.has_work:
        assert scheduler.next_batch()
        batches += 1
    assert batches == 40


def test_C19_positions_and_what_an_input_asks_for_do_not_change_the_batch(policy: str) -> None:
    batches = []
    for wants_output, start in ((False, 0), (True, 0), (True, 700)):
        scheduler = POLICIES[policy](max_batch_tokens=12, max_decodes=4, max_prefill_tokens=8)
        assert scheduler.submit(
            [prefill(s, w, start=start, wants_output=wants_output) for s, w in ((1, 5), (2, 8), (3, 6))]
        )
        assert scheduler.submit([decode(session, start) for session in (4, 5)])
        batches.append([[(item.session, item.width) for item in scheduler.next_batch()] for _ in range(3)])
    assert batches[0] == batches[1] == batches[2]


def test_C20_prefill_progresses_under_saturated_decodes(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(99, 8, 8, 8))
    for step in range(3):
        assert scheduler.submit([decode(session, step) for session in range(10)])
        batch = scheduler.next_batch()
        assert sessions(batch)[4:] == [99]
