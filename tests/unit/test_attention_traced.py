"""One layer's call under torch.export and torch.compile: kept whole, at any number of tokens, copying no pool."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from microtome.cuda_runtime.attention.registry import get_attention

CELLS, HEADS, KV_HEADS, SIZE = 777, 4, 2, 16
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.compiler.reset()


class Layers(nn.Module):
    """Two layers that treat q, k and v as a decoder does: one product, split, turned to [heads, T, H] and back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = get_attention("cpu_native")
        torch.manual_seed(0)
        self.project = nn.Parameter(torch.randn(HEADS * SIZE, WIDTH) / 8, requires_grad=False)
        for layer in range(2):
            self.register_buffer(f"k_pool_{layer}", torch.zeros(CELLS, KV_HEADS, SIZE))
            self.register_buffer(f"v_pool_{layer}", torch.zeros(CELLS, KV_HEADS, SIZE))

    def forward(self, x: Tensor, rows: Tensor, token_rows: Tensor, positions: Tensor) -> Tensor:
        for layer in range(2):
            parts = (x @ self.project).split((HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE), dim=-1)
            q, k, v = (part.unflatten(-1, (-1, SIZE))[None].transpose(1, 2) for part in parts)
            out = self.attention.update_and_attend(
                torch.cos(q)[0].transpose(0, 1),
                torch.cos(k)[0].transpose(0, 1),
                v[0].transpose(0, 1),
                getattr(self, f"k_pool_{layer}"),
                getattr(self, f"v_pool_{layer}"),
                rows,
                token_rows,
                positions,
                scale=0.25,
            )
            x = x + torch.tanh(out.flatten(1))
        return x


def arguments(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HEADS * SIZE, generator=generator)
    rows = torch.randperm(CELLS - 1, generator=generator)[:600].int().view(2, 300)
    token_rows = (torch.arange(tokens) >= tokens // 2).int()
    positions = torch.cat((torch.arange(tokens // 2), torch.arange(tokens - tokens // 2))).int()
    return x, rows, token_rows, positions


def test_exported_program_runs_any_number_of_tokens() -> None:
    tokens = torch.export.Dim("tokens", min=2, max=512)
    shapes = ({0: tokens}, None, {0: tokens}, {0: tokens})
    program = torch.export.export(Layers(), arguments(8), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("microtome.update_and_attend_cpu_native.default") == 2
    for count in (2, 9, 300):
        torch.testing.assert_close(program.module()(*arguments(count)), Layers()(*arguments(count)))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # Inductor's own import
def test_compiled_layers_copy_no_pool_and_no_heads() -> None:
    """A copied pool would cost more than the whole step; a copied q, k or v is a memory trip per layer."""
    eager, compiled = Layers(), Layers()
    expected = eager(*arguments(8))
    out, (code,) = run_and_get_code(torch.compile(compiled, fullgraph=True), *arguments(8))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(compiled.v_pool_1, eager.v_pool_1)
    made = [tuple(map(int, shape.split(", "))) for shape in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code)]
    assert made, "the code must show what it allocates"
    assert all(shape[0] != CELLS for shape in made)
    # Per layer at most: the product, q and k behind cos. v is read where the product left it.
    assert sum(shape == (8, KV_HEADS, SIZE) for shape in made) <= 2
