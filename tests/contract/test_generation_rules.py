"""Generations, rule by rule of the contract's (j), on the planner with fake workers."""

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput, StepError, UnknownId, WrongState
from microtome.planner.events import Deliver, RunStep
from microtome.planner.types import FinishReason, InputFlag, SamplingParams
from tests.support.small_cluster import SmallCluster, expected, method_table

PROMPT = (5, 6, 7, 8)


def test_J1_the_same_events_give_the_same_instructions() -> None:
    told = []
    for _ in range(2):
        cluster = SmallCluster(workers=2, usable_cells=64)
        for seed in range(6):
            cluster.submit(range(seed, seed + 9), 12, seed=seed)
        cluster.run()
        told.append(cluster.told)
    assert told[0] == told[1]


def test_J2_an_idle_worker_gets_a_step_with_the_submission_itself() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT)
    assert [type(i) for i in cluster.told] == [RunStep, RunStep]


def test_J4_a_generation_waits_until_a_worker_is_ready() -> None:
    cluster = SmallCluster(workers=0)
    name = cluster.submit(PROMPT)
    assert cluster.control.status().waiting == 1
    cluster.join()
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens 0 is below 1"),
        ((), {}, "prompt is empty"),
        ((5, 1000), {}, "prompt token 1000 is not below the vocabulary size 1000"),
        ((5, -1), {}, "prompt token -1"),
        (range(64), {}, "64 tokens and 1 more do not fit a context of 64"),
        (range(60), {"max_new_tokens": 5}, "max_new_tokens 5 after 60 tokens exceed a context of 64"),
        (PROMPT, {"priority": 1001}, "priority 1001"),
        (PROMPT, {"sampling": SamplingParams(temperature=-0.5)}, "temperature -0.5"),
        (PROMPT, {"sampling": SamplingParams(temperature=float("nan"))}, "temperature nan"),
        (PROMPT, {"sampling": SamplingParams(top_p=0)}, "top_p 0"),
        (PROMPT, {"sampling": SamplingParams(top_k=-1)}, "top_k -1"),
        (PROMPT, {"sampling": SamplingParams(min_p=1.5)}, "min_p 1.5"),
        (PROMPT, {"sampling": SamplingParams(seed=2**64)}, "seed 18446744073709551616"),
        (PROMPT, {"sampling": SamplingParams(repetition_penalty=0)}, "repetition_penalty 0"),
        (PROMPT, {"sampling": SamplingParams(presence_penalty=float("inf"))}, "presence_penalty inf"),
        (PROMPT, {"sampling": SamplingParams(logit_bias=((1, float("nan")),))}, "a logit bias"),
        (PROMPT, {"sampling": SamplingParams(banned_tokens=(1000,))}, "banned token 1000"),
        (PROMPT, {"sampling": SamplingParams(allowed_tokens=(4,), banned_tokens=(4,))}, "no token is allowed"),
    ],
)
def test_J5_what_cannot_be_is_refused_with_its_own_reason(
    prompt: tuple[int, ...], options: dict[str, object], says: str
) -> None:
    cluster = SmallCluster(usable_cells=64)
    name = cluster.submit(prompt, **options)  # type: ignore[arg-type]
    assert isinstance(cluster.error(name), BadInput)
    assert says in str(cluster.error(name))
    assert cluster.told == [cluster.ends[name]]
    status = cluster.control.status()
    assert (status.counters.generations_started, status.counters.refused) == (0, 1)


def test_J5_limits_unknown_at_submission_are_checked_when_a_worker_joins() -> None:
    cluster = SmallCluster(workers=0, usable_cells=64)
    long, foreign, good = cluster.submit(range(64)), cluster.submit((5, 2000)), cluster.submit(PROMPT)
    cluster.join()
    cluster.run()
    assert isinstance(cluster.error(long), BadInput)
    assert isinstance(cluster.error(foreign), BadInput)
    assert cluster.tokens[good] == expected(PROMPT)


def test_J5_a_generation_on_an_unknown_session_is_refused() -> None:
    cluster = SmallCluster()
    assert isinstance(cluster.error(cluster.submit(PROMPT, session=77)), UnknownId)


def test_J7_a_second_generation_is_refused_and_does_not_touch_the_first() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    first = cluster.submit(PROMPT, session=session)
    second = cluster.submit((1,), session=session)
    assert isinstance(cluster.error(second), WrongState)
    cluster.run()
    assert cluster.tokens[first] == expected(PROMPT)


def test_J8_a_prompt_is_cut_to_chunks_and_only_the_last_wants_output() -> None:
    config = PlannerConfig(max_batch_tokens=8, max_decodes=2, max_prefill_tokens=3, plan_ahead=1)
    cluster = SmallCluster(config, table=method_table((1, 2, 4, 8), 8))
    cluster.submit(range(8), 1)
    plan = cluster.plans["w0"][0]
    assert list(plan.widths) == [3, 3, 2]
    assert list(plan.starts) == [0, 3, 6]
    assert list(plan.flags) == [0, 0, InputFlag.WANTS_OUTPUT]


def test_J9_tokens_come_in_order_and_one_update_ends_them() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 5)
    cluster.run()
    mine = [i for i in cluster.told if isinstance(i, Deliver)]
    assert [d.offset for d in mine] == [0, 1, 2, 3, 4]
    assert [d.finish for d in mine] == [None] * 4 + [FinishReason.LENGTH]
    assert cluster.tokens[name] == expected(PROMPT, 5)
    assert (cluster.usage(name).prompt_tokens, cluster.usage(name).output_tokens) == (4, 5)


