"""The contract's rules of padding (a), the pool (f) and running a step (h), on the executor with a toy model.

Every method is watched: what it is run on, and what it puts out for rows that nobody wants is spoilt.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.method import LINES, POSITIONS, ROWS, SELECTOR, TOKENS, DynamicMethod, Method
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import StalePlan
from microtome.planner.types import MethodSpec, SamplingParams
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

COUNT = 8  # tokens generated per prompt


class Watched:
    """A method that notes each run, and answers NaN in the rows that were not asked for."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.columns: list[Tensor] = []  # int64 [5, width] of each run
        self.outputs: list[int] = []

    @property
    def spec(self) -> MethodSpec:
        return self._method.spec

    def width(self, length: int) -> int:
        return self._method.width(length)

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        self.columns.append(columns_5N.clone())
        self.outputs.append(rows)
        logits_RV = self._method.run(columns_5N, rows).clone()
        logits_RV[rows:] = float("nan")
        return logits_RV


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def executor(toy: Path) -> Executor:
    return build_executor(
        RuntimeOptions(
            model=str(toy), kv_tokens=512, max_step_tokens=32, widths=(1, 4, 8), min_prefill_tokens=2, max_sequences=16
        )
    )


@pytest.fixture
def watched(executor: Executor) -> tuple[Watched, ...]:
    """The executor's methods, in table order: widths 1, 4, 8 and the dynamic one."""
    methods = tuple(Watched(method) for method in executor.methods)
    executor.methods = methods
    return methods


@pytest.fixture
def driver(executor: Executor, watched: tuple[Watched, ...]) -> StepDriver:
    return StepDriver(executor)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(11)
    return [[random.randrange(3, VOCABULARY) for _ in range(width)] for width in (3, 6, 11)]


