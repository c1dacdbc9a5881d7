"""Who waits, in which order, how many, and how long that will be."""

import pytest

from microtome.planner.admission import WaitingLine
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import AtCapacity, DeadlineExpired
from microtome.planner.generations import Generation
from microtome.planner.sessions import Session
from microtome.planner.status import Waiting
from microtome.planner.types import FinishReason, GenerationId, GenerationOptions, SessionId
from tests.support.small_cluster import SmallCluster, expected, method_table


def line(**bounds: int) -> WaitingLine:
    return WaitingLine(bounds.get("waiting", 100), bounds.get("tokens", 10_000), {"heavy": 2})


class Arrivals:
    """Generations in a line, made in few words; one level of priority is worth 1000 us."""

    def __init__(self, line: WaitingLine) -> None:
        self.line = line
        self.count = 0

    def __call__(
        self, name: str, *, at_us: int = 0, tokens: int = 10, priority: int = 0, tenant: str = ""
    ) -> Generation:
        self.count += 1
        session = Session(SessionId(self.count), tenant, "", opened=False)
        session.transcript = [0] * tokens
        options = GenerationOptions(max_new_tokens=10, priority=priority, tenant=tenant)
        rank = (at_us - priority * 1000, self.count)
        g = Generation(GenerationId(name), session, options, tokens, at_us, rank)
        self.line.expect(g)
        self.line.add(g)
        return g


def drained(line: WaitingLine) -> list[str]:
    names = []
    while (g := line.next()) is not None:
        line.take(g)
        names.append(g.id)
    return names


def test_equals_start_in_the_order_they_came() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    for name in "abc":
        arrive(name)
    assert drained(waiting) == ["a", "b", "c"]
    assert (len(waiting), waiting.tokens) == (0, 0)


def test_a_higher_priority_starts_first_until_the_other_has_waited_long_enough() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    arrive("low", at_us=0)
    arrive("high", at_us=999, priority=1)
    arrive("late", at_us=1001, priority=1)
    assert drained(waiting) == ["high", "low", "late"]


def test_a_tenant_that_floods_delays_itself() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    for n in range(5):
        arrive(f"flood{n}", tenant="flood")
    arrive("modest", tenant="modest")
    assert drained(waiting)[:3] == ["flood0", "modest", "flood1"]


def test_a_tenants_weight_is_its_share() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    for n in range(6):
        arrive(f"h{n}", tenant="heavy")
        arrive(f"l{n}", tenant="light")
    first = drained(waiting)[:6]
    assert sum(name.startswith("h") for name in first) == 4


def test_a_tenant_gets_back_what_it_did_not_use() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    spent = arrive("spent", tenant="a", tokens=1)
    arrive("kept", tenant="a", tokens=1)
    waiting.refund(spent)  # nothing was delivered: 10 of the 22 tokens come back
    arrive("b1", tenant="b", tokens=6)
    arrive("b2", tenant="b", tokens=6)
    arrive("a", tenant="a", tokens=1)
    assert [name for name in drained(waiting) if name not in ("spent", "kept")] == ["b1", "a", "b2"]


def test_those_who_come_back_are_ahead_of_equals_and_of_no_bound() -> None:
    waiting = line(waiting=2)
    arrive = Arrivals(waiting)
    old = arrive("old")
    waiting.take(old)
    arrive("x", at_us=5)
    arrive("y", at_us=6)
    waiting.add_returning(old)
    assert (len(waiting), waiting.waiting) == (3, 2)
    assert drained(waiting) == ["old", "x", "y"]


def test_the_bounds_are_exact() -> None:
    waiting = line(waiting=3, tokens=30)
    arrive = Arrivals(waiting)
    arrive("a", tokens=10)
    waiting.check_room(2, 20, None)
    with pytest.raises(AtCapacity, match="3 places in the queue, 2 available; try again in 7 ms"):
        waiting.check_room(3, 3, 7)
    with pytest.raises(AtCapacity, match="21 queued prompt tokens, 20 available"):
        waiting.check_room(1, 21, None)


def test_a_tenants_account_is_forgotten_when_it_says_nothing_any_more() -> None:
    waiting = line()
    arrive = Arrivals(waiting)
    for n in range(1000):
        arrive(str(n), tenant=f"t{n}")
        g = waiting.next()
        assert g is not None
        waiting.take(g)
    assert len(waiting._asked) <= 2 * 64 + 2


# --- through the planner ---

BUSY = PlannerConfig(max_waiting=2, max_waiting_tokens=40)


def busy(config: PlannerConfig = BUSY) -> SmallCluster:
    """One sequence, taken for long."""
    cluster = SmallCluster(config, max_sequences=1)
    cluster.submit(range(8), 400, name="long")
    return cluster


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    cluster = busy()
    names = [cluster.submit((n,)) for n in range(3)]
    error = cluster.error(names[2])
    assert isinstance(error, AtCapacity)
    assert error.retry_after_ms is not None
    assert error.retry_after_ms >= 1
    assert cluster.control.status().waiting == 2
    cluster.cancel(names[0])
    assert cluster.submit((9,)) not in cluster.ends


