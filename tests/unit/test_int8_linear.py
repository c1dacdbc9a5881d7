"""Linear layers over 8-bit weights: how they are rounded, and every realisation against exact arithmetic."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernel_resources import SHARED_LIMIT_BYTES, resources_of
from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.linear import int8
from microtome.cuda_runtime.linear.int8 import Int8Linear, operators, pack, quantize, quantize_linears, stock
from microtome.cuda_runtime.linear.int8_kernel import int8_linear_kernel
from microtome.cuda_runtime.linear.int8_triton import tile_of
from microtome.cuda_runtime.linear.packed import join_side_by_side
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig
from tests.support import int8_interpreted
from tests.support.interpreted import interpreter
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import toy_directory

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of the largest result
ROWS = (1, 2, 9, 10, 11, 16, 17, 31, 32, 33, 64, 70)
SHAPES = ((64, 64), (192, 96), (33, 32), (1, 64), (130, 160), (31, 608))  # outputs, inputs
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs * 1000 + inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def rows(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


def exact(x: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    y = (x.double() @ numbers.double().T) * scale.double()
    return y if bias is None else y + bias.double()


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def runnable(dtype: torch.dtype) -> list[str]:
    """The native operators that this machine has for `dtype`."""
    found = operators()
    if found is None:
        return []
    if dtype == torch.float32:
        return ["int8_linear"] if found.int8_float32_served() else []
    units = ((1, "int8_linear_vectors"), (2, "int8_linear"))
    return [name for least, name in units if found.int8_bfloat16_unit() >= least]


def test_a_weight_is_rounded_to_the_nearest_of_its_outputs_own_steps() -> None:
    weight = layer(70, 96, torch.float32).weight * torch.logspace(-6, 6, 70)[:, None]
    numbers, scale = quantize(weight)
    assert numbers.dtype == torch.int8
    assert numbers.abs().amax(dim=1).tolist() == [127] * 70  # the whole range, and -128 never
    error = (numbers * scale[:, None] - weight).abs()
    assert (error <= scale[:, None] * 0.5001).all()


def test_an_output_without_weight_stays_nothing_and_a_weight_that_is_no_number_is_refused() -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-45  # the least there is: no step can be smaller
    numbers, scale = quantize(weight)
    assert scale[0] == 1
    assert not numbers[0].any()
    assert torch.isfinite(numbers * scale[:, None]).all()
    weight[2, 5] = float("nan")
    with pytest.raises(BadConfig, match="quantize int8: a weight is infinite or not a number"):
        quantize(weight)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_results_are_those_of_exact_arithmetic(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    linear = layer(outputs, inputs, dtype)
    numbers, scale = quantize(linear.weight)
    for count in ROWS:
        x = rows(count, inputs, dtype)
        expected = exact(x, numbers, scale, linear.bias)
        for name in runnable(dtype):
            found = getattr(operators(), name)(x, pack(numbers), scale, linear.bias, outputs)
            assert found.dtype == dtype
            assert off_by(found, expected) < TOLERANCE[dtype], (name, count)
        plain = stock(x, numbers, scale, linear.bias)
        assert plain.dtype == dtype
        assert off_by(plain, expected) < 3 * TOLERANCE[dtype], count


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    linear = layer(192, 608, dtype)
    numbers, scale = quantize(linear.weight)
    weight = pack(numbers)
    x = rows(70, 608, dtype)
    for name in runnable(dtype):
        run = getattr(operators(), name)
        torch.set_num_threads(1)
        alone = torch.cat([run(x[i : i + 1], weight, scale, linear.bias, 192) for i in range(70)])
        for count_of_threads in (1, 2, 3):
            torch.set_num_threads(count_of_threads)
            for count in ROWS:
                found = run(x[:count], weight, scale, linear.bias, 192)
                assert torch.equal(found, alone[:count]), (name, count_of_threads, count)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers_side_by_side_have_the_bits_of_layers_one_by_one(dtype: torch.dtype) -> None:
    if not runnable(dtype):
        return
    layers = [layer(192, 96, dtype), layer(33, 96, dtype, bias=False), layer(64, 96, dtype)]
    arguments: list[tuple[Any, ...]] = []
    for linear in layers:
        numbers, scale = quantize(linear.weight)
        arguments.append((pack(numbers), scale, linear.bias, linear.out_features))
    for count in ROWS:
        x = rows(count, 96, dtype)
        alone = [operators().int8_linear(x, *argument) for argument in arguments]
        for together in (
            operators().int8_linear_2(x, *arguments[0], *arguments[1]),
            operators().int8_linear_3(x, *arguments[0], *arguments[1], *arguments[2]),
        ):
            assert all(torch.equal(ours, expected) for ours, expected in zip(together, alone, strict=False))


def test_a_traced_model_runs_layers_over_the_same_rows_side_by_side() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(layer(32 * (index + 1), 64, torch.float32) for index in range(3))
            self.last = layer(64, 64, torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(x + torch.stack([branch(x).sum() for branch in self.branches]).sum())
            return result

    model = Branches()
    assert quantize_linears(model, device=CPU) == 4
    if not runnable(torch.float32):
        return
    x = rows(3, 64, torch.float32)
    expected = model(x)
    traced = torch.export.export(model, (x,))
    assert join_side_by_side(traced.graph, "int8_linear") == 3
    traced.graph_module.recompile()
    assert torch.equal(traced.module()(x), expected)
    assert join_side_by_side(traced.graph, "no_such_operator") == 0


def test_mismatched_operands_are_refused() -> None:
    if not runnable(torch.float32):
        return
    numbers, scale = quantize(layer(32, 64, torch.float32).weight)
    weight, run = pack(numbers), operators().int8_linear
    for x, w, s, bias, outputs, words in (
        (rows(2, 32, torch.float32), weight, scale, None, 32, "does not take 32 inputs"),
        (rows(2, 64, torch.float32), weight, scale, None, 33, "to 33 outputs"),
        (rows(2, 64, torch.float32), weight.float(), scale, None, 32, "not a dense tensor of 8-bit numbers"),
        (rows(2, 64, torch.float32), weight, scale[:31], None, 32, "scale is not a dense float32 vector of 32"),
        (rows(2, 64, torch.float16), weight, scale, None, 32, "no unit for Half"),
        (rows(2, 64, torch.float32), weight, scale, torch.zeros(31), 32, "bias is not a dense vector of 32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(x, w, s, bias, outputs)


def test_a_model_is_exchanged_in_place_and_what_is_tied_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(96, 64)
            self.body = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 64, bias=False))
            self.head = nn.Linear(64, 96, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            result: Tensor = self.head(self.body(self.embedding(tokens)))
            return result

    model = Tied().requires_grad_(False)
    embedding, expected = model.embedding.weight.clone(), model(torch.arange(9))
    assert quantize_linears(model, device=CPU) == 3
    assert torch.equal(model.embedding.weight, embedding)
    assert isinstance(model.body[2], Int8Linear)
    assert model.body[2].realisation == int8.STOCK  # 48 inputs are no multiple of 32
    assert 0 < off_by(model(torch.arange(9)), expected) < 0.02
    with pytest.raises(BadConfig, match="Tied has no linear layer"):
        quantize_linears(model, device=CPU)


def test_where_nothing_compiles_stock_operators_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "operators", lambda: None)
    model = nn.Sequential(layer(32, 64, torch.float32))
    quantize_linears(model, device=CPU)
    assert model[0].realisation == int8.STOCK
    x = rows(3, 64, torch.float32)
    same = layer(32, 64, torch.float32)
    assert torch.equal(model(x), stock(x, *quantize(same.weight), same.bias))


@pytest.mark.parametrize("realisation", ["as the machine has it", "stock"])
def test_the_whole_model_gives_the_tokens_of_the_same_numbers_in_float32(
    realisation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose linear weights are rounded to those numbers is the same model."""
    if realisation == "stock":
        monkeypatch.setattr(int8, "operators", lambda: None)
    toy, rounded = toy_directory(tmp_path / "toy"), toy_directory(tmp_path / "rounded")
    weights = load_file(toy / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            numbers, scale = quantize(weight)
            weights[name] = numbers * scale[:, None]
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    ours, theirs, original = (
        tokens_of(executor(folder, quantize=how)) for folder, how in ((toy, "int8"), (rounded, "none"), (toy, "none"))
    )
    assert ours == theirs
    assert ours != original  # on this model, rounding shows within 24 tokens


def test_rounded_weights_are_another_model(tmp_path: Path) -> None:
    toy = toy_directory(tmp_path)
    whole, rounded = (executor(toy, quantize=how).describe() for how in ("none", "int8"))
    assert whole.fingerprint != rounded.fingerprint
    assert executor(toy).describe().fingerprint == whole.fingerprint


def test_the_triton_kernel_gives_exact_arithmetic_in_the_interpreter() -> None:
    with interpreter() as process:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):  # it multiplies no bfloat16
            for outputs, inputs in ((33, 40), (130, 300)):  # no multiple of any tile
                linear = layer(outputs, inputs, dtype)
                numbers, scale = quantize(linear.weight)
                for count in (1, 17, 70):
                    x = rows(count, 2 * inputs, dtype)[:, :inputs]  # rows apart in memory
                    for bias in (linear.bias, None):
                        found = process.submit(int8_interpreted.int8_linear, x, numbers, scale, bias).result()
                        assert found.shape == (count, outputs)
                        assert off_by(found, exact(x, numbers, scale, bias)) < tolerance, (dtype, count)


