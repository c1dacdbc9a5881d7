"""The executor on a toy model: however the same tokens are computed, they are the same tokens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import StalePlan, StepError
from microtome.planner.types import (
    Cell,
    DropSequence,
    ExtendSequence,
    InputFlag,
    OpenSequence,
    SamplingParams,
    SequenceId,
    StepNumber,
    StepPlan,
    TruncateSequence,
)
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

COUNT = 12  # tokens generated per prompt


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(toy: Path, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(toy),
        "kv_tokens": 2048,
        "max_step_tokens": 64,
        "widths": (1, 2, 4, 8),
        "max_sequences": 40,
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


@pytest.fixture
def driver(toy: Path) -> StepDriver:
    return StepDriver(build(toy))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(7)
    return [[random.randrange(3, VOCABULARY) for _ in range(width)] for width in (1, 2, 3, 7, 20, 33, 60)]


@pytest.fixture(scope="module")
def expected(toy: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate says, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(toy)
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=-1,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


# holds H4
def test_greedy_tokens_are_those_of_the_library(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert driver.generate(driver.open(), prompt, COUNT) == tokens


def test_a_token_that_is_fed_back_never_goes_by_way_of_the_host(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """As on a device: the host's copy is spoilt, and nobody notices."""
    executor = driver.executor
    assert isinstance(executor, Executor)
    executor._feeds_back_on_device = True
    sequences = [driver.open() for _ in prompts]
    tokens = [[token] for token in driver.step(*map(Work, sequences, prompts))]
    while len(tokens[0]) < COUNT:
        for sequence in sequences:
            executor._sequences[SequenceId(sequence)].sampled_token = 0
        for own, token in zip(tokens, driver.step(*map(Work, sequences)), strict=True):
            own.append(token)
    assert tokens == expected


# holds H10
@pytest.mark.parametrize("chunk", [1, 3, 8, 21])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_in_one(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]], chunk: int
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert driver.generate(driver.open(), prompt, COUNT, chunk=chunk) == tokens


