"""The Triton kernels, interpreted on a CPU, give what attention over the plain history gives, and read nothing else.

In float32 and float16: the interpreter multiplies the raw bits of bfloat16 matrices. What differs between the types is
the compiler's business; that they compile for bfloat16 and fp8 is shown in `test_attention_triton_ahead`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from microtome.cuda_runtime.attention import triton_attention
from tests.support import interpreted
from tests.support.ragged import Shape, make_ragged

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}

# Single tokens and short runs; at most NARROW tokens, which are all taken alone.
NARROW = {
    "ragged decodes": Shape(inputs=((0, 1), (16, 1), (63, 1), (64, 1), (200, 1)), heads=6, kv_heads=2, head_size=64),
    "decodes that use many splits": Shape(inputs=((900, 1), (330, 1)), heads=4, kv_heads=1),
    "a prompt in a narrow forward": Shape(inputs=((0, 9), (40, 3), (7, 1)), padding=3, head_size=32),
    "a window": Shape(inputs=((0, 1), (3, 1), (4, 2), (170, 1)), window=4),
    "a window of one": Shape(inputs=((0, 1), (70, 1)), window=1),
    "a soft cap": Shape(inputs=((30, 1), (90, 2)), softcap=1.5),
    "sinks": Shape(inputs=((0, 1), (90, 1)), heads=8, kv_heads=2, sinks=True),
    "everything at once": Shape(inputs=((130, 1), (2, 3)), window=65, softcap=2.0, sinks=True, clones=True, padding=2),
    "clones that share cells": Shape(inputs=((80, 1), (80, 1), (50, 2)), clones=True),
    "tokens that see what others of the same forward write": Shape(inputs=((4, 9), (13, 3), (0, 2)), followers=True),
    "heads of 80": Shape(inputs=((20, 1), (0, 2)), head_size=80, heads=3, kv_heads=1),
    "heads of 256": Shape(inputs=((70, 1),), head_size=256, heads=2, kv_heads=1),
    "seventeen heads in a group": Shape(inputs=((20, 1), (1, 1)), heads=17, kv_heads=1),
}
# More tokens: runs go to tiles, tokens between them are taken alone.
WIDE = {
    "one prompt": Shape(inputs=((0, 70),), heads=6, kv_heads=2),
    "prompts, decodes and padding mixed": Shape(
        inputs=((5, 1), (70, 1), (0, 40), (33, 1), (12, 30), (0, 2), (9, 1)), padding=3, clones=True
    ),
    "a prompt behind what another of the same forward writes": Shape(
        inputs=((4, 30), (34, 20), (0, 17), (17, 1)), followers=True, window=40
    ),
    "a prompt's later chunk": Shape(inputs=((100, 50),), heads=3, kv_heads=1, head_size=64),
    "a window": Shape(inputs=((40, 45), (90, 1), (0, 20)), window=9),
    "a soft cap and sinks": Shape(inputs=((0, 20), (70, 1), (30, 30)), softcap=2.0, sinks=True),
    "nothing but decodes": Shape(inputs=tuple((3 * i, 1) for i in range(40)), kv_heads=1, heads=2),
    "heads of 96": Shape(inputs=((3, 40),), head_size=96, heads=2, kv_heads=2),
    "heads of 256, windowed": Shape(inputs=((20, 34),), head_size=256, heads=2, kv_heads=1, window=20, softcap=3.0),
}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with interpreted.interpreter() as pool:
        yield pool


def assert_as_expected(out: torch.Tensor, shape: Shape, seed: int) -> None:
    batch = make_ragged(shape, seed)
    tolerance = TOLERANCE[shape.dtype]
    assert torch.isfinite(out).all(), "padding tokens included, every output is finite"
    torch.testing.assert_close(out[: batch.real_tokens].double(), batch.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", NARROW.values(), ids=NARROW.keys())
def test_narrow_forward_equals_attention_over_histories(process: ProcessPoolExecutor, shape: Shape) -> None:
    assert sum(new for _, new in shape.inputs) + shape.padding <= triton_attention.NARROW
    assert_as_expected(process.submit(interpreted.attend, shape, 1).result(), shape, 1)


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE.keys())
def test_wide_forward_equals_attention_over_histories(process: ProcessPoolExecutor, shape: Shape) -> None:
    assert sum(new for _, new in shape.inputs) + shape.padding > triton_attention.NARROW
    assert_as_expected(process.submit(interpreted.attend, shape, 2).result(), shape, 2)


# holds E21, E24
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_batches_equal_attention_over_histories(process: ProcessPoolExecutor, seed: int) -> None:
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2])
    shape = Shape(
        inputs=tuple(
            (chosen.choice([0, 1, 15, 64, 70]), chosen.choice([1, 1, 2, 7, 17])) for _ in range(chosen.randint(2, 5))
        ),
        kv_heads=kv_heads,
        heads=kv_heads * chosen.choice([1, 3, 4]),
        head_size=chosen.choice([16, 48, 64]),
        window=chosen.choice([0, 0, 5, 66]),
        softcap=chosen.choice([0.0, 2.0]),
        sinks=chosen.random() < 0.5,
        padding=chosen.choice([0, 4]),
        clones=chosen.random() < 0.5,
        dtype=torch.float16 if seed % 2 else torch.float32,
    )
    assert_as_expected(process.submit(interpreted.attend, shape, seed).result(), shape, seed)


@pytest.mark.parametrize("inputs", [((9, 1), (0, 7), (3, 2)), ((9, 1), (0, 37))], ids=["narrow", "wide"])
def test_one_operator_writes_then_attends(process: ProcessPoolExecutor, inputs: tuple[tuple[int, int], ...]) -> None:
    shape = Shape(inputs=inputs, padding=2)
    out, k_pool, v_pool = process.submit(interpreted.update_and_attend, shape, 3).result()
    assert_as_expected(out, shape, 3)
    batch = make_ragged(shape, 3)
    cells = batch.cells[: batch.real_tokens].long()
    expected_k, expected_v = batch.k_pool.clone(), batch.v_pool.clone()
    expected_k[cells], expected_v[cells] = batch.k[: len(cells)], batch.v[: len(cells)]
    torch.testing.assert_close(k_pool[:-1], expected_k[:-1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_pool[:-1], expected_v[:-1], rtol=0, atol=0, equal_nan=True)


class Recorder:
    """Stands in for a kernel: notes grid and arguments that are not tensors."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*arguments: object, **constants: object) -> None:
            numbers = tuple(a for a in arguments if not isinstance(a, torch.Tensor))
            self.launches.append((grid, numbers, tuple(sorted(constants.items()))))

        return launch


# holds L8
@pytest.mark.parametrize("tokens", [1, 32, 33, 512])
def test_launch_depends_on_shapes_alone(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Tensors without storage: whatever looked at a row, a position or a length would raise."""
    recorder = Recorder()
    for name in ("write_cells", "attend_alone", "combine", "attend_tiles"):
        monkeypatch.setattr(triton_attention.kernels, name, recorder)
    q = torch.empty(tokens, 6, 64, device="meta")
    k = torch.empty(tokens, 2, 64, device="meta")
    pool = torch.empty(1025, 2, 64, device="meta")
    rows = torch.empty(65, 512, device="meta", dtype=torch.int32)
    index = torch.empty(tokens, device="meta", dtype=torch.int32)
    out = triton_attention.update_and_attend(q, k, k, pool, pool, rows, index, index, 0.125, 0, 0.0, None)
    assert out.shape == q.shape
    assert len(recorder.launches) == (3 if tokens <= triton_attention.NARROW else 4)
    for grid, _, _ in recorder.launches:
        assert all(isinstance(size, int) and size > 0 for size in grid)