@pytest.mark.parametrize("architecture", SHARED_LIMIT_BYTES, ids=lambda a: f"sm_{a}")
@pytest.mark.parametrize("rows_of_x", [1, 512])
def test_the_triton_kernel_compiles_ahead_without_a_spill(rows_of_x: int, architecture: int) -> None:
    tile = tile_of(rows_of_x, itemsize=2)
    pointers = {"x": "*bf16", "numbers": "*i8", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"}
    constants = {
        "BIASED": True,
        "PRECISION": "tf32",
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
    }
    names = int8_linear_kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = [place for place, name in enumerate(names) if name in (*pointers, "x_stride", "N", "K")]
    source = ASTSource(
        fn=int8_linear_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    taken = resources_of(compiled.asm["cubin"], compiled.metadata.shared, architecture)
    assert taken.stack_bytes == 0
    assert taken.shared_bytes <= SHARED_LIMIT_BYTES[architecture]


def executor(folder: Path, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(folder),
        "methods": "eager",
        "kv_tokens": 512,
        "max_step_tokens": 64,
        "widths": (1, 2, 4),
        "max_sequences": 8,
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


def tokens_of(built: Executor) -> list[int]:
    driver = StepDriver(built)
    sequence = driver.open()
    found = list(driver.step(Work(sequence, [5, 6, 7, 8, 9])))
    for _ in range(24):
        found += driver.step(Work(sequence))
    return found
