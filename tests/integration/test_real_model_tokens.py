"""The default model in float32: the tokens of the planner and the executor are those of transformers' own `generate`.

However the prompts meet: each alone, all at once, or one after the other while the earlier ones run.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from microtome.cuda_runtime.checkpoint import Checkpoint, end_token_ids, find_checkpoint, load_tokenizer
from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.fetch import resolve_model
from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.types import FinishReason, GenerationOptions
from microtome.solo import Report, Request, run

pytestmark = pytest.mark.model

NEW_TOKENS = 12

TEXTS = [
    "The",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "SELECT name, COUNT(*) FROM orders",
    "Ein Mikrotom ist ein Instrument,",
    "The three laws of thermodynamics are: first,",
]
CHATS = [
    "What is the capital of France?",
    "Write a haiku about thin slices.",
    "Explain in two sentences how a microscope works.",
    "List the planets of the solar system.",
    "Translate 'good morning' into Spanish.",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share a core with other processes wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return find_checkpoint(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(checkpoint)
    found = [tokenizer(text).input_ids for text in TEXTS]
    for question in CHATS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        found.append(tokenizer(text).input_ids)
    story = tokenizer(
        "A thin slice of the sample lay under the lens, and the whole of it could be seen. " * 24
    ).input_ids
    found += [story[:100], story[:257], story[:400]]
    assert len(found) == 16
    assert {len(ids) for ids in found} >= {1, 100, 257, 400}
    return [tuple(ids) for ids in found]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    where, keywords = checkpoint.source
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **keywords)
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def executor(checkpoint: Checkpoint, expected: list[list[int]]) -> Executor:
    """Built after the library's own model is gone."""
    return build_executor(RuntimeOptions(model=str(checkpoint.path), dtype="float32", kv_tokens=4096))


@pytest.fixture(scope="module")
def control() -> Control:
    """Without a prefix cache: no run finds what the one before computed."""
    return Control(PlannerConfig(prefix_cache=False))


@pytest.fixture(scope="module")
def requests(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> list[Request]:
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, stop_token_ids=end_token_ids(checkpoint))
    return [Request(prompt=prompt, options=options) for prompt in prompts]


def check(report: Report, expected: list[list[int]], checkpoint: Checkpoint) -> None:
    assert [answer.tokens for answer in report.answers] == expected
    for answer in report.answers:
        stopped = answer.tokens[-1] in end_token_ids(checkpoint)
        assert answer.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_alone(
    executor: Executor,
    control: Control,
    requests: list[Request],
    expected: list[list[int]],
    checkpoint: Checkpoint,
) -> None:
    check(run(executor, control, requests, concurrency=1), expected, checkpoint)


def test_all_at_once(
    executor: Executor,
    control: Control,
    requests: list[Request],
    expected: list[list[int]],
    checkpoint: Checkpoint,
) -> None:
    report = run(executor, control, requests)
    check(report, expected, checkpoint)
    assert report.engine.steps < sum(map(len, expected)) / 4  # they did share steps


def test_staggered(
    executor: Executor,
    control: Control,
    requests: list[Request],
    expected: list[list[int]],
    checkpoint: Checkpoint,
) -> None:
    """The longest first; a new one every other step, while those before it decode."""
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt))
    arrivals = [replace(requests[index], after_steps=2 * place) for place, index in enumerate(order)]
    check(run(executor, control, arrivals), [expected[index] for index in order], checkpoint)


def test_nothing_is_left_behind(executor: Executor, control: Control, requests: list[Request]) -> None:
    run(executor, control, requests[:1])
    (worker,) = control.status().workers
    assert (worker.cells_used, worker.sessions) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_programs_give_the_same_tokens(
    checkpoint: Checkpoint, requests: list[Request], expected: list[list[int]], tmp_path: Path
) -> None:
    options = RuntimeOptions(
        model=str(checkpoint.path),
        dtype="float32",
        kv_tokens=4096,
        methods="compiled",
        artifact_folder=str(tmp_path),
    )
    compiled, control = build_executor(options), Control(PlannerConfig())
    check(run(compiled, control, requests), expected, checkpoint)
    check(run(compiled, control, requests), expected, checkpoint)  # out of the prefix cache
