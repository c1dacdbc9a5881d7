"""Events that nobody should send, or in an order that nobody expects: nothing breaks, and no token is wrong."""

from collections import deque
from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput, WrongState
from microtome.planner.events import Deliver, GiveUpWorker, RunStep, WorkerJoined
from microtome.planner.status import Waiting
from microtome.planner.types import FinishReason, GenerationId, MethodTable, SamplingParams, StepNumber, WorkerId
from tests.support.builders import dynamic, ladder
from tests.support.fake_executor import FakeExecutor
from tests.support.small_cluster import VOCAB, SmallCluster, expected

PROMPT = (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("siblings", [[("a", 1)], [("a", 1), ("fresh", 2)]])
def test_a_sibling_named_like_a_running_generation_is_refused_and_the_running_one_goes_on(
    siblings: list[tuple[str, int]],
) -> None:
    cluster = SmallCluster()
    running = cluster.submit(PROMPT, 9, name="a")
    cluster.answer()
    refused = cluster.submit(PROMPT, 9, name="b", siblings=siblings)
    assert isinstance(cluster.error(refused), WrongState)
    cluster.run()
    assert cluster.tokens[running] == expected(PROMPT, 9)


def test_a_sibling_named_twice_is_answered_once() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 9, name="b", siblings=[("c", 1), ("c", 2), ("b", 3)])
    ended = [d.generation for d in cluster.told if isinstance(d, Deliver) and d.finish is FinishReason.FAILED]
    assert sorted(ended) == ["b", "c"]


def test_what_was_sampled_for_a_cancelled_generation_is_not_cached_as_the_next_ones_prompt() -> None:
    """A session gives up its cells for a higher priority with two steps under way, and goes on with another prompt."""
    cluster = SmallCluster(PlannerConfig(policy="priority", headroom_tokens=0), usable_cells=20, max_sequences=1)
    session = cluster.open()
    first = cluster.submit(PROMPT, 10, session=session)
    cluster.answer()
    cluster.answer()
    assert len(cluster.plans["w0"]) == 2
    cluster.submit((9, 9), 1, priority=5)
    cluster.cancel(first)
    history = cluster.transcript(session)
    second = cluster.submit((7, 7, 7, 8), 4, session=session)
    cluster.run()
    assert cluster.tokens[second] == expected([*history, 7, 7, 7, 8], 4)


@pytest.mark.parametrize("priority", [0, 5])
def test_completions_do_not_share_cells_that_their_cancelled_leader_never_wrote(priority: int) -> None:
    """The session was rewound while steps of what came before were under way."""
    cluster = SmallCluster(PlannerConfig(policy="priority"))
    session = cluster.open()
    first = cluster.submit(PROMPT, 9, session=session)
    cluster.answer()
    cluster.cancel(first)
    cluster.rewind(session, 2)
    leader = cluster.submit((9, 9), 4, session=session, siblings=[("twin", 3)], priority=priority)
    cluster.cancel(leader)
    cluster.run()
    assert cluster.tokens["twin"] == expected([*PROMPT[:2], 9, 9], 4, seed=3)


def test_one_that_found_no_cell_and_then_gave_way_in_the_same_step_is_not_run() -> None:
    """One decode a step: the junior's turn comes with no cell free, then the senior's, who parks it."""
    config = PlannerConfig(plan_ahead=1, max_decodes=1, headroom_tokens=0, prefix_cache=False)
    cluster = SmallCluster(config, usable_cells=10)
    senior, junior = cluster.submit(range(10, 14), 5), cluster.submit(range(20, 24), 5)
    cluster.run()
    assert cluster.control.status().counters.parked >= 1
    assert cluster.tokens[senior] == expected(range(10, 14), 5)
    assert cluster.tokens[junior] == expected(range(20, 24), 5)


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        (ladder(dynamic(8, least=2)), "1 tokens cannot be tiled"),
        (ladder(dynamic(8, least=2, cost_us=5)), "1 tokens cannot be tiled"),
        (MethodTable(()), "no method"),
    ],
)
def test_a_worker_whose_methods_cannot_run_one_token_is_refused(table: MethodTable, cause: str) -> None:
    cluster = SmallCluster()
    capability = replace(FakeExecutor().describe(), table=table)
    told = cluster.handle(WorkerJoined(at_us=0, worker=WorkerId("w1"), capability=capability))
    assert [type(i) for i in told] == [GiveUpWorker]
    assert cause in told[0].cause  # type: ignore[union-attr]