def test_too_many_queued_tokens_are_refused() -> None:
    cluster = busy()
    cluster.submit(range(30))
    assert isinstance(cluster.error(cluster.submit(range(11))), AtCapacity)
    assert cluster.submit(range(10)) not in cluster.ends


def test_a_deadline_that_has_passed_is_refused() -> None:
    cluster = SmallCluster()
    cluster.tick(5000)
    assert isinstance(cluster.error(cluster.submit((1,), deadline_us=5000)), DeadlineExpired)


@pytest.mark.parametrize("target", ["deadline_us", "ttft_target_us"])
def test_a_first_token_that_cannot_come_in_time_is_refused_with_both_numbers(target: str) -> None:
    cluster = SmallCluster(table=method_table((1, 2, 4, 8), 8))
    cluster.submit(range(80), 4)  # 20 steps of 4 tokens beside decodes, 1160 us each
    error = cluster.error(cluster.submit(range(8), **{target: 5000}))
    assert isinstance(error, AtCapacity)
    assert error.available == 5
    assert error.needed > 10
    assert error.retry_after_ms == error.needed - error.available
    good = cluster.submit(range(8), **{target: 100_000})
    assert good not in cluster.ends


def test_an_expired_generation_is_dropped_before_its_next_step() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False))
    running = cluster.submit(range(8), 50, deadline_us=7000)
    other = cluster.submit((1, 2), 50)
    cluster.answer()
    cluster.tick(7000)
    assert isinstance(cluster.error(running), DeadlineExpired)
    assert "after 1 of 50 tokens" in str(cluster.error(running))
    cluster.answer()
    cluster.answer()
    plan = cluster.plans["w0"][-1]
    assert len(plan.sequences) == 1
    cluster.run()
    assert cluster.tokens[other] == expected((1, 2), 50)
    assert cluster.cells_used() == 0


def test_a_deadline_that_passes_in_line_ends_the_wait() -> None:
    cluster = SmallCluster(workers=0)
    name = cluster.submit((1,), deadline_us=7000)
    cluster.tick(6999)
    assert name not in cluster.ends
    cluster.tick(7001)
    assert isinstance(cluster.error(name), DeadlineExpired)


def test_a_generation_done_in_time_is_not_disturbed_by_its_deadline() -> None:
    cluster = SmallCluster()
    name = cluster.submit((1,), deadline_us=50_000)
    cluster.run()
    cluster.tick(60_000)
    assert cluster.finish(name) is FinishReason.LENGTH


def test_where_tells_position_reason_and_forecast() -> None:
    cluster = busy(PlannerConfig())
    second, third = cluster.submit(range(20)), cluster.submit((5,))
    where = cluster.control.where(GenerationId(third))
    assert where is not None
    assert (where.running, where.position, where.waits_for) == (False, 1, Waiting.SEQUENCES)
    assert where.predicted_ttft_us is not None
    before = cluster.control.where(GenerationId(second))
    assert before is not None
    assert before.predicted_ttft_us is not None
    assert before.position == 0
    assert before.predicted_ttft_us <= where.predicted_ttft_us
    running = cluster.control.where(GenerationId("long"))
    assert running is not None
    assert (running.running, running.worker, running.waits_for) == (True, "w0", Waiting.NOTHING)
    assert cluster.control.where(GenerationId("nobody")) is None


def test_where_names_the_missing_worker() -> None:
    cluster = SmallCluster(workers=0)
    where = cluster.control.where(GenerationId(cluster.submit((1,))))
    assert where is not None
    assert where.waits_for is Waiting.NO_WORKER
    assert where.predicted_ttft_us is None


def test_where_names_cells_priority_and_tenant_share() -> None:
    cluster = SmallCluster(PlannerConfig(headroom_tokens=0), usable_cells=40)
    cluster.submit(range(30), 10)
    low = cluster.submit(range(300, 312), 10)
    big = cluster.submit(range(100, 120), 10, priority=1)
    where = cluster.control.where(GenerationId(big))
    assert where is not None
    assert where.waits_for is Waiting.CELLS
    where = cluster.control.where(GenerationId(low))
    assert where is not None
    assert (where.position, where.waits_for) == (1, Waiting.PRIORITY)
    cluster.submit(range(200, 210), 10, tenant="flood")
    flooded, modest = cluster.submit((3,), tenant="flood"), cluster.submit((4,), tenant="modest")
    where = cluster.control.where(GenerationId(flooded))
    assert where is not None
    assert where.waits_for is Waiting.TENANT_SHARE
    assert cluster.control.where(GenerationId(modest)) is not None


def test_where_tells_a_running_generation_what_holds_it_up() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=4, max_decodes=1, max_prefill_tokens=3))
    cluster.submit(range(60), 4)
    behind = cluster.submit(range(100, 130), 4)
    where = cluster.control.where(GenerationId(behind))
    assert where is not None
    assert where.running
    assert where.waits_for in (Waiting.STEP_BUDGET, Waiting.NOTHING)
    assert where.predicted_ttft_us is not None
    assert where.predicted_ttft_us > 10_000
