"""The contract's rules of distribution (x), steps (h), values (b) and overlap (l), on the planner with fake workers."""

from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.events import Deliver, GiveUpWorker, RunStep, StepDone, WorkerGone, WorkerJoined
from microtome.planner.types import Annotate, InputFlag, OpenSequence, SamplingParams, SetSampling, WorkerId
from tests.support.small_cluster import SmallCluster, expected, method_table

PROMPT = (5, 6, 7, 8)


def test_X1_a_restarted_driver_goes_on_from_what_the_workers_hold_and_computes_nothing_again() -> None:
    cluster = SmallCluster()
    names = [cluster.submit((n, *PROMPT), 12, seed=n + 1) for n in range(4)]
    for _ in range(5):
        cluster.answer()
    run = cluster.executors["w0"].last_step
    cluster.restart_driver()
    first = cluster.plans["w0"][0]
    assert first.step == run + 1
    assert list(first.widths) == [1] * 4
    assert list(first.tokens) == []  # each is fed back what was sampled last
    cluster.run()
    for n, name in enumerate(names):
        assert cluster.tokens[name] == expected((n, *PROMPT), 12, seed=n + 1)


def test_X1_a_restarted_driver_keeps_sessions_with_their_pending_token() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, 3, session=session)
    cluster.run()
    transcript = cluster.transcript(session)
    cluster.restart_driver()
    assert (cluster.transcript(session), cluster.length(session)) == (transcript, len(transcript) - 1)
    name = cluster.submit((9,), 2, session=session)
    cluster.run()
    assert cluster.tokens[name] == expected([*transcript, 9], 2)
    assert cluster.open() > session


def test_X1_a_stop_that_the_last_driver_did_not_live_to_see_ends_the_generation() -> None:
    third = expected(PROMPT, 3)[2]
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9, stop_token_ids=(third,))
    for _ in range(2):
        cluster.answer()
    for plan in list(cluster.plans["w0"]):  # the worker goes on; the answers are lost with the driver
        cluster.executors["w0"].run(plan)
    cluster.restart_driver()
    assert cluster.tokens[name] == expected(PROMPT, 3)
    assert name in cluster.ends
    cluster.run()
    assert cluster.cells_used() == 0


def test_X1_a_sequence_whose_prompt_was_not_finished_is_dropped() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=4, max_decodes=1, max_prefill_tokens=3))
    cluster.submit(range(30), 3)
    cluster.answer()
    cluster.restart_driver()
    assert cluster.control.status().running == 0
    cluster.run()
    assert cluster.executors["w0"].snapshot() == ()


def test_X2_a_worker_gets_its_steps_one_by_one_in_order_and_at_most_as_many_as_planned_ahead() -> None:
    for plan_ahead in (1, 2, 3):
        cluster = SmallCluster(PlannerConfig(plan_ahead=plan_ahead))
        cluster.submit(PROMPT, 9)
        cluster.submit((1, 2), 9)
        most = 0
        while cluster.plans["w0"]:
            most = max(most, len(cluster.plans["w0"]))
            cluster.answer()
        steps = [i.plan.step for i in cluster.told if isinstance(i, RunStep)]
        assert steps == list(range(1, len(steps) + 1))
        assert most == plan_ahead


def test_X3_answers_of_an_incarnation_that_was_given_up_change_nothing() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9)
    cluster.answer()
    plan = cluster.plans["w0"][0]
    late = StepDone(at_us=0, worker=WorkerId("w0"), result=cluster.executors["w0"].run(plan))
    cluster.lose()
    assert cluster.handle(late) == []
    cluster.join()
    assert cluster.handle(late) == []
    gone = WorkerGone(at_us=0, worker=WorkerId("w0"), incarnation=plan.incarnation, cause="told twice")
    assert cluster.handle(gone) == []
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X3_an_incarnation_that_was_given_up_and_joins_again_is_refused() -> None:
    cluster = SmallCluster()
    again = cluster.executors["w0"]
    cluster.lose()
    cluster._lives = 0  # the next life has the same incarnation
    told = cluster.join()
    assert [type(i) for i in told] == [GiveUpWorker]
    assert cluster.control.status().workers == ()
    assert again.describe().incarnation == told[0].incarnation  # type: ignore[union-attr]


