"""What prompts under way have in common is computed once, whoever comes, goes, or fails meanwhile."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import StalePlan
from microtome.planner.types import ExtendSequence, FinishReason, MethodTable, StepPlan
from tests.support.small_cluster import SmallCluster, expected, method_table

PREFIX = [(7 * k + 3) % 900 for k in range(512)]
WHOLE = method_table((1, 8, 32), 2048)  # a step holds several of these prompts
NARROW = method_table((1, 8), 64)  # a prompt takes many steps


def prompt(number: int, own: int = 32, prefix: Sequence[int] = PREFIX) -> list[int]:
    return [*prefix, *((number * 31 + k) % 900 for k in range(own))]


def planned(plans: Sequence[StepPlan]) -> int:
    """Tokens of prompts in these plans."""
    return sum(len(plan.tokens) for plan in plans)


def check_all(cluster: SmallCluster, names: Sequence[str], prompts: Sequence[Sequence[int]], count: int = 4) -> None:
    for name, one in zip(names, prompts, strict=True):
        assert cluster.tokens[name] == expected(one, count), name


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
@pytest.mark.parametrize("table", [WHOLE, NARROW], ids=["in few steps", "in many steps"])
@pytest.mark.parametrize("policy", ["decode-first", "fair-priority"])
def test_prompts_that_come_together_cost_one_prefix_and_their_own_ends(
    plan_ahead: int, table: MethodTable, policy: str
) -> None:
    cluster = SmallCluster(PlannerConfig(plan_ahead=plan_ahead, policy=policy), table=table, usable_cells=16_000)
    prompts = [prompt(number) for number in range(16)]
    names = [cluster.submit(one, tenant=f"t{number % 3}") for number, one in enumerate(prompts)]
    cluster.run()
    check_all(cluster, names, prompts)
    assert planned(cluster.sent) == 512 + 16 * 32
    counters = cluster.control.status().counters
    assert counters.cached_tokens == 15 * 512
    cached = [cluster.usage(name).cached_tokens for name in names]  # who computes which part of it is a matter of turns
    assert sum(cached) == 15 * 512
    assert max(cached) <= 512


def test_a_prefix_is_shared_in_the_very_step_that_computes_it() -> None:
    cluster = SmallCluster(workers=0, table=WHOLE, usable_cells=16_000)
    prompts = [prompt(number) for number in range(16)]
    names = [cluster.submit(one, 1) for one in prompts]
    cluster.join()
    assert [planned([plan]) for plan in cluster.sent] == [512 + 16 * 32]
    assert cluster.run() <= 2  # the second says who is gone
    check_all(cluster, names, prompts, 1)


def test_who_comes_while_a_prefix_is_under_way_takes_over_its_cells() -> None:
    cluster = SmallCluster(table=WHOLE, usable_cells=16_000)
    first, second = prompt(0), prompt(1)
    names = [cluster.submit(first, 1), cluster.submit(second, 1)]
    assert len(cluster.plans["w0"]) == 2  # none of them answered
    shared = [op for op in cluster.sent[1].ops if isinstance(op, ExtendSequence)]
    assert [list(op.cells) for op in shared] == [list(cluster.sent[0].cells[:512])]
    cluster.run()
    check_all(cluster, names, [first, second], 1)


def test_two_long_prompts_share_the_work_of_what_they_have_in_common() -> None:
    cluster = SmallCluster(table=NARROW, usable_cells=16_000)
    prompts = [prompt(number, 40) for number in range(2)]
    names = [cluster.submit(one) for one in prompts]
    cluster.run()
    check_all(cluster, names, prompts)
    assert planned(cluster.sent) == 512 + 2 * 40


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 7])
def test_no_token_is_planned_twice_however_many_chunks_a_step_holds(chunks: int) -> None:
    config = PlannerConfig(max_prefill_tokens=40, max_batch_tokens=40 * chunks + 8, max_decodes=8)
    cluster = SmallCluster(config, workers=0, table=WHOLE, usable_cells=16_000)
    prompts = [prompt(number, 150) for number in range(3)]
    names = [cluster.submit(one) for one in prompts]
    cluster.join()
    cluster.run()
    check_all(cluster, names, prompts)
    assert planned(cluster.sent) == 512 + 3 * 150


def test_prompts_in_common_part_at_different_tokens() -> None:
    cluster = SmallCluster(workers=0, table=WHOLE, usable_cells=16_000)
    prompts = [prompt(number, 32, PREFIX[:length]) for number, length in enumerate((100, 300, 200, 200, 3))]
    names = [cluster.submit(one) for one in prompts]
    cluster.join()
    cluster.run()
    check_all(cluster, names, prompts)
    assert planned(cluster.sent) == 300 + 5 * 32


def test_an_equal_prompt_forwards_its_last_token_only() -> None:
    cluster = SmallCluster(workers=0, table=WHOLE)
    names = [cluster.submit(prompt(1)) for _ in range(3)]
    cluster.join()
    cluster.run()
    check_all(cluster, names, [prompt(1)] * 3)
    assert planned(cluster.sent) == 544 + 2


@pytest.mark.parametrize("answered", [0, 1, 3])
def test_the_first_of_them_may_be_cancelled_at_any_time(answered: int) -> None:
    cluster = SmallCluster(table=NARROW, usable_cells=16_000)
    prompts = [prompt(number) for number in range(4)]
    names = [cluster.submit(one) for one in prompts]
    for _ in range(answered):
        cluster.answer()
    cluster.cancel(names[0])
    cluster.run()
    assert cluster.finish(names[0]) is FinishReason.CANCELLED
    check_all(cluster, names[1:], prompts[1:])
    assert planned(cluster.sent) <= 512 + 4 * 32
    assert cluster.cells_used() == 0


def test_what_is_shared_of_a_cancelled_prompt_stays_for_the_others_of_a_session() -> None:
    cluster = SmallCluster(table=NARROW, usable_cells=16_000)
    session = cluster.open()
    leader = cluster.submit(prompt(0), session=session)
    other = cluster.submit(prompt(1))
    cluster.cancel(leader)
    cluster.run()
    assert cluster.tokens[other] == expected(prompt(1))
    assert cluster.transcript(session) == prompt(0)[: cluster.length(session)]
    again = cluster.submit([5, 6], session=session)
    cluster.run()
    assert cluster.tokens[again] == expected(cluster.transcript(session)[: -len(cluster.tokens[again])])


def test_a_parked_prompt_leaves_what_it_shared_and_comes_back() -> None:
    cluster = SmallCluster(
        PlannerConfig(policy="priority", headroom_tokens=0), table=NARROW, usable_cells=700, max_sequences=2
    )
    low = [cluster.submit(prompt(number, 32, PREFIX[:300]), priority=-1) for number in range(2)]
    cluster.answer()
    high = cluster.submit([11] * 300, priority=5)
    cluster.run()
    assert cluster.control.status().counters.parked >= 1
    check_all(cluster, [*low, high], [prompt(0, 32, PREFIX[:300]), prompt(1, 32, PREFIX[:300]), [11] * 300])


def test_the_worker_that_computes_it_may_be_lost() -> None:
    cluster = SmallCluster(workers=2, table=NARROW, usable_cells=16_000)
    prompts = [prompt(number) for number in range(6)]
    names = [cluster.submit(one) for one in prompts]
    cluster.answer("w0")
    cluster.plans["w0"].clear()
    cluster.lose("w0")
    cluster.run()
    check_all(cluster, names, prompts)


def refuse(cluster: SmallCluster) -> None:
    """The worker refuses its oldest plan and so all behind it."""
    plans = cluster.plans["w0"]
    refused = [plans.popleft() for _ in range(len(plans))]
    for plan in refused:
        cluster.handle(cluster.failure("w0", plan, refused=True))


@pytest.mark.parametrize("answered", [0, 1, 2])
@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_what_was_shared_with_a_refused_step_is_taken_back_with_it(answered: int, plan_ahead: int) -> None:
    cluster = SmallCluster(PlannerConfig(plan_ahead=plan_ahead), table=NARROW, usable_cells=16_000)
    prompts = [prompt(number) for number in range(4)]
    names = [cluster.submit(one) for one in prompts]
    for _ in range(answered):
        cluster.answer()
    refuse(cluster)
    cluster.run()
    check_all(cluster, names, prompts)
    assert cluster.control.status().counters.prefilled_tokens == 512 + 4 * 32
    assert all(cluster.usage(name).cached_tokens <= 512 for name in names)


def test_one_cancelled_while_it_waits_for_shared_cells_goes_when_they_are_settled() -> None:
    cluster = SmallCluster(table=NARROW, usable_cells=16_000)
    leader, follower = cluster.submit(prompt(0)), cluster.submit(prompt(1))
    cluster.cancel(follower)
    refuse(cluster)
    cluster.run()
    assert cluster.tokens[leader] == expected(prompt(0))
    assert cluster.finish(follower) is FinishReason.CANCELLED
    assert cluster.cells_used() == 0


def test_a_higher_priority_waits_for_nobody_and_the_lower_takes_over_what_it_computes() -> None:
    cluster = SmallCluster(PlannerConfig(policy="priority", plan_ahead=1), table=NARROW, usable_cells=16_000)
    cluster.submit([1] * 200, 1, priority=9)  # the step under way while the others come
    low, high = cluster.submit(prompt(0), priority=0), cluster.submit(prompt(1), priority=5)
    cluster.run()
    check_all(cluster, [low, high], [prompt(0), prompt(1)])
    first = next(d for d in cluster.told if getattr(d, "generation", None) in (low, high))
    assert first.generation == high  # type: ignore[union-attr]
    assert planned(cluster.sent) == 200 + 512 + 2 * 32
    assert (cluster.usage(high).cached_tokens, cluster.usage(low).cached_tokens) == (0, 512)


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"prompt": [1, *PREFIX[1:]]}])
def test_nothing_is_shared_across_salts_or_behind_a_difference(other: dict[str, object]) -> None:
    cluster = SmallCluster(workers=0, table=WHOLE, usable_cells=16_000)
    mine = cluster.submit(PREFIX)
    theirs = cluster.submit(other.get("prompt", PREFIX), cache_salt=str(other.get("cache_salt", "")))  # type: ignore[arg-type]
    cluster.join()
    cluster.run()
    assert planned(cluster.sent) == 2 * 512
    assert (cluster.usage(mine).cached_tokens, cluster.usage(theirs).cached_tokens) == (0, 0)


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False), workers=0, table=WHOLE, usable_cells=16_000)
    names = [cluster.submit(prompt(number)) for number in range(3)]
    cluster.join()
    cluster.run()
    check_all(cluster, names, [prompt(number) for number in range(3)])
    assert planned(cluster.sent) == 3 * 544


def test_a_second_turn_takes_over_what_another_session_computes_behind_the_same_history() -> None:
    cluster = SmallCluster(table=NARROW, usable_cells=16_000)
    one, other = cluster.open(), cluster.open()
    turn = prompt(1)
    cluster.submit([1, 2, 3], 1, session=one)
    cluster.submit([1, 2, 3], 1, session=other)
    cluster.run()
    begun = len(cluster.sent)
    names = [cluster.submit(turn, session=session) for session in (one, other)]
    cluster.run()
    history = [1, 2, 3, *expected([1, 2, 3], 1), *turn]
    check_all(cluster, names, [history, history])
    # Each runs the token that was pending; of the rest the second runs its last only.
    assert planned(cluster.sent[begun:]) <= 1 + 544 + 2


def test_a_full_pool_holds_as_many_prompts_as_its_cells_do_when_they_share() -> None:
    cluster = SmallCluster(PlannerConfig(headroom_tokens=0), workers=0, table=WHOLE, usable_cells=900)
    names = [cluster.submit(prompt(number, 8), 2) for number in range(16)]
    cluster.join()
    cluster.run()
    check_all(cluster, names, [prompt(number, 8) for number in range(16)], 2)
    assert cluster.control.status().counters.parked == 0
    assert planned(cluster.sent) == 512 + 16 * 8


def test_a_plan_whose_reader_comes_before_its_writer_is_refused_by_the_fake_worker() -> None:
    cluster = SmallCluster(workers=0, table=WHOLE)
    for number in range(2):
        cluster.submit(prompt(number))
    cluster.join()
    plan = cluster.sent[0]
    assert plan.widths == [544, 32]
    swapped = _swap(plan)
    with pytest.raises(StalePlan, match="before the step has written it"):
        cluster.executors["w0"].run(swapped)


def _swap(plan: StepPlan) -> StepPlan:
    """The two inputs of a plan, the other way round."""
    first = plan.widths[0]
    return replace(
        plan,
        sequences=plan.sequences[::-1],
        starts=plan.starts[::-1],
        widths=plan.widths[::-1],
        cells=[*plan.cells[first:], *plan.cells[:first]],
        tokens=[*plan.tokens[first:], *plan.tokens[:first]],
    )
