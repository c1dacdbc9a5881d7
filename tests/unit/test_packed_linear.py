"""Linear layers over packed weights against torch's own, on each unit this CPU has."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microtome.cuda_runtime.arena import HUGE_PAGE, Arena, room
from microtome.cuda_runtime.linear import packed
from microtome.cuda_runtime.linear.packed import (
    PackedLinear,
    can_pack,
    join_side_by_side,
    operators,
    pack,
    pack_linears,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS = (1, 2, 3, 5, 11, 12, 13, 16, 17, 31, 32, 33, 64, 70)
SHAPES = ((64, 64), (192, 96), (33, 32), (1, 64), (130, 160), (31, 608))  # outputs, inputs


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


def runnable(dtype: torch.dtype) -> list[str]:
    """The operators that this machine has for `dtype`."""
    found = operators()
    if found is None:
        return []
    if dtype == torch.float32:
        return ["packed_linear"] if found.float32_served() else []
    return [
        name for least, name in ((1, "packed_linear_vectors"), (2, "packed_linear")) if found.bfloat16_unit() >= least
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_results_are_those_of_exact_arithmetic(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    linear = layer(outputs, inputs, dtype)
    for name in runnable(dtype):
        for count in ROWS:
            x = rows(count, inputs, dtype)
            exact = x.double() @ linear.weight.double().T + linear.bias.double()
            found = getattr(operators(), name)(x, pack(linear.weight), linear.bias, outputs)
            assert found.dtype == dtype
            assert torch.allclose(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]), (name, count)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    linear = layer(192, 608, dtype)
    x = rows(70, 608, dtype)
    for name in runnable(dtype):
        run, weight = getattr(operators(), name), pack(linear.weight)
        torch.set_num_threads(1)
        alone = torch.cat([run(x[i : i + 1], weight, linear.bias, 192) for i in range(70)])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in ROWS:
                assert torch.equal(run(x[:count], weight, linear.bias, 192), alone[:count]), (name, threads, count)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_shape_of_input_is_taken_and_bias_is_optional(dtype: torch.dtype) -> None:
    if not runnable(dtype):
        return
    linear = layer(40, 64, dtype, bias=False)
    ours = PackedLinear(linear)
    x = rows(24, 128, dtype).view(2, 12, 128)[:, ::2, :64]  # rows apart in memory
    assert ours(x).shape == (2, 6, 40)
    assert torch.allclose(ours(x).float(), linear(x).float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert ours(x[:0]).shape == (0, 6, 40)


def test_a_model_is_packed_in_place_and_tied_weights_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(96, 64)
            self.body = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64, bias=False))
            self.head = nn.Linear(64, 96, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            result: Tensor = self.head(self.body(self.embedding(tokens)))
            return result

    model = Tied().requires_grad_(False)
    expected = model(torch.arange(9))
    packable = can_pack(model.head)
    assert pack_linears(model) == (3 if packable else 0)
    assert isinstance(model.head, PackedLinear) is packable
    assert torch.allclose(model(torch.arange(9)), expected, atol=1e-5)
    assert pack_linears(model) == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers_side_by_side_have_the_bits_of_layers_one_by_one(dtype: torch.dtype) -> None:
    if not runnable(dtype):
        return
    layers = [layer(192, 96, dtype), layer(33, 96, dtype, bias=False), layer(64, 96, dtype)]
    arguments = [(pack(linear.weight), linear.bias, linear.out_features) for linear in layers]
    for count in ROWS:
        x = rows(count, 96, dtype)
        alone = [operators().packed_linear(x, *argument) for argument in arguments]
        for together in (
            operators().packed_linear_2(x, *arguments[0], *arguments[1]),
            operators().packed_linear_3(x, *arguments[0], *arguments[1], *arguments[2]),
        ):
            assert all(torch.equal(ours, expected) for ours, expected in zip(together, alone, strict=False))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_is_silu_of_one_layer_times_the_other_in_any_company(dtype: torch.dtype, bias: bool) -> None:
    gate, up = layer(150, 96, dtype, bias=bias), layer(150, 96, dtype, bias=bias)
    up.weight.mul_(-2)
    x = rows(70, 96, dtype)
    for name in runnable(dtype):
        run = getattr(operators(), name.replace("linear", "gated"))
        weights = (pack(gate.weight), gate.bias, pack(up.weight), up.bias)
        torch.set_num_threads(1)
        alone = torch.cat([run(x[i : i + 1], *weights, 150) for i in range(70)])
        # The parts are rounded as the layers' own results are.
        parts = [getattr(operators(), name)(x, *weights[at : at + 2], 150) for at in (0, 2)]
        exact = nn.functional.silu(parts[0].double()) * parts[1].double()
        assert torch.allclose(alone.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6), name
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in ROWS:
                assert torch.equal(run(x[:count], *weights, 150), alone[:count]), (name, threads, count)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gate_takes_the_largest_numbers_and_keeps_what_is_none(dtype: torch.dtype) -> None:
    weight = pack(torch.eye(32, dtype=dtype))
    values = torch.tensor([0.0, 1e15, -1e30, 100.0, -100.0, -20.0, 88.0, torch.nan], dtype=dtype)
    # One value a row: a NaN among a row's inputs is one in all its outputs.
    x = torch.diag(nn.functional.pad(values, (0, 24)))
    for name in runnable(dtype):
        for count in (8, 32):
            result = getattr(operators(), name.replace("linear", "gated"))(x[:count], weight, None, weight, None, 32)
            found, given = result.diagonal()[:7].double(), values[:7].double()
            assert torch.allclose(found, nn.functional.silu(given) * given, rtol=TOLERANCE[dtype], atol=1e-6), name
            assert result[7].isnan().all()


def test_a_traced_model_runs_layers_over_the_same_rows_side_by_side() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(layer(32 * (index + 1), 64, torch.float32) for index in range(6))
            self.last = layer(64, 64, torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            widths = [branch(x * 2 if index == 5 else x).sum() for index, branch in enumerate(self.branches)]
            result: Tensor = self.last(x + torch.stack(widths).sum())
            return result

    model = Branches()
    if pack_linears(model) == 0:
        return
    x = rows(3, 64, torch.float32)
    expected = model(x)
    traced = torch.export.export(model, (x,))
    assert join_side_by_side(traced.graph) == 5  # three and two; the sixth branch and the last have rows of their own
    traced.graph_module.recompile()
    names = [str(node.target) for node in traced.graph.nodes if "packed_linear" in str(node.target)]
    assert [name.split(".")[1] for name in names] == [
        "packed_linear_3",
        "packed_linear_2",
        "packed_linear",
        "packed_linear",
    ]
    assert torch.equal(traced.module()(x), expected)
    assert join_side_by_side(traced.graph) == 0


def test_what_the_kernels_do_not_take_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(layer(32, 64, torch.float16))
    assert not can_pack(layer(32, 48, torch.bfloat16))  # no multiple of 32
    monkeypatch.setattr(packed, "operators", lambda: None)  # no compiler
    assert not can_pack(layer(32, 64, torch.float32))


def test_mismatched_operands_are_refused() -> None:
    if not runnable(torch.float32):
        return
    linear = layer(32, 64, torch.float32)
    weight = pack(linear.weight)
    run = operators().packed_linear
    for x, w, bias, outputs, words in (
        (rows(2, 32, torch.float32), weight, None, 32, "does not take 32 inputs"),
        (rows(2, 64, torch.float32), weight, None, 33, "to 33 outputs"),
        (rows(2, 64, torch.bfloat16), weight, None, 32, "not a dense BFloat16"),
        (rows(2, 64, torch.float32), weight, torch.zeros(31), 32, "bias is not a dense vector of 32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(x, w, bias, outputs)


def test_an_arena_hands_out_aligned_zeros_until_it_is_full() -> None:
    arena = Arena(room(12) + room(100))
    first, second = arena.empty((3,), torch.float32), arena.empty((5, 10), torch.bfloat16)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() % 64 == 0
    assert not first.any()
    assert not second.any()
    first.fill_(7)
    assert not second.any()
    with pytest.raises(MemoryError, match="1 bytes asked for, 0 of 192 left"):
        arena.empty((1,), torch.uint8)
    del arena
    assert first.tolist() == [7, 7, 7]  # tensors keep the memory alive


def test_an_arena_is_private_memory_on_which_large_pages_are_advised() -> None:
    """Shared anonymous memory is a file to the kernel, which leaves it on small pages."""
    held = Arena(HUGE_PAGE).empty((1,), torch.uint8)
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = low <= held.data_ptr() < high
        if inside and words[0] == "VmFlags:":
            found["flags"] = line
        elif inside and "-" in words[0]:
            found["permissions"] = words[1]
    assert found["permissions"] == "rw-p"
    assert " hg" in found["flags"]