def test_X3_an_old_incarnation_that_joins_under_the_name_of_a_living_worker_does_not_disturb_it() -> None:
    cluster = SmallCluster()
    old = cluster.executors["w0"].describe()
    cluster.lose()
    cluster.join()
    name = cluster.submit(PROMPT, 9)
    told = cluster.handle(WorkerJoined(at_us=0, worker=WorkerId("w0"), capability=old))
    assert [(type(i), i.incarnation) for i in told if isinstance(i, GiveUpWorker)] == [(GiveUpWorker, old.incarnation)]
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X3_another_life_of_a_worker_takes_its_place_before_anybody_said_that_it_was_gone() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9)
    cluster.answer()
    cluster.join()
    assert [w.incarnation for w in cluster.control.status().workers] == [cluster.executors["w0"].describe().incarnation]
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X4_an_answer_that_comes_twice_counts_once() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 9)
    while cluster.plans["w0"]:
        plan = cluster.plans["w0"].popleft()
        event = StepDone(at_us=0, worker=WorkerId("w0"), result=cluster.executors["w0"].run(plan))
        cluster.handle(event)
        assert cluster.handle(event) == []
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X5_a_refused_step_is_planned_anew_under_the_same_number() -> None:
    cluster = SmallCluster(refuse_at=4)
    name = cluster.submit(PROMPT, 9)
    cluster.run()
    numbers = [i.plan.step for i in cluster.told if isinstance(i, RunStep)]
    assert numbers.count(4) == numbers.count(5) == 2
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X5_operations_of_refused_steps_are_sent_again_in_their_order() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 20)
    cluster.submit((1, 2, 3), 20)
    cluster.answer()
    cluster.submit((4, 5), 20)
    cluster.answer()
    first, second = cluster.plans["w0"]
    assert first.ops
    assert second.ops
    for plan in (first, second):
        cluster.plans["w0"].popleft()
        cluster.handle(cluster.failure("w0", plan, refused=True))
    assert cluster.plans["w0"][0].ops == first.ops + second.ops
    cluster.run()


def test_X5_a_worker_that_refuses_every_step_is_given_up() -> None:
    cluster = SmallCluster(PlannerConfig(step_attempts=3, plan_ahead=1))
    cluster.submit(PROMPT, 9)
    for _ in range(3):
        plan = cluster.plans["w0"].popleft()
        told = cluster.handle(cluster.failure("w0", plan, "no", refused=True))
    assert [type(i) for i in told] == [GiveUpWorker]


def test_X6_a_failed_step_fences_its_worker() -> None:
    cluster = SmallCluster(fail_at=2)
    cluster.submit(PROMPT, 9)
    cluster.answer()
    told = cluster.answer()
    (given_up,) = [i for i in told if isinstance(i, GiveUpWorker)]
    assert given_up.incarnation == cluster.executors["w0"].describe().incarnation
    assert "step 2" in given_up.cause


def test_X6_a_step_without_an_answer_is_found_by_the_tick() -> None:
    cluster = SmallCluster(PlannerConfig(step_timeout_ms=50))
    name = cluster.submit(PROMPT, 9)
    assert cluster.tick(40_000) == []
    (given_up,) = cluster.tick(60_000)
    assert isinstance(given_up, GiveUpWorker)
    cluster.plans["w0"].clear()
    cluster.join()
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9)


def test_X6_an_idle_worker_is_not_taken_for_hung() -> None:
    cluster = SmallCluster(PlannerConfig(step_timeout_ms=50))
    cluster.submit(PROMPT, 2)
    cluster.run()
    assert cluster.tick(10_000_000) == []
    cluster.submit(PROMPT, 2)
    assert cluster.tick(10_040_000) == []


