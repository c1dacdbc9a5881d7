"""Methods on CUDA: captured at every width, the tokens of the CPU's eager code, and memory that does not grow."""

from pathlib import Path
from random import Random

import pytest
import torch

from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.method import CapturedMethod
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.types import SamplingParams
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

pytestmark = pytest.mark.gpu

COUNT = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def build(folder: Path, device: str, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(toy_directory(folder)),
        "device": device,
        "dtype": "float32",
        "methods": "compiled" if device == "cuda" else "eager",
        "artifact_folder": str(folder / "artifacts"),
        "kv_tokens": 4096,
        "max_step_tokens": 64,
        "widths": (1, 2, 4, 8),
        "max_sequences": 24,
        "shared_device": True,  # with the executors of the tests before
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


def tokens_of(executor: Executor) -> list[list[int]]:
    """Prompts of many widths in shared steps, half of the rows drawn, so that every method runs."""
    random = Random(5)
    prompts = [[random.randrange(3, VOCABULARY) for _ in range(width)] for width in (1, 2, 5, 30, 70, 3, 8)]
    driver = StepDriver(executor)
    policies = [SamplingParams(), SamplingParams(temperature=1.0, seed=7)]
    running = [driver.open(policies[index % 2]) for index in range(len(prompts))]
    produced: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        work = [Work(sequence) for sequence in running[:index]] + [Work(running[index], prompt)]
        for place, token in enumerate(driver.step(*work)):
            produced[place].append(token)
    for finished in range(len(prompts)):  # one less each time: 7, 6, … 1 rows
        for _ in range(COUNT):
            for place, token in enumerate(driver.step(*map(Work, running[finished:]))):
                produced[finished + place].append(token)
    return produced


def test_captured_methods_give_the_tokens_of_eager_code_on_a_cpu(folder: Path) -> None:
    assert tokens_of(build(folder, "cuda")) == tokens_of(build(folder, "cpu"))


def test_every_static_width_is_captured_before_the_executor_is_ready(folder: Path) -> None:
    executor = build(folder, "cuda")
    static = [method for method in executor.methods if method.spec.static]
    assert [method.spec.max_tokens for method in static] == [1, 2, 4, 8]
    assert all(isinstance(method, CapturedMethod) for method in static)
    assert all(method.cost_us > 0 for method in executor.describe().table.methods)


def test_a_thousand_replays_take_no_memory(folder: Path) -> None:
    driver = StepDriver(build(folder, "cuda"))
    sequences = [driver.open() for _ in range(3)]
    driver.step(*(Work(sequence, [4, 5]) for sequence in sequences))
    for _ in range(20):
        driver.step(*map(Work, sequences))
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(900):
        driver.step(*map(Work, sequences))
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
