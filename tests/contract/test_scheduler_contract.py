"""What every scheduler owes its caller, whatever its policy: under priorities, tenants, a step target, and give-backs.

The state machine keeps the simplest possible account of what waits, and checks every answer against it.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microtome.planner.policies import POLICIES
from microtome.planner.scheduler import Behind, Scheduler, Standing
from microtome.planner.types import Batch, Input, Kind, Position, SessionId
from tests.support.builders import chunks, decode, prefill

BUDGET, DECODES, CHUNK = 12, 4, 8


@pytest.fixture(params=POLICIES)
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    return POLICIES[request.param](max_batch_tokens=BUDGET, max_decodes=DECODES, max_prefill_tokens=CHUNK)


def test_refused_submit_queues_nothing(scheduler: Scheduler) -> None:
    assert not scheduler.submit([prefill(session=1, width=4), prefill(session=1, width=9)])
    assert scheduler.next_batch() == ()


def test_cancel_returns_only_what_still_waits(scheduler: Scheduler) -> None:
    running, waiting = decode(session=1), decode(session=1, start=1)
    assert scheduler.submit([running, waiting])
    assert scheduler.next_batch() == (running,)  # one decode per session and step
    assert scheduler.cancel(running.session) == [waiting]


def test_cancel_returns_a_sessions_inputs_in_order(scheduler: Scheduler) -> None:
    own = chunks(1, 8, 8, 3)
    assert scheduler.submit(own)
    assert scheduler.cancel(own[0].session) == own


def test_dismiss_drops_what_waits_and_forgets_the_rank(scheduler: Scheduler) -> None:
    scheduler.admit(SessionId(1), priority=-5, tenant="flood")
    assert scheduler.submit(chunks(1, 8))
    assert scheduler.dismiss(SessionId(1)) == chunks(1, 8)
    assert scheduler.dismiss(SessionId(1)) == []
    assert scheduler.submit(chunks(1, 8) + chunks(2, 8))
    assert scheduler.next_batch() == tuple(chunks(1, 8))


def test_dismiss_keeps_no_place(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8))
    scheduler.dismiss(SessionId(1))
    assert scheduler.submit(chunks(2, 8) + chunks(1, 8))
    assert scheduler.next_batch() == tuple(chunks(2, 8))


def test_a_batch_put_back_comes_again_unchanged_and_first(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(2), *chunks(3, 5, 5), *chunks(4, 3)])
    batch = scheduler.next_batch()
    assert scheduler.submit(chunks(6, 2))
    scheduler.put_back(batch)
    assert scheduler.next_batch() == (*batch, *chunks(6, 2))


def test_several_chunks_of_a_session_put_back_keep_their_order(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 4, 3, 4, 8))
    batch = scheduler.next_batch()
    assert len(batch) == 3
    scheduler.put_back(batch)
    assert scheduler.next_batch() == batch


@pytest.mark.parametrize("priority", [-50, 50])
def test_a_decode_put_back_comes_before_its_sessions_next_however_it_ranks_by_then(
    scheduler: Scheduler, priority: int
) -> None:
    assert scheduler.submit([decode(1), decode(1, 1), *(decode(session) for session in range(2, 9))])
    batch = scheduler.next_batch()
    scheduler.admit(SessionId(1), priority=priority)
    scheduler.put_back([item for item in batch if item.session == 1])
    starts = [item.start for _ in range(4) for item in scheduler.next_batch() if item.session == 1]
    assert starts == [0, 1]


def test_two_batches_put_back_newest_first_come_again_in_their_order(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(1, 1), decode(2), decode(2, 1), *chunks(3, 8, 8)])
    first, second = scheduler.next_batch(), scheduler.next_batch()
    scheduler.put_back(second)
    scheduler.put_back(first)
    assert scheduler.next_batch() == first
    assert scheduler.next_batch() == second


def test_inputs_of_a_batch_that_found_no_cell_can_be_put_back_alone(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(2), *chunks(3, 6, 2)])
    batch = scheduler.next_batch()
    scheduler.put_back([batch[1], batch[2]])
    assert scheduler.next_batch() == batch[1:3]


def test_an_input_put_back_can_be_cancelled_in_front_of_what_waited(scheduler: Scheduler) -> None:
    own = chunks(1, 8, 8)
    assert scheduler.submit(own)
    scheduler.put_back(scheduler.next_batch())
    assert scheduler.cancel(SessionId(1)) == own


def test_max_tokens_bounds_one_batch_only(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), decode(2), decode(3), *chunks(4, 2)])
    assert scheduler.next_batch(max_tokens=0) == ()
    assert scheduler.next_batch(max_tokens=2) == (decode(1), decode(2))
    assert scheduler.next_batch(max_tokens=2) == (decode(3),)
    assert scheduler.next_batch() == tuple(chunks(4, 2))


def test_skipped_tokens_wait_no_more_and_the_turn_stays(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8, 8, 8) + chunks(2, 8))
    scheduler.skip(SessionId(1), 11)
    assert scheduler.waiting_tokens == 21
    rest = [prefill(1, 5, 11), prefill(1, 8, 16, wants_output=True)]
    assert scheduler.next_batch() == (rest[0],)  # the second session's chunk does not fit beside it
    assert scheduler.cancel(SessionId(1)) == rest[1:]


def test_skipping_what_does_not_wait_does_nothing(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8))
    scheduler.skip(SessionId(2), 5)
    scheduler.skip(SessionId(1), 0)
    assert scheduler.cancel(SessionId(1)) == chunks(1, 8)


def test_tokens_that_need_not_run_make_room_for_others_in_turn(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8, 8) + chunks(2, 7) + chunks(3, 5) + chunks(4, 2))
    assert scheduler.next_batch() == (*chunks(1, 8, 8)[:1], *chunks(4, 2)[:1])
    assert scheduler.more([]) == ()
    assert scheduler.more([(SessionId(1), 6)]) == (*chunks(2, 7),)
    assert scheduler.more([(SessionId(2), 4)]) == (*chunks(3, 5),)
    assert scheduler.waiting_tokens == 8


def test_more_prefill_never_joins_its_own_sessions_decode(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), *chunks(1, 3, start=1), *chunks(2, 8)])
    assert scheduler.next_batch() == (decode(1), *chunks(2, 8))
    assert scheduler.more([(SessionId(2), 8)]) == ()
    assert scheduler.next_batch() == tuple(chunks(1, 3, start=1))


def test_waiting_tokens_counts_what_waits(scheduler: Scheduler) -> None:
    assert scheduler.submit([decode(1), *chunks(2, 8, 8), *chunks(3, 8)])
    assert scheduler.waiting_tokens == 25
    batch = scheduler.next_batch()
    assert scheduler.waiting_tokens == 16
    scheduler.put_back(batch)
    scheduler.cancel(SessionId(2))
    assert scheduler.waiting_tokens == 9
    scheduler.clear()
    assert scheduler.waiting_tokens == 0


def test_standing_tells_the_sessions_ahead(scheduler: Scheduler) -> None:
    assert scheduler.submit(chunks(1, 8) + chunks(2, 8) + chunks(3, 8) + [decode(4)])
    assert scheduler.standing(SessionId(3)) == Standing(2, Behind.STEP_BUDGET)
    assert scheduler.standing(SessionId(1)) == Standing(0, Behind.STEP_BUDGET)
    assert scheduler.standing(SessionId(4)) == Standing(0, Behind.STEP_BUDGET)
    assert scheduler.standing(SessionId(5)) is None


def run_dry(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(scheduler.next_batch())
        assert batches[-1]
    return batches


@settings(deadline=None)
@given(
    work=st.lists(
        st.tuples(
            st.integers(-3, 3), st.sampled_from("abc"), st.lists(st.integers(1, CHUNK), min_size=1), st.integers(0, 2)
        ),
        max_size=12,
    )
)
def test_with_equal_priorities_and_one_tenant_all_policies_hand_out_the_same_batches(
    work: list[tuple[int, str, list[int], int]],
) -> None:
    runs = []
    for build in POLICIES.values():
        scheduler = build(max_batch_tokens=BUDGET, max_decodes=DECODES, max_prefill_tokens=CHUNK)
        for session, (_, _, widths, decodes) in enumerate(work):
            scheduler.admit(SessionId(session), priority=3, tenant="one")
            scheduler.submit([*chunks(session, *widths), *(decode(100 + session, at) for at in range(decodes))])
        runs.append(run_dry(scheduler))
    assert all(batches == runs[0] for batches in runs)


@pytest.mark.parametrize("target", [None, 6])
def test_nothing_starves_however_much_more_important_work_comes(policy_target: Scheduler) -> None:
    scheduler = policy_target
    scheduler.admit(SessionId(0), priority=0, tenant="small")
    assert scheduler.submit(chunks(0, 8))
    for step in range(1, 200):
        flood = SessionId(step)
        scheduler.admit(flood, priority=2, tenant="flood")
        assert scheduler.submit([*chunks(step, 8, 8), *(decode(1000 + n, step) for n in range(DECODES))])
        if any(item.session == 0 for item in scheduler.next_batch()):
            return
    raise AssertionError("the session of low priority never ran")


@pytest.fixture(params=POLICIES)
def policy_target(request: pytest.FixtureRequest, target: int | None) -> Scheduler:
    return POLICIES[request.param](
        max_batch_tokens=BUDGET,
        max_decodes=DECODES,
        max_prefill_tokens=CHUNK,
        target_step_tokens=target,
        patience_steps=3,
        ageing_steps=16,
    )


class AnyScheduler(RuleBasedStateMachine):
    """Owes each accepted input once; keeps budgets and the order inside a session; empty only when nothing waits."""

    @initialize(name=st.sampled_from(sorted(POLICIES)), step_target=st.sampled_from([None, 0, 5, 9]))
    def build(self, name: str, step_target: int | None) -> None:
        self.scheduler = POLICIES[name](
            max_batch_tokens=BUDGET,
            max_decodes=DECODES,
            max_prefill_tokens=CHUNK,
            target_step_tokens=step_target,
            patience_steps=2,
            ageing_steps=4,
            tenant_weights={"b": 3},
        )
        self.waiting: dict[int, list[Input]] = {}  # by session, in order
        self.next_start: Counter[int] = Counter()
        self.newest: Batch | None = None  # if `more` may still be asked for
        self.batches: list[Batch] = []  # handed out and neither run nor put back, oldest first

    @rule(session=st.integers(0, 7), priority=st.integers(-2, 2), tenant=st.sampled_from("abc"))
    def admit(self, session: int, priority: int, tenant: str) -> None:
        self.scheduler.admit(SessionId(session), priority=priority, tenant=tenant)

    @rule(
        wanted=st.lists(st.tuples(st.integers(0, 7), st.integers(0, CHUNK)), min_size=1, max_size=6),
        bad=st.sampled_from([None, None, None, "wide", "twice"]),
    )
    def submit(self, wanted: list[tuple[int, int]], bad: str | None) -> None:
        group: list[Input] = []
        starts = self.next_start.copy()
        for session, width in wanted:
            start = starts[session]
            group.append(prefill(session, width, start) if width else decode(session, start))
            starts[session] += max(width, 1)
        if bad == "wide":
            group.append(prefill(1, CHUNK + 1, start=10**6))
        if bad == "twice":
            group.append(group[0])
        assert self.scheduler.submit(group) is (bad is None)
        if bad is None:
            self.next_start = starts
            for item in group:
                self.waiting.setdefault(item.session, []).append(item)

    @rule(max_tokens=st.sampled_from([None, None, None, 0, 3]))
    def next_batch(self, max_tokens: int | None) -> None:
        anything = any(self.waiting.values())
        batch = self.scheduler.next_batch(max_tokens)
        decodes = [item for item in batch if item.kind is Kind.DECODE]
        assert list(batch[: len(decodes)]) == decodes
        assert len(decodes) <= DECODES
        assert len({item.session for item in decodes}) == len(decodes)
        assert not {d.session for d in decodes} & {item.session for item in batch[len(decodes) :]}
        assert sum(item.width for item in batch) <= (BUDGET if max_tokens is None else max_tokens)
        assert batch or not anything or max_tokens is not None
        for kind in Kind:
            for session in {item.session for item in batch if item.kind is kind}:
                own = [item for item in self.waiting[session] if item.kind is kind]
                taken = [item for item in batch if item.kind is kind and item.session == session]
                assert own[: len(taken)] == taken
        for item in batch:
            self.waiting[item.session].remove(item)
        self.newest = batch or None
        if batch:
            self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(whole=st.booleans(), data=st.data())
    def put_back_the_newest(self, whole: bool, data: st.DataObject) -> None:
        batch = self.batches.pop()
        # Of each session some of its last inputs: what ran before them did run.
        kept: list[Input] = []
        for session in dict.fromkeys(item.session for item in batch):
            own = [item for item in batch if item.session == session]
            kept += own[0 if whole else data.draw(st.integers(0, len(own))) :]
        kept.sort(key=batch.index)
        self.scheduler.put_back(kept)
        for item in reversed(kept):
            self.waiting.setdefault(item.session, []).insert(0, item)

    @rule(session=st.integers(0, 7), count=st.integers(0, 12))
    def skip(self, session: int, count: int) -> None:
        """From the first token on that waits of its prefill."""
        own = self.waiting.get(session, [])
        prefills = [item for item in own if item.kind is Kind.PREFILL]
        if not prefills or any(before.end != after.start for before, after in pairwise(prefills)):
            return  # what is handed out, or decoded, lies between
        position = prefills[0].start + count
        self.scheduler.skip(SessionId(session), position)
        kept = [item for item in own if item.kind is Kind.DECODE or item.end > position]
        self.waiting[session] = [
            replace(item, start=Position(position), width=item.end - position)
            if item.kind is Kind.PREFILL and item.start < position
            else item
            for item in kept
        ]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def more(self, data: st.DataObject) -> None:
        """Some of the newest batch's prefill need not run."""
        batch = self.batches[-1]
        if batch is not self.newest:
            return
        unused = [(item.session, data.draw(st.integers(0, item.width))) for item in batch if item.kind is Kind.PREFILL]
        unused = [(session, tokens) for session, tokens in unused if tokens]
        dropped = {item.session for item in batch if item.kind is Kind.PREFILL and item.session in dict(unused)}
        more = self.scheduler.more(unused)
        self.batches[-1] = tuple(item for item in batch if item.session not in dropped or item.kind is Kind.DECODE)
        self.newest = None
        assert all(item.kind is Kind.PREFILL for item in more)
        assert not {item.session for item in more} & {item.session for item in batch if item.kind is Kind.DECODE}
        freed = sum(tokens for _, tokens in unused)
        assert sum(item.width for item in (*batch, *more)) <= BUDGET + freed
        for item in more:
            assert next(one for one in self.waiting[item.session] if one.kind is Kind.PREFILL) == item
            self.waiting[item.session].remove(item)

    @precondition(lambda self: self.batches)
    @rule()
    def the_oldest_ran(self) -> None:
        self.batches.pop(0)

    @rule(session=st.integers(0, 7), forget=st.booleans())
    def cancel(self, session: int, forget: bool) -> None:
        drop = self.scheduler.dismiss if forget else self.scheduler.cancel
        dropped = drop(SessionId(session))
        assert Counter(dropped) == Counter(self.waiting.pop(session, []))
        self._forget_dispatched(session)

    @rule()
    def clear(self) -> None:
        assert Counter(self.scheduler.clear()) == Counter(i for own in self.waiting.values() for i in own)
        self.waiting.clear()
        self.batches.clear()

    def _forget_dispatched(self, session: int) -> None:
        """A cancelled session's dispatched inputs are never put back."""
        self.batches = [tuple(item for item in batch if item.session != session) for batch in self.batches]

    @invariant()
    def the_account_agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        items = [item for own in self.waiting.values() for item in own]
        assert self.scheduler.has_work is bool(items)
        assert self.scheduler.waiting_tokens == sum(item.width for item in items)
        for session in range(8):
            assert (self.scheduler.standing(SessionId(session)) is not None) is bool(self.waiting.get(session))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.next_batch(None)
        assert not any(self.waiting.values())


AnyScheduler.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
test_any_scheduler_keeps_its_account = AnyScheduler.TestCase
