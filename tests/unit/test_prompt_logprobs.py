"""How likely a prompt's own tokens are: the library's own numbers, however it is cut and whoever is beside it."""

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.log_probabilities import KEPT_NUMBERS, KeptLogprobs
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import StalePlan
from microtome.planner.types import SamplingParams, SequenceId, TokenLogprobs
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

TOP = 3
ASKS = SamplingParams(prompt_logprobs=TOP, logprobs=TOP)
PROMPT = [Random(3).randrange(3, VOCABULARY) for _ in range(50)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def library(toy: Path) -> torch.Tensor:
    """log_softmax of the library's own logits, one row per token of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(toy)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].double(), dim=-1)


def build(toy: Path, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(toy),
        "kv_tokens": 512,
        "max_step_tokens": 64,
        "widths": (1, 2, 4, 8),
        "max_sequences": 64,
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


def chunks(sequence: int, chunk: int) -> list[Work]:
    works = []
    for begin in range(0, len(PROMPT), chunk):
        end = min(begin + chunk, len(PROMPT))
        last = end == len(PROMPT)
        next_token = 0 if last else PROMPT[end]
        works.append(Work(sequence, PROMPT[begin:end], wants_output=last, asks=True, next_token=next_token))
    return works


def check(found: list[TokenLogprobs], library: torch.Tensor, first: int = 1) -> None:
    """`found`: of the prompt's tokens from position `first` on."""
    for position, logprobs in enumerate(found, first):
        row = library[position - 1]
        best = row.topk(TOP)
        assert logprobs.logprob == pytest.approx(float(row[PROMPT[position]]), abs=2e-5)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=2e-5)


@pytest.mark.parametrize("chunk", [1, 3, 8, 17, 50])
def test_they_are_the_librarys_own_however_the_prompt_is_cut(toy: Path, library: torch.Tensor, chunk: int) -> None:
    driver = StepDriver(build(toy))
    sequence = driver.open(ASKS)
    other = driver.open()
    driver.step(Work(other, PROMPT[:5]))
    found: list[TokenLogprobs] = []
    for work in chunks(sequence, chunk):
        driver.step(Work(other), work)  # somebody else's row is between
        assert driver.last is not None
        found += driver.last.prompt_logprobs
    assert len(found) == len(PROMPT) - 1
    check(found, library)
    of_the_first = driver.last.logprobs  # type: ignore[union-attr]
    assert of_the_first[0] is None
    assert of_the_first[1] is not None
    assert of_the_first[1].top[0][1] == pytest.approx(float(library[-1].max()), abs=2e-5)


def test_a_worker_keeps_what_it_reported_beside_the_sequence(toy: Path, library: torch.Tensor) -> None:
    driver = StepDriver(build(toy))
    sequence = driver.open(ASKS)
    reported: list[TokenLogprobs | None] = []
    for work in chunks(sequence, 20):
        driver.step(work)
        assert driver.last is not None
        reported += driver.last.prompt_logprobs
    reported += driver.last.logprobs  # type: ignore[union-attr]
    driver.step(Work(sequence))
    reported += driver.last.logprobs  # type: ignore[union-attr]
    (held,) = driver.executor.snapshot()
    assert held.sequence == SequenceId(sequence)
    assert held.logprobs_from == 1
    assert list(held.logprobs) == reported
    assert len(held.logprobs) == len(held.tokens)  # the sampled one is not among those yet
    driver.truncate(sequence, 30)
    driver.step()
    (held,) = driver.executor.snapshot()
    assert list(held.logprobs) == reported[:29]
    check([one for one in held.logprobs if one is not None], library)


def test_rows_beyond_what_the_worker_offers_are_refused_before_anything_changes(toy: Path) -> None:
    driver = StepDriver(build(toy, max_sequences=8))
    sequence = driver.open(ASKS)
    with pytest.raises(StalePlan, match="10 logits rows are wanted, 8 at most"):
        driver.step(Work(sequence, PROMPT[:10], wants_output=False, asks=True, next_token=5))
    driver.step(Work(sequence, PROMPT[:8], asks=True))
    assert driver.last is not None
    assert len(driver.last.prompt_logprobs) == 7


def test_a_policy_that_does_not_ask_and_a_next_token_of_no_vocabulary_are_refused(toy: Path) -> None:
    driver = StepDriver(build(toy))
    with pytest.raises(StalePlan, match="asks how likely its prompt is, and its policy does not"):
        driver.step(Work(driver.open(), PROMPT[:4], asks=True))
    driver = StepDriver(driver.executor)
    with pytest.raises(StalePlan, match=f"next token {VOCABULARY} is outside"):
        driver.step(Work(driver.open(ASKS), PROMPT[:4], wants_output=False, asks=True, next_token=VOCABULARY))


def test_what_is_kept_is_bounded_and_the_newest() -> None:
    kept = KeptLogprobs()
    wide = tuple((token, -1.0) for token in range(20))
    for position in range(7, 12_007):
        kept.put(position, TokenLogprobs(-float(position % 100), wide) if position % 3 else None)
    held = kept.upto(12_007)
    assert 2 * sum(1 + len(one.top) if one else 1 for one in held) <= KEPT_NUMBERS
    assert kept.start > 7
    for position, one in enumerate(held, kept.start):
        assert one == (TokenLogprobs(-float(position % 100), wide) if position % 3 else None)
    kept.put(12_000, TokenLogprobs(-0.5))  # rewound, and something else drawn
    assert kept.upto(12_007)[-1] == TokenLogprobs(-0.5)
    assert kept.end == 12_001
    kept.put(20_000, None)  # not behind the last: what was before is not in one piece with it
    assert (kept.start, kept.upto(20_001)) == (20_000, (None,))
