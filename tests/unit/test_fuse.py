"""What a traced model's runs of stock operators become, and that the numbers stay."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.checkpoint import find_checkpoint
from microtome.cuda_runtime.linear.fuse import fuse
from microtome.cuda_runtime.linear.packed import can_pack, operators, pack_linears
from microtome.cuda_runtime.model import CellModel, load_model, read_geometry
from microtome.cuda_runtime.program import PREFILL, export
from tests.support.cell_runner import CPU, CellRunner
from tests.support.families import family_directory

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def served(dtype: torch.dtype) -> bool:
    return can_pack(nn.Linear(64, 64).to(dtype))


class Norm(nn.Module):
    """As the library writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, size: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.before, self.after = Norm(size), Norm(size)
        self.gate, self.up = nn.Linear(size, inner), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + self.before(x)
        normed = self.after(total)
        return total + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed)), normed


class Rotation(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def half_turned(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(model: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[list[str], nn.Module, int]:
    """Which operators of ours the traced model calls after fusing, the model, and how many places were found."""
    with torch.no_grad():
        traced = torch.export.export(model, arguments)
    count = fuse(traced.graph)
    traced.graph_module.recompile()
    names = [str(node.target) for node in traced.graph.nodes if str(node.target).startswith("microtome.")]
    return [name.split(".")[1] for name in names], traced.module(), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms_and_gates_become_one_operator_each_and_give_the_same_numbers(dtype: torch.dtype, rows: int) -> None:
    if not served(dtype):
        return
    torch.manual_seed(1)
    model = Layer().to(dtype).requires_grad_(False)
    arguments = (numbers(1, rows, 64, dtype=dtype), numbers(1, rows, 64, dtype=dtype, seed=1))
    assert pack_linears(model) == 3
    expected = model(*arguments)
    names, ours, count = fused(model, arguments)
    assert names == ["norm", "add_norm", "packed_gated", "packed_linear"]
    assert count == 3
    for found, wanted in zip(ours(*arguments), expected, strict=True):
        assert torch.allclose(found.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "size"), [(9, 3, 70, 64), (2, 2, 1, 80), (4, 1, 5, 12)])
def test_heads_are_turned_by_one_operator(
    dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, size: int
) -> None:
    if not served(dtype):
        return
    q = numbers(1, tokens, heads, size, dtype=dtype).transpose(1, 2)
    k = numbers(1, tokens, kv_heads, size, dtype=dtype, seed=1).transpose(1, 2)
    angles = numbers(1, tokens, size, dtype=dtype, seed=2), numbers(1, tokens, size, dtype=dtype, seed=3)
    names, ours, _ = fused(Rotation(), (q, k, *angles))
    assert names == ["rotate"]
    exact = Rotation()(q.double(), k.double(), *(angle.double() for angle in angles))
    for found, wanted in zip(ours(q, k, *angles), exact, strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_only_looks_like_it_stays_as_it_is() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))
            self.gate, self.up = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            centred = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            used_twice = self.weight * centred + centred  # the quotient is wanted too
            by_width = self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))  # another axis
            gate = self.gate(x)
            other_rows = nn.functional.silu(gate) * self.up(x * 2)
            return used_twice + by_width + other_rows + nn.functional.gelu(gate)

    model = Others().requires_grad_(False)
    x = numbers(1, 4, 64, dtype=torch.float32)
    if pack_linears(model) == 0:
        return
    expected = model(x)
    names, ours, count = fused(model, (x,))
    assert names == ["packed_linear", "packed_linear"]
    assert count == 0
    assert torch.equal(ours(x), expected)


def test_operands_that_do_not_fit_are_refused() -> None:
    if not served(torch.float32):
        return
    x, weight = numbers(2, 64, dtype=torch.float32), torch.ones(64)
    for words, call in (
        ("not a dense vector of 64", lambda: operators().norm(x, weight[:32], 1e-5)),
        ("not added row by row", lambda: operators().add_norm(x, x[:1], weight, 1e-5)),
        ("no unit for Half", lambda: operators().norm(x.half(), weight.half(), 1e-5)),
        ("do not fit heads", lambda: operators().rotate(x[None, None], x[None, None], x[None, :1], x[None])),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning:torch.*")  # torch's own
@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("llama", {"add_norm", "norm", "packed_gated", "rotate"}),
        ("qwen3", {"add_norm", "norm", "packed_gated", "rotate"}),  # heads have norms of their own
        ("gemma2", {"norm", "rotate"}),  # its norms' weights are computed, after the sum; its gate is another
        ("gpt_neox", {"rotate"}),  # part of a head is turned; its norms are others
    ],
)
def test_a_familys_program_has_the_logits_and_cells_of_the_librarys_code(
    tmp_path: Path, name: str, called: set[str]
) -> None:
    causal_lm = load_model(find_checkpoint(str(family_directory(tmp_path, name))), device=CPU, dtype=torch.float32)
    layers = read_geometry(causal_lm, CPU)
    pack_linears(causal_lm)
    model = CellModel(causal_lm, get_attention(default_attention(CPU)))
    program = export(model, PREFILL, layers=layers, kv_dtype=torch.float32, max_step_tokens=64)
    if served(torch.float32):
        names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert {
            name for name in ("add_norm", "norm", "packed_gated", "rotate") if f"microtome.{name}.default" in names
        } == called
    ours, librarys = CellRunner(model, layers), CellRunner(model, layers)
    with torch.inference_mode():
        for work in (([5, 17, 3, 29, 11, 8, 2], [5, 17, 3]), ([7], [9])):
            given = list(enumerate(work))
            logits = program.module()(*ours.columns(*given), ours.rows.device, ours.pool.k, ours.pool.v)
            wanted = model(*librarys.columns(*given), librarys.rows.device, librarys.pool.k, librarys.pool.v)
            assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    for pool, other in zip((*ours.pool.k, *ours.pool.v), (*librarys.pool.k, *librarys.pool.v), strict=True):
        assert torch.allclose(pool[:-1], other[:-1], rtol=1e-4, atol=1e-4, equal_nan=True)  # the last one is padding's
