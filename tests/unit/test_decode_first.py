"""What the policies promise beyond the contract: turns as in the simplest model, priorities, shares, a step target."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microtome.planner.decode_first import DecodeFirstScheduler
from microtome.planner.errors import BadConfig
from microtome.planner.scheduler import Behind, Limits, Scheduler, Standing
from microtome.planner.types import Batch, Input, Kind, SessionId
from tests.support.builders import chunks, decode

LIMITS = Limits(max_batch_tokens=12, max_decodes=4, max_prefill_tokens=8)


def sessions(batch: Batch) -> list[int]:
    return [item.session for item in batch]


class PassByPass:
    """The rotation as it is told: in passes; skipped sessions return to the front, served ones go to the back."""

    def __init__(self) -> None:
        self.decodes: list[Input] = []
        self.queues: dict[int, deque[Input]] = {}
        self.rotation: list[int] = []

    def submit(self, inputs: list[Input]) -> None:
        for item in inputs:
            if item.kind is Kind.DECODE:
                self.decodes.append(item)
            else:
                if item.session not in self.rotation:
                    self.rotation.append(item.session)
                self.queues.setdefault(item.session, deque()).append(item)

    def cancel(self, session: int) -> None:
        self.decodes = [item for item in self.decodes if item.session != session]
        self.queues.pop(session, None)  # its place in the rotation stays until the next batch

    def next_batch(self) -> Batch:
        self.rotation = [session for session in self.rotation if session in self.queues]
        batch: list[Input] = []
        for item in list(self.decodes):
            if len(batch) < LIMITS.max_decodes and item.session not in sessions(tuple(batch)):
                self.decodes.remove(item)
                batch.append(item)
        decoding = set(sessions(tuple(batch)))
        room = LIMITS.max_batch_tokens - len(batch)
        took = True
        while took and room:
            took = False
            skipped: list[int] = []
            served: list[int] = []
            rest = list(self.rotation)
            while rest and room:
                session = rest.pop(0)
                head = self.queues[session][0]
                if session in decoding or head.width > room:
                    skipped.append(session)
                    continue
                batch.append(self.queues[session].popleft())
                room -= head.width
                took = True
                if self.queues[session]:
                    served.append(session)
                else:
                    del self.queues[session]
            self.rotation = skipped + rest + served
        return tuple(batch)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 6), st.lists(st.integers(0, 8), min_size=1, max_size=5)),
            st.tuples(st.just("cancel"), st.integers(0, 6), st.none()),
            st.tuples(st.just("batch"), st.none(), st.none()),
        ),
        max_size=40,
    )
)
def test_batches_are_those_of_the_rotation_told_pass_by_pass(
    steps: list[tuple[str, int | None, list[int] | None]],
) -> None:
    scheduler, model = DecodeFirstScheduler(LIMITS), PassByPass()
    starts: Counter[int] = Counter()
    for verb, session, widths in [*steps, *[("batch", None, None)] * 20]:
        if verb == "batch":
            assert scheduler.next_batch() == model.next_batch()
            continue
        assert session is not None
        if verb == "cancel":
            scheduler.cancel(SessionId(session))
            model.cancel(session)
            continue
        group: list[Input] = []
        for width in widths or ():
            group += chunks(session, width, start=starts[session]) if width else [decode(session, starts[session])]
            starts[session] += max(width, 1)
        assert scheduler.submit(group)
        model.submit(group)


# --- priorities ---


def by_priority(ageing_steps: int = 8) -> DecodeFirstScheduler:
    return DecodeFirstScheduler(LIMITS, ageing_steps=ageing_steps)


def test_a_higher_priority_takes_its_turns_first() -> None:
    scheduler = by_priority()
    scheduler.admit(SessionId(2), priority=1)
    assert scheduler.submit(chunks(1, 8, 8) + chunks(2, 8, 8))
    assert [sessions(scheduler.next_batch()) for _ in range(4)] == [[2], [2], [1], [1]]


def test_a_higher_priority_decodes_first_where_not_all_fit() -> None:
    scheduler = by_priority()
    scheduler.admit(SessionId(9), priority=1)
    scheduler.admit(SessionId(1), priority=-1)
    assert scheduler.submit([decode(session) for session in (1, 2, 3, 4, 5, 9)])
    assert sessions(scheduler.next_batch()) == [9, 2, 3, 4]
    assert scheduler.submit([decode(session, 1) for session in (2, 3, 4, 9)])
    assert sessions(scheduler.next_batch()) == [9, 5, 2, 3]


@pytest.mark.parametrize("levels", [1, 3])
def test_a_level_of_priority_is_worth_as_many_steps_of_waiting_and_no_more(levels: int) -> None:
    scheduler = by_priority(ageing_steps=8)
    assert scheduler.submit(chunks(0, 8))
    waited = 0
    for step in range(1, 100):
        scheduler.admit(SessionId(step), priority=levels)
        assert scheduler.submit(chunks(step, 8))
        if sessions(scheduler.next_batch()) == [0]:
            break
        waited += 1
    assert 8 * levels <= waited <= 8 * levels + 1


def test_an_aged_decode_goes_before_fresh_ones_of_a_higher_priority() -> None:
    scheduler = by_priority(ageing_steps=5)
    assert scheduler.submit([decode(0)])
    for step in range(50):
        for session in range(1, 5):
            scheduler.admit(SessionId(session), priority=1)
        assert scheduler.submit([decode(session, step) for session in range(1, 5)])
        if step and 0 in sessions(scheduler.next_batch()):
            break
    assert 4 <= step <= 7


def test_a_session_ranked_anew_keeps_the_order_of_its_decodes() -> None:
    scheduler = by_priority()
    assert scheduler.submit([decode(1), *(decode(session) for session in range(2, 8))])
    scheduler.admit(SessionId(1), priority=50)
    assert scheduler.submit([decode(1, 1)])
    starts = [item.start for _ in range(4) for item in scheduler.next_batch() if item.session == 1]
    assert starts == [0, 1]


def test_standing_behind_a_later_session_of_higher_priority_says_so() -> None:
    scheduler = by_priority()
    assert scheduler.submit(chunks(1, 8))
    scheduler.admit(SessionId(2), priority=1)
    assert scheduler.submit(chunks(2, 8))
    assert scheduler.standing(SessionId(1)) == Standing(1, Behind.PRIORITY)
    assert scheduler.standing(SessionId(2)) == Standing(0, Behind.STEP_BUDGET)


def test_standing_behind_an_earlier_session_is_a_matter_of_the_step_budget_whatever_its_priority() -> None:
    scheduler = by_priority()
    scheduler.admit(SessionId(2), priority=1)
    assert scheduler.submit(chunks(2, 8) + chunks(1, 8))
    assert scheduler.standing(SessionId(1)) == Standing(1, Behind.STEP_BUDGET)


# --- shares ---


def fair(**weights: int) -> DecodeFirstScheduler:
    return DecodeFirstScheduler(LIMITS, tenant_weights=weights)


def test_a_tenant_that_floods_delays_itself() -> None:
    scheduler = fair()
    for session in range(50):
        scheduler.admit(SessionId(session), tenant="flood")
        assert scheduler.submit(chunks(session, 8))
    scheduler.next_batch()
    scheduler.admit(SessionId(99), tenant="small")
    assert scheduler.submit(chunks(99, 8, 8))
    assert [sessions(scheduler.next_batch())[0] for _ in range(3)].count(99) == 2


def served_tokens(scheduler: Scheduler, tenant_of: dict[int, str], steps: int) -> Counter[str]:
    served: Counter[str] = Counter()
    for _ in range(steps):
        for item in scheduler.next_batch():
            served[tenant_of[item.session]] += item.width
    return served


@pytest.mark.parametrize("weight", [1, 3])
def test_tenants_that_keep_asking_get_prefill_by_their_weights(weight: int) -> None:
    scheduler = fair(a=weight)
    tenant_of = {1: "a", 2: "b", 3: "b", 4: "b"}
    for session, tenant in tenant_of.items():
        scheduler.admit(SessionId(session), tenant=tenant)
        assert scheduler.submit(chunks(session, *[4] * 400))
    served = served_tokens(scheduler, tenant_of, steps=100)
    assert served["a"] == pytest.approx(weight * served["b"], rel=0.03)


def test_tenants_that_keep_asking_get_decodes_by_their_weights() -> None:
    scheduler = fair(a=2)
    tenant_of = {session: "a" if session < 10 else "b" for session in range(40)}
    for session, tenant in tenant_of.items():
        scheduler.admit(SessionId(session), tenant=tenant)
        assert scheduler.submit([decode(session, at) for at in range(80)])
    served = served_tokens(scheduler, tenant_of, steps=150)
    assert served["a"] == pytest.approx(2 * served["b"], rel=0.03)


def test_tenants_share_the_decodes_of_one_batch() -> None:
    scheduler = fair()
    for session in range(8):
        scheduler.admit(SessionId(session), tenant="a" if session < 4 else "b")
    assert scheduler.submit([decode(session) for session in range(8)])
    assert sessions(scheduler.next_batch()) == [0, 4, 1, 5]


def test_what_a_tenant_decodes_counts_against_its_prefill() -> None:
    scheduler = fair()
    for session in range(3):
        scheduler.admit(SessionId(session), tenant="decoder")
    scheduler.admit(SessionId(50), tenant="decoder")
    scheduler.admit(SessionId(60), tenant="reader")
    assert scheduler.submit(chunks(50, *[8] * 40))
    assert scheduler.submit(chunks(60, *[8] * 40))
    served: Counter[int] = Counter()
    for step in range(30):
        assert scheduler.submit([decode(session, step) for session in range(3)])
        served.update(item.session for item in scheduler.next_batch() if item.kind is Kind.PREFILL)
    # 8 tokens of prefill a step are shared; the decoder has had 3 a step already: 5.5 and 2.5 of the 11 make it even.
    assert served[60] > 2 * served[50] > 0


def test_a_tenant_that_was_away_has_saved_up_a_bounded_credit_only() -> None:
    scheduler = fair()
    scheduler.admit(SessionId(1), tenant="steady")
    scheduler.admit(SessionId(2), tenant="away")
    assert scheduler.submit(chunks(2, 8))
    assert scheduler.submit(chunks(1, *[8] * 3000))
    for _ in range(1000):
        scheduler.next_batch()
    assert scheduler.submit(chunks(2, *[8] * 1000, start=8))
    turns = [sessions(scheduler.next_batch())[0] for _ in range(60)]
    # Eight full batches of 12 tokens are 12 chunks, and up to a batch on either side; after that the two alternate.
    assert 12 <= turns.index(1) <= 16
    assert turns[20:].count(1) == 20


def test_inside_a_tenant_sessions_take_turns() -> None:
    scheduler = fair()
    for session in (1, 2):
        scheduler.admit(SessionId(session), tenant="a")
        assert scheduler.submit(chunks(session, 4, 4))
    assert sessions(scheduler.next_batch()) == [1, 2, 1]


def test_inside_a_tenant_its_priorities_rank_its_own_sessions_only() -> None:
    scheduler = DecodeFirstScheduler(LIMITS, tenant_weights={}, ageing_steps=100)
    for session, tenant, priority in ((1, "a", 0), (2, "a", 9), (3, "b", 0)):
        scheduler.admit(SessionId(session), tenant=tenant, priority=priority)
        assert scheduler.submit(chunks(session, 8, 8))
    assert [sessions(scheduler.next_batch())[0] for _ in range(6)] == [2, 3, 2, 3, 1, 1]


def test_a_wide_chunk_of_the_tenant_whose_turn_it_is_is_passed_by_one_that_fits() -> None:
    scheduler = fair()
    for session, tenant in ((1, "a"), (2, "b"), (3, "c")):
        scheduler.admit(SessionId(session), tenant=tenant)
    assert scheduler.submit(chunks(1, 8) + chunks(2, 8) + chunks(3, 4))
    assert sessions(scheduler.next_batch()) == [1, 3]
    assert sessions(scheduler.next_batch()) == [2]


def test_what_was_given_back_is_not_charged_twice() -> None:
    scheduler = fair()
    for session, tenant in ((1, "a"), (2, "b")):
        scheduler.admit(SessionId(session), tenant=tenant)
        assert scheduler.submit(chunks(session, *[4] * 20))
    batch = scheduler.next_batch()
    assert sessions(batch) == [1, 2, 1]
    scheduler.put_back([item for item in batch if item.session == 1])
    # Charged for its eight tokens, the first tenant would come behind the second, which has had four.
    assert sessions(scheduler.next_batch())[0] == 1


def test_standing_behind_another_tenant_says_so() -> None:
    scheduler = fair()
    scheduler.admit(SessionId(1), tenant="a")
    scheduler.admit(SessionId(2), tenant="b")
    assert scheduler.submit(chunks(1, 8, 8))
    scheduler.next_batch()
    assert scheduler.submit(chunks(2, 8))
    assert scheduler.standing(SessionId(1)) == Standing(1, Behind.TENANT_SHARE)


@pytest.mark.parametrize("weight", [0, -1, 2**21])
def test_a_weight_out_of_range_is_refused(weight: int) -> None:
    with pytest.raises(BadConfig, match=f"tenant 'a' has weight {weight}"):
        fair(a=weight)


# --- a step target ---


def with_target(tokens: int, patience_steps: int = 3) -> DecodeFirstScheduler:
    return DecodeFirstScheduler(LIMITS, target_step_tokens=tokens, patience_steps=patience_steps)


def test_prefill_joins_decodes_up_to_the_target_only() -> None:
    scheduler = with_target(6)
    assert scheduler.submit([decode(1), decode(2), *chunks(3, 3, 3, 3)])
    assert sessions(scheduler.next_batch()) == [1, 2, 3]


def test_without_decodes_prefill_has_the_whole_budget() -> None:
    scheduler = with_target(6)
    assert scheduler.submit(chunks(3, 3, 3, 3))
    assert sessions(scheduler.next_batch()) == [3, 3, 3]


def test_a_chunk_that_never_fits_the_target_goes_when_patience_ends_and_again_after_as_long() -> None:
    scheduler = with_target(6, patience_steps=3)
    assert scheduler.submit(chunks(9, 8, 8))
    with_prefill = []
    for step in range(10):
        assert scheduler.submit([decode(1, step), decode(2, step)])
        if 9 in sessions(scheduler.next_batch()):
            with_prefill.append(step)
    assert with_prefill == [3, 7]


def test_patience_begins_anew_when_the_chunk_whose_turn_it_is_fits() -> None:
    scheduler = with_target(6, patience_steps=3)
    wide = 0
    for step in range(12):
        if step % 3 == 0:
            scheduler.cancel(SessionId(9))
            assert scheduler.submit(chunks(8, 5, start=step))
        elif step % 3 == 1:
            assert scheduler.submit(chunks(9, 8))
        assert scheduler.submit([decode(1, step)])
        wide += 9 in sessions(scheduler.next_batch())
    assert wide == 0


def test_a_chunk_that_fits_the_target_passes_one_that_does_not() -> None:
    scheduler = with_target(6, patience_steps=3)
    assert scheduler.submit([decode(1), *chunks(8, 8), *chunks(9, 5)])
    assert sessions(scheduler.next_batch()) == [1, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ageing_steps": 0}, "ageing_steps 0 is below 1"),
        ({"patience_steps": 0}, "patience_steps 0 is below 1"),
        ({"target_step_tokens": -1}, "target_step_tokens -1 is below 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        DecodeFirstScheduler(LIMITS, **settings)  # type: ignore[arg-type]