@pytest.mark.parametrize("answered", range(6))
def test_X7_a_lost_workers_sessions_are_rebuilt_elsewhere_and_no_token_comes_twice(answered: int) -> None:
    cluster = SmallCluster(workers=2)
    names = [cluster.submit((n, *PROMPT), 6, seed=n) for n in range(4)]
    for _ in range(answered):
        cluster.answer("w0")
    delivered = {name: list(tokens) for name, tokens in cluster.tokens.items()}
    cluster.lose("w0")
    cluster.plans["w0"].clear()
    cluster.run()
    for n, name in enumerate(names):
        assert cluster.tokens[name] == expected((n, *PROMPT), 6, seed=n)
        assert cluster.tokens[name][: len(delivered.get(name, []))] == delivered.get(name, [])


def test_X7_without_a_worker_left_sessions_wait_and_go_on_with_the_next_one() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 6, seed=3)
    for _ in range(3):
        cluster.answer()
    cluster.lose()
    cluster.plans["w0"].clear()
    assert cluster.control.status().waiting == 1
    cluster.join()
    plan = cluster.plans["w0"][0]
    assert list(plan.tokens) == [*PROMPT, *cluster.tokens[name]]
    assert list(plan.flags) == [InputFlag.WANTS_OUTPUT]
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 6, seed=3)
    assert cluster.control.status().counters.moved == 1


def test_X8_a_session_stays_on_its_worker_and_batches_do_not_span_workers() -> None:
    cluster = SmallCluster(workers=2)
    session = cluster.open()
    homes = []
    for turn in range(4):
        cluster.submit(range(100 * turn, 100 * turn + 30), 1)  # somebody else's work
        cluster.run()
        cluster.submit((turn,), 2, session=session)
        homes.append([w for w, plans in cluster.plans.items() if plans])
        cluster.run()
    assert [len(home) for home in homes] == [1] * 4
    assert len({home[0] for home in homes}) == 1


def test_X9_a_plan_names_the_workers_own_method_table() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT)
    plan = cluster.plans["w0"][0]
    assert plan.table_digest == cluster.executors["w0"].describe().table.digest


def test_B4_there_is_an_output_for_exactly_the_inputs_that_asked() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=8, max_decodes=4, max_prefill_tokens=4))
    cluster.submit(range(10), 3)
    cluster.submit((1,), 3)
    wanted = delivered = 0
    while cluster.plans["w0"]:
        wanted += sum(bool(f & InputFlag.WANTS_OUTPUT) for f in cluster.plans["w0"][0].flags)
        delivered += sum(len(i.tokens) for i in cluster.answer() if isinstance(i, Deliver))
    assert wanted == delivered == 6


def test_B5_a_sequence_has_its_policy_and_note_before_its_first_sampled_row() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 2, seed=7, stop_token_ids=(3,))
    ops = cluster.plans["w0"][0].ops
    assert [type(op) for op in ops] == [OpenSequence, SetSampling, Annotate]
    sampling = SamplingParams(temperature=1.0, seed=7, prompt_tokens=4, stop_token_ids=(3,))
    assert ops[1] == SetSampling(ops[0].sequence, sampling)


def test_B9_a_bad_sibling_refuses_the_whole_group() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 20, name="a")
    cluster.submit(PROMPT, 2, name="b", siblings=[("c", 1), ("a", 2)])
    assert cluster.control.status().counters.generations_started == 1
    assert cluster.error("b") is not None
    assert cluster.error("c") is not None
    cluster.run()
    assert cluster.tokens["a"] == expected(PROMPT, 20)


def test_H3_slices_tile_the_batch() -> None:
    cluster = SmallCluster(table=method_table((1, 4), 8))
    for n in range(7):
        cluster.submit(range(n + 1), 3)
    cluster.run()
    for i in cluster.told:
        if isinstance(i, RunStep):
            offsets, lengths = i.plan.slice_offsets, i.plan.slice_lengths
            assert [sum(lengths[:k]) for k in range(len(offsets))] == list(offsets)
            assert sum(lengths) == len(i.plan.cells)


def test_H9_log_probabilities_come_with_their_tokens() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3, sampling=SamplingParams(logprobs=2))
    plain = cluster.submit(PROMPT, 3)
    cluster.run()
    with_logprobs = [i for i in cluster.told if isinstance(i, Deliver) and i.generation != plain]
    assert [len(d.logprobs) for d in with_logprobs] == [1, 1, 1]
    assert all(d.logprobs[0] is not None and len(d.logprobs[0].top) == 2 for d in with_logprobs)


