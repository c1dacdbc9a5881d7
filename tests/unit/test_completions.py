"""Several completions of one prompt: clones at its end, each with its own coin."""

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.events import RunStep
from microtome.planner.status import Waiting
from microtome.planner.types import CloneSequence, FinishReason, GenerationId
from tests.support.small_cluster import SmallCluster, expected

PROMPT = tuple(range(20, 50))
SIBLINGS = [("b", 11), ("c", 12)]
NO_CACHE = PlannerConfig(prefix_cache=False)


def prefilled(cluster: SmallCluster) -> int:
    return sum(len(i.plan.tokens) for i in cluster.told if isinstance(i, RunStep))


def test_completions_share_the_prompt_and_each_runs_its_last_token_itself() -> None:
    cluster = SmallCluster(NO_CACHE)
    cluster.submit(PROMPT, 6, name="a", seed=10, siblings=SIBLINGS)
    cluster.run()
    for name, seed in (("a", 10), *SIBLINGS):
        assert cluster.tokens[name] == expected(PROMPT, 6, seed=seed)
    assert prefilled(cluster) == len(PROMPT) + 2
    clones = [op for i in cluster.told if isinstance(i, RunStep) for op in i.plan.ops if isinstance(op, CloneSequence)]
    assert [op.upto for op in clones] == [len(PROMPT) - 1] * 2
    assert cluster.cells_used() == 0


def test_siblings_wait_for_the_prompt_and_say_so() -> None:
    cluster = SmallCluster(NO_CACHE)
    cluster.submit(PROMPT, 6, name="a", siblings=SIBLINGS)
    where = cluster.control.where(GenerationId("b"))
    assert where is not None
    assert where.waits_for is Waiting.SHARED_PROMPT
    assert cluster.control.status().waiting == 2


@pytest.mark.parametrize("answered", [0, 1, 3])
def test_siblings_go_on_when_their_leader_is_cancelled(answered: int) -> None:
    cluster = SmallCluster(NO_CACHE)
    cluster.submit(PROMPT, 6, name="a", siblings=SIBLINGS)
    for _ in range(answered):
        cluster.answer()
    cluster.cancel("a")
    cluster.run()
    assert cluster.finish("a") is FinishReason.CANCELLED
    for name, seed in SIBLINGS:
        assert cluster.tokens[name] == expected(PROMPT, 6, seed=seed)


def test_siblings_go_on_when_their_leaders_worker_is_lost() -> None:
    cluster = SmallCluster(NO_CACHE, workers=2)
    cluster.submit(PROMPT, 6, name="a", seed=10, siblings=SIBLINGS)
    cluster.lose("w0")
    cluster.plans["w0"].clear()
    cluster.run()
    for name, seed in (("a", 10), *SIBLINGS):
        assert cluster.tokens[name] == expected(PROMPT, 6, seed=seed)


def test_a_sibling_can_be_cancelled_while_it_waits() -> None:
    cluster = SmallCluster(NO_CACHE)
    cluster.submit(PROMPT, 6, name="a", seed=10, siblings=SIBLINGS)
    cluster.cancel("b")
    cluster.run()
    assert cluster.finish("b") is FinishReason.CANCELLED
    assert cluster.tokens["c"] == expected(PROMPT, 6, seed=12)


def test_completions_of_a_prompt_of_one_token_and_with_one_place_each_end() -> None:
    cluster = SmallCluster(NO_CACHE, max_sequences=1)
    cluster.submit((7,), 3, name="a", seed=10, siblings=SIBLINGS)
    cluster.run()
    for name, seed in (("a", 10), *SIBLINGS):
        assert cluster.tokens[name] == expected((7,), 3, seed=seed)


def test_completions_on_a_session_continue_its_history_and_leave_it_the_first_one() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, 3, session=session)
    cluster.run()
    history = cluster.transcript(session)
    cluster.submit((1, 2), 4, name="a", seed=10, siblings=SIBLINGS, session=session)
    cluster.run()
    for name, seed in (("a", 10), *SIBLINGS):
        assert cluster.tokens[name] == expected([*history, 1, 2], 4, seed=seed)
    assert cluster.transcript(session) == [*history, 1, 2, *cluster.tokens["a"]]
    assert cluster.control.status().sessions == 1
