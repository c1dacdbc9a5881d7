"""The loop in one process: what comes out is what the executor computes, whatever shares its steps."""

from types import SimpleNamespace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.errors import BadInput, StepError
from microtome.planner.types import FinishReason, GenerationOptions
from microtome.solo import Request, percentiles, run
from tests.support.fake_executor import build_executor
from tests.support.fake_model import generate


def fake(model: str = "fake") -> object:
    return build_executor(SimpleNamespace(model=model, kv_tokens=512, max_step_tokens=64))


def requests(count: int, *, every: int = 0) -> list[Request]:
    return [
        Request(
            prompt=tuple(range(10 + index, 30 + 3 * index)),
            options=GenerationOptions(max_new_tokens=5 + index),
            after_steps=every * index,
        )
        for index in range(count)
    ]


def expected(asked: list[Request]) -> list[list[int]]:
    return [
        generate(request.prompt, request.options.sampling, request.options.max_new_tokens, (), 1000)
        for request in asked
    ]


@pytest.mark.parametrize(("every", "concurrency"), [(0, None), (0, 1), (0, 3), (4, None), (4, 2), (1000, None)])
def test_every_request_gets_its_own_tokens_whenever_it_arrives(every: int, concurrency: int | None) -> None:
    asked = requests(7, every=every)
    report = run(fake(), Control(PlannerConfig()), asked, concurrency=concurrency)
    assert [answer.tokens for answer in report.answers] == expected(asked)
    assert {answer.finish for answer in report.answers} == {FinishReason.LENGTH}


def test_concurrency_bounds_what_is_submitted_and_unfinished() -> None:
    live, most = set(), 0

    def on_tokens(index: int, tokens: object, finish: FinishReason | None) -> None:
        nonlocal most
        live.add(index)
        most = max(most, len(live))
        if finish is not None:
            live.remove(index)

    run(fake(), Control(PlannerConfig()), requests(7), concurrency=3, on_tokens=on_tokens)
    assert most == 3
    assert live == set()


def test_one_planner_serves_run_after_run() -> None:
    executor, control, asked = fake(), Control(PlannerConfig(prefix_cache=False)), requests(4)
    first, second = (run(executor, control, asked) for _ in range(2))
    assert [answer.tokens for answer in first.answers] == [answer.tokens for answer in second.answers]
    assert control.status().workers[0].cells_used == 0


def test_a_refused_request_carries_its_error_and_the_others_go_on() -> None:
    asked = requests(3)
    asked[1] = Request(prompt=(), options=GenerationOptions())
    report = run(fake(), Control(PlannerConfig()), asked)
    assert isinstance(report.answers[1].error, BadInput)
    assert report.answers[1].finish is FinishReason.FAILED
    assert [report.answers[index].tokens for index in (0, 2)] == [expected(asked[:1])[0], expected(asked[2:])[0]]


def test_an_executor_that_fails_ends_the_run_with_its_error() -> None:
    with pytest.raises(StepError):
        run(fake("fake:fail_at=4"), Control(PlannerConfig()), requests(3))


def test_times_and_counts_add_up() -> None:
    asked = requests(4)
    report = run(fake(), Control(PlannerConfig()), asked)
    prompts, outputs = sum(len(request.prompt) for request in asked), sum(map(len, expected(asked)))
    assert report.engine.tokens_run >= prompts - 4 * 20 + outputs - len(asked)  # equal beginnings may be shared
    assert sum(report.engine.forwards.values()) > 0
    assert report.engine.steps > max(len(tokens) for tokens in expected(asked))
    for answer in report.answers:
        assert len(answer.token_times_us) == len(answer.tokens)
        assert answer.ttft_us is not None
        assert answer.ttft_us + sum(answer.gaps_us) == answer.token_times_us[-1] - answer.submitted_us


def test_percentiles_are_values_that_occur() -> None:
    assert list(percentiles([5, 1, 3], 0, 50, 99, 100)) == [1, 3, 5, 5]