def test_H9_an_answer_with_too_few_log_probabilities_is_malformed() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3, sampling=SamplingParams(logprobs=2))
    cluster.submit((1, 2), 3)
    cluster.answer()
    cluster.answer()
    plan = cluster.plans["w0"].popleft()
    result = cluster.executors["w0"].run(plan)
    short = replace(result, logprobs=result.logprobs[:1])
    told = cluster.handle(StepDone(at_us=0, worker=WorkerId("w0"), result=short))
    assert isinstance(told[0], GiveUpWorker)


def test_H10_batch_mates_do_not_change_a_generations_tokens() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=8, max_decodes=4, max_prefill_tokens=3))
    prompts = [tuple(range(n, n + 3 * n + 1)) for n in range(8)]
    names = []
    for n, prompt in enumerate(prompts):
        names.append(cluster.submit(prompt, 5, seed=n))
        if n % 2:
            cluster.answer()
    cluster.run()
    for n, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        assert cluster.tokens[name] == expected(prompt, 5, seed=n)


def test_L9_a_step_is_planned_on_a_token_that_is_only_on_the_device() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3)
    first, second = cluster.plans["w0"]
    assert list(first.flags) == [InputFlag.WANTS_OUTPUT]
    assert list(second.flags) == [InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK]
    assert list(second.starts) == [4]
    assert list(second.tokens) == []


def test_a_draining_worker_gets_no_new_session_and_is_released_when_it_is_empty() -> None:
    cluster = SmallCluster(workers=2)
    running = [cluster.submit((n, *PROMPT), 6) for n in range(4)]
    session = cluster.open()
    cluster.submit(PROMPT, 2, session=session)
    cluster.answer("w0")
    cluster.drain("w0")
    late = cluster.submit((9, 9), 3)
    cluster.run()
    assert [i.worker for i in cluster.told if type(i).__name__ == "ReleaseWorker"] == ["w0"]
    for n, name in enumerate(running):
        assert cluster.tokens[name] == expected((n, *PROMPT), 6)
    assert cluster.tokens[late] == expected((9, 9), 3)
    again = cluster.submit((1,), 2, session=session)
    assert not cluster.plans["w0"]
    cluster.run()
    assert cluster.tokens[again] == expected([*PROMPT, *expected(PROMPT, 2), 1], 2)


def test_the_only_worker_finishes_what_runs_on_it_when_it_drains() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 6)
    cluster.drain()
    late = cluster.submit((1, 2))
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 6)
    assert late not in cluster.ends
    assert [type(i).__name__ for i in cluster.told][-1] == "ReleaseWorker"
    cluster.join("w1")
    cluster.run()
    assert cluster.tokens[late] == expected((1, 2))


def test_a_clone_made_while_its_worker_drains_keeps_nothing_there() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 6, session=session)
    cluster.answer()
    cluster.answer()
    cluster.drain()
    twin = cluster.clone(session)
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 6)
    assert [type(i).__name__ for i in cluster.told][-1] == "ReleaseWorker"
    cluster.join("w1")
    other = cluster.submit((9,), 2, session=twin.session)
    cluster.run()
    said = [*PROMPT, *expected(PROMPT, 6)][: twin.length]
    assert cluster.tokens[other] == expected([*said, 9], 2)


def test_running_sessions_leave_a_draining_worker_when_another_joins() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 20)
    cluster.drain()
    cluster.answer()
    cluster.join("w1")
    while cluster.plans["w0"]:
        cluster.answer("w0")
    assert name not in cluster.ends
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 20)
    assert [w.worker for w in cluster.control.status().workers if not w.draining] == ["w1"]


def test_a_worker_with_another_model_is_refused() -> None:
    cluster = SmallCluster()
    own = cluster.executors["w0"].describe()
    other = replace(own, fingerprint="beef", incarnation="f" * 32)
    told = cluster.handle(WorkerJoined(at_us=0, worker=WorkerId("w1"), capability=other))
    assert isinstance(told[0], GiveUpWorker)
    assert "beef" in told[0].cause