def test_J10_a_stop_token_is_delivered_and_ends() -> None:
    third = expected(PROMPT, 3)[2]
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9, stop_token_ids=(third,))
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 3)
    assert cluster.finish(name) is FinishReason.STOP


def test_J10_a_stop_wins_over_a_limit_reached_by_the_same_token() -> None:
    third = expected(PROMPT, 3)[2]
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 3, stop_token_ids=(third,))
    cluster.run()
    assert cluster.finish(name) is FinishReason.STOP


@pytest.mark.parametrize("steps", range(6))
def test_J12_no_token_is_lost_or_invented_by_a_cancellation(steps: int) -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 9, session=session)
    for _ in range(steps):
        cluster.answer()
    cluster.cancel(name)
    cluster.run()
    delivered = cluster.tokens[name]
    assert delivered == expected(PROMPT, 9)[: len(delivered)]
    assert cluster.transcript(session) == [*PROMPT, *delivered]
    again = cluster.submit((9, 9), 3, session=session)
    cluster.run()
    assert cluster.tokens[again] == expected([*PROMPT, *delivered, 9, 9], 3)


def test_J17_a_cancelled_generation_ends_at_once_and_its_cells_are_free_when_what_is_under_way_is_settled() -> None:
    cluster = SmallCluster(PlannerConfig(prefix_cache=False))
    name = cluster.submit(PROMPT, 100)
    other = cluster.submit((1, 2), 100)
    cluster.answer()
    cluster.answer()
    cluster.cancel(name)
    assert cluster.finish(name) is FinishReason.CANCELLED
    delivered = list(cluster.tokens[name])
    for _ in range(2):  # those under way
        cluster.answer()
    in_use = len(cluster.tokens[other]) + 2 - 1 + 2  # the newest token is not run; two steps are under way
    assert cluster.cells_used() == in_use
    cluster.answer()
    cluster.answer()  # the first step that was formed since
    assert [tuple(s.tokens[:2]) for s in cluster.executors["w0"].snapshot()] == [(1, 2)]
    assert cluster.tokens[name] == delivered


def test_J17_a_generation_in_line_ends_at_once() -> None:
    cluster = SmallCluster(workers=0)
    name = cluster.submit(PROMPT)
    cluster.cancel(name)
    assert cluster.finish(name) is FinishReason.CANCELLED
    assert cluster.control.status().waiting == 0


def test_J18_a_cancellation_in_the_prompt_leaves_what_was_consumed() -> None:
    config = PlannerConfig(max_batch_tokens=4, max_decodes=1, max_prefill_tokens=3, plan_ahead=1)
    cluster = SmallCluster(config)
    session = cluster.open()
    cluster.cancel(cluster.submit(range(10, 20), session=session))
    cluster.run()
    assert cluster.transcript(session) == [10, 11, 12]  # the chunk that was under way counts
    assert cluster.length(session) == 3


def test_J18_a_cancellation_before_anything_ran_leaves_the_session_as_it_was_pending_included() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, 2, session=session)
    cluster.run()
    before = cluster.transcript(session)
    cluster.lose()
    cluster.cancel(cluster.submit((9,), session=session))
    assert cluster.transcript(session) == before
    assert cluster.length(session) == len(before) - 1
    cluster.join()
    again = cluster.submit((3,), 2, session=session)
    cluster.run()
    assert cluster.tokens[again] == expected([*before, 3], 2)


def test_J19_closing_a_session_cancels_its_generation() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 1, session=session)
    cluster.close(session)  # the step under way would have finished it
    assert cluster.finish(name) is FinishReason.CANCELLED
    cluster.run()
    assert cluster.tokens[name] == []
    assert cluster.cells_used() == 0


def test_J21_a_failed_step_ends_a_generation_once_when_its_attempts_are_used_up() -> None:
    cluster = SmallCluster(PlannerConfig(step_attempts=2))
    name = cluster.submit(range(20), 9)
    cluster.executors["w0"].fail_at = 1
    cluster.answer()
    cluster.plans["w0"].clear()
    cluster.join(fail_at=2)
    cluster.answer()  # its first token
    cluster.answer()
    assert isinstance(cluster.error(name), StepError)
    assert "2 failed steps" in str(cluster.error(name))
    assert cluster.tokens[name] == expected(range(20), 9)[:1]


def test_J27_what_happens_is_counted() -> None:
    cluster = SmallCluster()
    stop = expected(PROMPT, 2)[1]
    cluster.submit(PROMPT, 9, stop_token_ids=(stop,))
    cluster.submit((1, 2, 3), 3)
    cluster.cancel(cluster.submit((4, 4), 50))
    steps = cluster.run()
    c = cluster.control.status().counters
    assert (c.generations_started, c.generations_finished) == (3, 3)
    assert (c.stopped, c.reached_limit, c.cancelled, c.failed) == (1, 1, 1, 0)
    assert c.prompt_tokens == 9
    assert c.output_tokens == 5
    assert c.steps == steps
    assert c.step_us > 0


def test_J29_a_status_can_be_read_at_any_time_and_does_not_change_later() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3)
    before = cluster.control.status()
    assert (before.running, before.waiting) == (1, 0)
    assert before.workers[0].steps_in_flight == 2
    cluster.run()
    after = cluster.control.status()
    assert (before.running, before.counters.steps) == (1, 0)
    assert (after.running, after.workers[0].cells_used, after.workers[0].sessions) == (0, 0, 0)