def test_chunks_of_one_prompt_may_share_a_step(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Later slices of a step see the cells that earlier ones filled."""
    sequence = driver.open()
    prompt = prompts[-1]
    produced = driver.step(
        Work(sequence, prompt[:30], wants_output=False),
        Work(sequence, prompt[30:40], False),
        Work(sequence, prompt[40:]),
    )
    while len(produced) < COUNT:
        produced += driver.step(Work(sequence))
    assert produced == expected[-1]


# holds H2, H10
def test_decodes_and_prompts_in_one_step_do_not_disturb_each_other(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Staggered: every step decodes whoever runs and starts one more prompt, so slices straddle sequences."""
    produced: dict[int, list[int]] = {}
    waiting = [(driver.open(), prompt) for prompt in prompts]
    order = [sequence for sequence, _ in waiting]
    while waiting or any(len(tokens) < COUNT for tokens in produced.values()):
        running = [sequence for sequence, tokens in produced.items() if len(tokens) < COUNT]
        work = [Work(sequence) for sequence in running]
        if waiting:
            sequence, prompt = waiting.pop(0)
            work.append(Work(sequence, prompt))
            running.append(sequence)
        for sequence, token in zip(running, driver.step(*work), strict=True):
            produced.setdefault(sequence, []).append(token)
    assert [produced[sequence] for sequence in order] == expected


def test_a_clone_goes_on_as_its_source_would_and_apart_from_it(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompt, tokens = prompts[5], expected[5]
    source = driver.open()
    assert driver.generate(source, prompt, 4) == tokens[:4]
    child = driver.clone(source, len(prompt) - 1)
    assert driver.step(Work(child, [9, 8, 7]), Work(source)) != []
    assert driver.generate(driver.clone(child, len(prompt) - 1), prompt[-1:], COUNT) == tokens
    assert [*tokens[:5], *[driver.step(Work(source))[0] for _ in range(COUNT - 5)]] == tokens


def test_a_truncated_sequence_forgets_what_it_held(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompt = prompts[4]
    sequence = driver.open()
    driver.generate(sequence, [*prompt[:11], 5, 5, 5, 5], 3)
    driver.truncate(sequence, 11)
    assert driver.generate(sequence, prompt[11:], COUNT) == expected[4]
    driver.truncate(sequence, 0)
    assert driver.generate(sequence, prompts[3], COUNT) == expected[3]


# holds E22
def test_a_sequence_opened_on_cells_of_another_equals_one_that_computed_them(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prompt, tokens = prompts[6], expected[6]
    first = driver.open()
    assert driver.generate(first, prompt, COUNT) == tokens
    held = driver.cells[first][:50]
    driver.drop(first)  # the cells outlive the sequence, as a prefix cache would have it
    second, third = driver.open(cells=held), driver.open(cells=held[:20])
    assert driver.generate(second, prompt[50:], COUNT) == tokens
    assert driver.generate(third, prompt[20:], COUNT) == tokens


# holds H10, I6, I9
def test_sampled_tokens_are_the_same_alone_and_in_company(toy: Path, prompts: list[list[int]]) -> None:
    policies = [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_k=20, seed=3),
        SamplingParams(temperature=1.3, top_p=0.9, seed=2**64 - 1),
        SamplingParams(temperature=1.0, min_p=0.02, seed=0),
        SamplingParams(),
        SamplingParams(temperature=2.0, seed=1),
        SamplingParams(temperature=1.0, seed=3),
    ]
    alone = []
    for policy, prompt in zip(policies, prompts, strict=True):
        driver = StepDriver(build(toy, widths=(1,)), seed=1)
        alone.append(driver.generate(driver.open(policy), prompt, COUNT, chunk=5))
    driver = StepDriver(build(toy))
    sequences = [driver.open(policy) for policy in policies]
    produced = [
        [token] for token in driver.step(*(Work(seq, prompt) for seq, prompt in zip(sequences, prompts, strict=True)))
    ]
    for _ in range(COUNT - 1):
        for tokens, token in zip(produced, driver.step(*map(Work, sequences)), strict=True):
            tokens.append(token)
    assert produced == alone
    assert produced[0][:1] != produced[6][:1]  # equal seeds, different positions


# holds H11
def test_the_same_steps_in_a_fresh_pool_give_the_same_tokens(toy: Path, prompts: list[list[int]]) -> None:
    first, second = (
        driver.generate(driver.open(SamplingParams(temperature=1.0, seed=5)), prompts[6], COUNT)
        for driver in (StepDriver(build(toy)), StepDriver(build(toy)))
    )
    assert first == second


# holds A19, A20
def test_padding_writes_nothing_but_the_scratch_cell(toy: Path) -> None:
    executor = build(toy, widths=(8,), max_step_tokens=8)
    driver = StepDriver(executor)
    driver.step(Work(driver.open(), [4, 5, 6]))  # five padding tokens
    used = set(driver.cells[0]) | {executor.pool.scratch_cell}
    for layer in (*executor.pool.k, *executor.pool.v):
        written = set(layer.flatten(1).abs().sum(1).nonzero()[:, 0].tolist())
        assert written == used


# holds E21
def test_what_a_token_must_not_see_cannot_reach_it(
    toy: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    executor = build(toy)
    for layer in (*executor.pool.k, *executor.pool.v):
        layer[: executor.pool.usable_cells] = float("nan")
    driver = StepDriver(executor)
    assert driver.generate(driver.open(), prompts[5], COUNT) == expected[5]


def test_a_snapshot_tells_transcript_cells_policy_note_and_pending_token(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    policy = SamplingParams(logit_bias=(), seed=4)
    sequence, silent = driver.open(policy), driver.open()
    driver.step(Work(sequence, prompts[3]), Work(silent, [1, 2], wants_output=False))
    driver.step(Work(sequence))
    driver.step(Work(sequence))
    speaking, quiet = driver.executor.snapshot()
    assert speaking.tokens == (*prompts[3], *expected[3][:2])
    assert speaking.cells == tuple(driver.cells[sequence])
    assert (speaking.last_sampled, speaking.sampling) == (expected[3][2], policy)
    assert (quiet.tokens, quiet.last_sampled) == ((1, 2), None)


# holds H7
def test_the_result_counts_forwards_per_method(driver: StepDriver) -> None:
    driver.step(Work(driver.open(), list(range(3, 73))))  # 64 on the dynamic method, then 6 on forward_8
    assert driver.last is not None
    assert list(driver.last.forwards) == [0, 0, 0, 1, 1]
    assert driver.last.step_us > 0


def test_a_described_executor_measured_every_method(driver: StepDriver) -> None:
    table = driver.capability.table
    assert [method.name for method in table.methods] == [
        "forward_1",
        "forward_2",
        "forward_4",
        "forward_8",
        "forward_others",
    ]
    assert all(method.cost_us > 0 for method in table.methods)
    assert driver.capability.scratch_cell == driver.capability.usable_cells == 2048


def stale_plans(driver: StepDriver) -> dict[str, StepPlan]:
    """Each wrong in one way. Sequence 0 holds 5 tokens and has one sampled; 1 is open and empty, without a policy."""
    good = driver.plan(Work(0), Work(1, [7, 8, 9], wants_output=False))
    wants, feedback = int(InputFlag.WANTS_OUTPUT), int(InputFlag.FEEDBACK)
    return {
        "incarnation": replace(good, incarnation="f" * 32),  # type: ignore[arg-type]
        "step repeated": replace(good, step=StepNumber(good.step - 1)),
        "step skipped": replace(good, step=StepNumber(good.step + 1)),
        "digest": replace(good, table_digest=good.table_digest ^ 1),
        "columns of different length": replace(good, starts=[5]),
        "unknown sequence": replace(good, sequences=[0, 2]),
        "a gap": replace(good, starts=[5, 1]),
        "below the length": replace(good, starts=[4, 0]),
        "no width": replace(good, widths=[1, 0]),
        "too long": replace(good, widths=[1, 1025]),
        "feedback of two": replace(good, flags=[wants | feedback, feedback]),
        "feedback of nothing": driver.plan(Work(0), Work(1)),
        "output without a policy": replace(good, flags=[wants | feedback, wants]),
        "two outputs of one sequence": driver.plan(Work(0), Work(0, [3])),
        "a cell too few": replace(good, cells=good.cells[:-1]),
        "the scratch cell": replace(good, cells=[*good.cells[:-1], 2048]),
        "a negative cell": replace(good, cells=[*good.cells[:-1], -1]),
        "a cell twice": replace(good, cells=[*good.cells[:-1], good.cells[0]]),
        "a cell beyond 64 bits": replace(good, cells=[*good.cells[:-1], 2**64]),
        "a sequence beyond 64 bits": replace(good, sequences=[0, 2**64]),
        "a token too many": replace(good, tokens=[*good.tokens, 3]),
        "a token outside the vocabulary": replace(good, tokens=[7, 8, VOCABULARY]),
        "slices that leave a gap": replace(good, slice_offsets=[1]),
        "slices that end early": replace(good, slice_lengths=[3]),
        "a slice wider than its method": replace(good, slice_methods=[1]),
        "a method that is not there": replace(good, slice_methods=[5]),
        "a slice narrower than the dynamic method takes": replace(
            good, slice_offsets=[0, 1], slice_lengths=[1, 3], slice_methods=[4, 2]
        ),
        "opening what is open": replace(good, ops=(OpenSequence(SequenceId(0)),)),
        "opening outside the limit": replace(good, ops=(OpenSequence(SequenceId(40)),)),
        "lengthening what is not there": replace(good, ops=(ExtendSequence(SequenceId(3), (Cell(1),)),)),
        "lengthening by no cell of the pool": replace(good, ops=(ExtendSequence(SequenceId(0), (Cell(2048),)),)),
        "lengthening beyond a row": replace(good, ops=(ExtendSequence(SequenceId(0), (Cell(1),) * 1020),)),
        "dropping what is not there": replace(good, ops=(DropSequence(SequenceId(3)),)),
        "cutting longer": replace(good, ops=(TruncateSequence(SequenceId(0), 6),)),  # type: ignore[arg-type]
        "a good operation before a bad one": replace(
            good, ops=(OpenSequence(SequenceId(2)), DropSequence(SequenceId(3)))
        ),
    }


@pytest.mark.parametrize("cut", [20, 33, 57])
def test_what_one_input_writes_a_later_one_of_the_same_step_may_read(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]], cut: int
) -> None:
    """In the same forward and in a later one: steps are cut at 64 tokens, and at other widths of the ladder."""
    whole = prompts[-1]
    writer, readers = driver.open(), [driver.open() for _ in range(3)]
    for reader in readers:
        driver.extend(reader, driver.next_cells(cut))
    rest = Work(readers[0], whole[cut:]), Work(readers[1], whole[cut:-1], wants_output=False)
    tokens = driver.step(Work(writer, whole), *rest)
    assert tokens == [expected[-1][0]] * 2
    # What was shared outlives its writer, and who had no input in that step reads it as well.
    driver.drop(writer)
    tokens = driver.step(Work(readers[0]), Work(readers[1], whole[-1:]), Work(readers[2], whole[cut:]))
    assert tokens == [expected[-1][1], *[expected[-1][0]] * 2]
    assert [list(held.tokens) for held in driver.executor.snapshot()] == [[*whole, expected[-1][0]], whole, whole]


def test_a_sequence_grows_by_cells_of_another_in_the_middle_of_its_prompt(
    driver: StepDriver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    whole = prompts[-1]
    one, other = driver.open(), driver.open()
    driver.step(Work(one, whole[:20], wants_output=False))
    driver.extend(other, driver.cells[one])
    driver.step(Work(other, whole[20:40], wants_output=False))
    driver.extend(one, driver.cells[other][20:])
    assert driver.step(Work(one, whole[40:])) == expected[-1][:1]


# holds F12, X9
def test_a_stale_plan_is_refused_and_changes_nothing(toy: Path) -> None:
    executor = build(toy)
    driver = StepDriver(executor)
    driver.step(Work(driver.open(), [9, 9, 4, 4, 5]))
    driver.open_without_policy()
    driver.step()
    before = (executor.snapshot(), [layer.clone() for layer in executor.pool.k])
    accepted = []
    for name, plan in stale_plans(driver).items():
        try:
            executor.run(plan)
        except StalePlan:
            continue
        accepted.append(name)
    assert accepted == []
    assert executor.snapshot() == before[0]
    assert all(torch.equal(now, then) for now, then in zip(executor.pool.k, before[1], strict=True))
    assert len(driver.step(Work(0), Work(1, [7, 8, 9], wants_output=False))) == 1


# holds H8
def test_logits_with_a_nan_fail_the_step_and_every_later_one(toy: Path) -> None:
    executor = build(toy)
    driver = StepDriver(executor)
    sequence = driver.open()
    driver.step(Work(sequence, [3, 4, 5]))
    for layer in executor.pool.v:
        layer.fill_(float("nan"))
    with pytest.raises(StepError, match="NaN"):
        driver.step(Work(sequence))
    with pytest.raises(StepError, match="earlier step failed"):
        driver.step(Work(sequence))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e4m3"])
def test_narrower_cells_hold_the_same_text_more_roughly(
    toy: Path, prompts: list[list[int]], expected: list[list[int]], kv_dtype: str
) -> None:
    """Cells are rounded, so tokens may part after a while; a bound on the log-probability of the library's first."""
    exact, rough = (StepDriver(build(toy, kv_dtype=name)) for name in ("float32", kv_dtype))
    assert rough.executor.pool.k[0].dtype.itemsize < exact.executor.pool.k[0].dtype.itemsize  # type: ignore[attr-defined]
    policy = SamplingParams(logprobs=1)
    for prompt, tokens in zip(prompts[4:], expected[4:], strict=True):
        found = []
        for driver in (exact, rough):
            sequence = driver.open(policy)
            driver.step(Work(sequence, prompt[:-1], wants_output=False))
            driver.step(Work(sequence, prompt[-1:]))
            assert driver.last is not None
            found.append(driver.last.logprobs[0])
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].top[0][0] == tokens[0]
        assert abs(found[0].logprob - found[1].logprob) < (0.5 if kv_dtype == "float8_e4m3" else 0.05)