def plain(toy: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The same prompts without any padding: every forward is one token wide, or as wide as its slice."""
    driver = StepDriver(
        build_executor(RuntimeOptions(model=str(toy), kv_tokens=512, max_step_tokens=32, widths=(1,), max_sequences=16))
    )
    return [driver.generate(driver.open(), prompt, COUNT) for prompt in prompts]


def test_A18_padding_is_token_0_at_position_0_behind_the_real_tokens(
    driver: StepDriver, executor: Executor, watched: tuple[Watched, ...]
) -> None:
    driver.step(Work(driver.open(), [7, 8, 9]))
    (columns,) = watched[1].columns
    assert columns[TOKENS].tolist() == [7, 8, 9, 0]
    assert columns[POSITIONS].tolist() == [0, 1, 2, 0]
    assert columns[ROWS].tolist() == [0, 0, 0, executor.describe().max_sequences]  # the padding row


# holds A21, L4
def test_A21_what_padding_puts_out_is_never_used(toy: Path, driver: StepDriver, prompts: list[list[int]]) -> None:
    """The rows behind the wanted ones are NaN here, which a sampler that saw them would report."""
    assert [driver.generate(driver.open(), prompt, COUNT) for prompt in prompts] == plain(toy, prompts)


def test_A22_a_static_forward_selects_as_many_rows_as_it_is_wide_the_last_wanted_one_repeated(
    driver: StepDriver, watched: tuple[Watched, ...]
) -> None:
    driver.step(Work(driver.open(), [7, 8]), Work(driver.open(), [9]))
    (columns,) = watched[1].columns
    assert columns[SELECTOR].tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(("wanted", "selected"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_A22_a_dynamic_forward_selects_at_least_its_declared_minimum(wanted: int, selected: int) -> None:
    selectors: list[Tensor] = []

    def program(tokens: Tensor, positions: Tensor, rows: Tensor, selector: Tensor) -> Tensor:
        selectors.append(selector)
        return torch.zeros(len(selector), VOCABULARY)

    spec = MethodSpec(name="forward_others", max_tokens=8, static=False, min_tokens=2, min_rows=2)
    columns_5N = torch.zeros(LINES, 6, dtype=torch.int64)
    columns_5N[SELECTOR] = torch.tensor([1, 3, 5, 5, 5, 5])
    DynamicMethod(spec, program).run(columns_5N, wanted)
    assert selectors[0].tolist() == [1, 3, 5][:selected]


def test_A23_no_real_query_sees_the_scratch_cell(
    toy: Path, driver: StepDriver, executor: Executor, watched: tuple[Watched, ...], prompts: list[list[int]]
) -> None:
    expected = plain(toy, prompts)
    sequences = [driver.open() for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(COUNT):
        for layer in (*executor.pool.k, *executor.pool.v):
            layer[executor.pool.scratch_cell] = float("nan")
        work = [
            Work(sequence, prompt if step == 0 else None) for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        for own, token in zip(tokens, driver.step(*work), strict=True):
            own.append(token)
    assert tokens == expected
    assert any(method.spec.static and method.columns for method in watched[1:])  # there was padding


def test_A23_a_padding_query_sees_a_finite_cell(driver: StepDriver, executor: Executor) -> None:
    """It attends to the scratch cell alone: were that not so, NaN would reach what the next layer writes there."""
    for layer in (*executor.pool.k, *executor.pool.v):
        layer[: executor.pool.usable_cells] = float("nan")
    driver.step(Work(driver.open(), [7, 8, 9]))
    assert len(executor.pool.k) > 1
    for layer in (*executor.pool.k, *executor.pool.v):
        assert layer[executor.pool.scratch_cell].isfinite().all()


def test_F1_every_layer_has_k_and_v_with_the_cell_as_the_outermost_axis(executor: Executor) -> None:
    pool = executor.pool
    assert len(pool.k) == len(pool.v) > 0
    assert {len(layer) for layer in (*pool.k, *pool.v)} == {512 + 1}


def test_F8_storage_starts_at_zero_though_methods_were_warmed_up(executor: Executor) -> None:
    """Padding's cell apart: warming up and measuring write there, and nowhere else."""
    for layer in (*executor.pool.k, *executor.pool.v):
        assert not layer[: executor.pool.usable_cells].any()


# holds E18, L8
def test_F18_all_methods_write_one_pool_that_stays_where_it_is(driver: StepDriver, executor: Executor) -> None:
    before = [layer.data_ptr() for layer in (*executor.pool.k, *executor.pool.v)]
    sequence = driver.open()
    ran = set()
    for width in (1, 4, 8, 20):  # one forward of each method
        driver.step(Work(sequence, list(range(3, 3 + width)), wants_output=False))
        assert driver.last is not None
        ran |= {method for method, count in enumerate(driver.last.forwards) if count}
    assert ran == set(range(len(executor.methods)))
    for layer in (*executor.pool.k, *executor.pool.v):  # one placement for all layers
        written = set(layer[: executor.pool.usable_cells].flatten(1).any(1).nonzero()[:, 0].tolist())
        assert written == set(driver.cells[sequence])
    assert [layer.data_ptr() for layer in (*executor.pool.k, *executor.pool.v)] == before


# holds B3
def test_H5_the_rows_that_are_sampled_are_the_wanted_ones_in_the_order_of_the_inputs(
    toy: Path, driver: StepDriver, watched: tuple[Watched, ...], prompts: list[list[int]]
) -> None:
    expected = [tokens[0] for tokens in plain(toy, prompts)]
    quiet, *loud = (driver.open() for _ in range(4))
    tokens = driver.step(
        Work(loud[0], prompts[0]),
        Work(quiet, [5, 5], wants_output=False),
        Work(loud[2], prompts[2]),
        Work(loud[1], prompts[1]),
    )
    assert tokens == [expected[0], expected[2], expected[1]]
    (columns,), (outputs,) = watched[3].columns, watched[3].outputs
    assert outputs == 3
    assert columns[SELECTOR, :outputs].tolist() == [2, 15, 21]  # each input's last token, 3 + 2 + 11 + 6 packed


def test_H6_a_slice_without_a_wanted_row_runs_all_the_same(
    driver: StepDriver, executor: Executor, watched: tuple[Watched, ...]
) -> None:
    sequence = driver.open()
    assert driver.step(Work(sequence, list(range(3, 3 + 40)), wants_output=False)) == []
    assert [len(method.columns) for method in watched] == [
        0,
        0,
        1,
        1,
    ]  # 32 on the dynamic method, 8 on the widest static
    assert sum(sum(method.outputs) for method in watched) == 0
    for layer in (*executor.pool.k, *executor.pool.v):
        assert layer[driver.cells[sequence]].flatten(1).any(1).all()  # K and V of every token


def test_D7_only_the_first_input_of_a_session_in_a_step_may_start_below_its_length(driver: StepDriver) -> None:
    sequence = driver.open()
    driver.step(Work(sequence, [3, 4, 5, 6, 7]))
    driver.truncate(sequence, 3)  # as a rewind is sent: an operation in front of all inputs
    good = driver.plan(Work(sequence, [8, 9], wants_output=False), Work(sequence, [10]))
    assert good.starts == [3, 5]
    with pytest.raises(StalePlan, match="sequence 0 holds 5 tokens, an input starts at 4"):
        driver.executor.run(replace(good, starts=[3, 4]))
    driver.executor.run(good)


# holds F11, L7
@pytest.mark.parametrize(("wants_output", "reads"), [(False, 0), (True, 1)])
def test_L1_a_step_reads_from_the_device_once_and_only_what_was_sampled(
    driver: StepDriver, monkeypatch: pytest.MonkeyPatch, wants_output: bool, reads: int
) -> None:
    sequences = [driver.open(SamplingParams(temperature=temperature)) for temperature in (0.0, 0.7)]
    driver.step(*(Work(sequence, [3, 4, 5]) for sequence in sequences))
    count = 0

    def counted(read: Callable[..., object]) -> Callable[..., object]:
        def reading(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            return read(*args, **kwargs)

        return reading

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    driver.step(*(Work(sequence, wants_output=wants_output) for sequence in sequences))
    assert count == reads


class NoSort(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that order a vocabulary."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket not in (torch.ops.aten.sort, torch.ops.aten.topk), func
        return func(*args, **(kwargs or {}))


def test_L2_rows_that_are_all_greedy_need_no_sort(driver: StepDriver) -> None:
    greedy, drawn = driver.open(), driver.open(SamplingParams(temperature=1.0, top_p=0.5, seed=3))
    driver.step(Work(greedy, [3, 4, 5]), Work(drawn, [3, 4, 5]))
    with NoSort():  # type: ignore[no-untyped-call]
        driver.step(Work(greedy))