def test_a_worker_that_cannot_sample_is_refused() -> None:
    cluster = SmallCluster()
    capability = replace(FakeExecutor().describe(), max_output_rows=0)
    (told,) = cluster.handle(WorkerJoined(at_us=0, worker=WorkerId("w1"), capability=capability))
    assert isinstance(told, GiveUpWorker)
    assert "max_output_rows 0" in told.cause


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_stop_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """Until `min_new_tokens` it would be forbidden by its place among the logits, which is another row's."""
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 4, stop_token_ids=(token,), sampling=SamplingParams(min_new_tokens=2))
    assert isinstance(cluster.error(name), BadInput)
    assert f"stop token {token}" in str(cluster.error(name))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"max_new_tokens": 10**400}, "max_new_tokens"),
        ({"sampling": SamplingParams(top_k=2**32)}, "top_k"),
        ({"sampling": SamplingParams(min_new_tokens=2**32)}, "min_new_tokens"),
        ({"sampling": SamplingParams(logprobs=2**32)}, "logprobs"),
    ],
)
def test_a_count_beyond_32_bits_is_refused_with_no_worker_there(options: dict[str, object], cause: str) -> None:
    cluster = SmallCluster(workers=0)
    name = cluster.submit(PROMPT, **options)  # type: ignore[arg-type]
    assert isinstance(cluster.error(name), BadInput)
    assert cause in str(cluster.error(name))


def test_a_generation_that_only_a_lost_worker_could_hold_holds_nobody_up() -> None:
    cluster = SmallCluster(workers=0)
    cluster.join("roomy", usable_cells=100)
    cluster.join("narrow", usable_cells=20)
    long = cluster.submit(range(30), 10)
    cluster.answer("roomy")
    cluster.lose("roomy")
    cluster.plans["roomy"].clear()
    short = cluster.submit(PROMPT, 4)
    cluster.run()
    assert cluster.tokens[short] == expected(PROMPT, 4)
    where = cluster.control.where(GenerationId(long))
    assert where is not None
    assert where.waits_for is Waiting.NO_WORKER
    cluster.join("roomy", usable_cells=100)
    cluster.run()
    assert cluster.tokens[long] == expected(range(30), 10)


def test_a_session_that_outgrows_its_worker_goes_on_on_a_roomier_one() -> None:
    cluster = SmallCluster(workers=0)
    cluster.join("narrow", usable_cells=20)
    session = cluster.open()
    cluster.submit(PROMPT, 4, session=session)
    cluster.run()
    cluster.join("roomy", usable_cells=100)
    history = cluster.transcript(session)
    long = cluster.submit(range(30), 10, session=session)
    cluster.run()
    assert cluster.tokens[long] == expected([*history, *range(30)], 10)
    assert cluster.cells_used("narrow") == 0


@pytest.mark.parametrize("twice", [False, True])
def test_a_worker_that_tells_nonsense_of_what_it_holds_is_taken_or_refused_without_it(twice: bool) -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 9)
    for _ in range(3):
        cluster.answer()
    executor = cluster.executors["w0"]
    (sequence,) = executor.snapshot()
    held = (sequence, sequence) if twice else (replace(sequence, tokens=sequence.tokens[:-1]),)
    other = SmallCluster(workers=0)
    other.plans["w0"], other.executors["w0"] = deque(), executor
    told = other.handle(
        WorkerJoined(at_us=0, worker=WorkerId("w0"), capability=executor.describe(), held=held, last_step=StepNumber(3))
    )
    assert [type(i) for i in told] == [GiveUpWorker if twice else RunStep]
    assert not any(w.cells_used for w in other.control.status().workers)
