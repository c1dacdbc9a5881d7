"""The Triton realisation on a GPU: right in every dtype, and right when a captured call is replayed for new lengths."""

from dataclasses import replace

import pytest
import torch

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from tests.support.ragged import Ragged, Shape, make_ragged

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SHAPES = {
    "decodes": Shape(inputs=tuple((37 * i, 1) for i in range(20)), heads=9, kv_heads=3, head_size=64),
    "long decodes": Shape(inputs=((5000, 1), (3, 1)), heads=32, kv_heads=8, head_size=128),
    "mixed": Shape(inputs=((300, 1), (0, 200), (1000, 1), (64, 100)), heads=8, head_size=128, padding=5),
    "windowed and capped": Shape(inputs=((500, 1), (0, 130)), head_size=256, window=100, softcap=20.0),
    "sinks": Shape(inputs=((500, 1), (0, 130)), heads=64, kv_heads=8, head_size=64, window=128, sinks=True),
    "clones": Shape(inputs=((600, 1), (600, 1), (300, 64)), clones=True, head_size=96),
}


def run(name: str, batch: Ragged) -> torch.Tensor:
    tensors = (batch.q, batch.k, batch.v, batch.k_pool, batch.v_pool, batch.rows, batch.token_rows, batch.positions)
    return get_attention(name).update_and_attend(
        *(tensor.cuda() for tensor in tensors),
        scale=batch.scale,
        window=batch.window,
        softcap=batch.softcap,
        sinks_N=None if batch.sinks is None else batch.sinks.cuda(),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_attention_over_histories(name: str, dtype: torch.dtype) -> None:
    batch = make_ragged(replace(SHAPES[name], dtype=dtype), seed=1)
    out = run("triton", batch)
    assert torch.isfinite(out).all()
    got = out[: batch.real_tokens].double().cpu()
    torch.testing.assert_close(got, batch.expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_pool_of_another_dtype_equals_attention_over_histories() -> None:
    e4m3 = torch.cuda.get_device_capability() >= (8, 9)
    pool_dtype = torch.float8_e4m3fn if e4m3 else torch.float16
    batch = make_ragged(replace(SHAPES["mixed"], dtype=torch.bfloat16, pool_dtype=pool_dtype), seed=2)
    got = run("triton", batch)[: batch.real_tokens].double().cpu()
    torch.testing.assert_close(got, batch.expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_captured_call_is_valid_for_later_lengths(tokens: int) -> None:
    """Captured at length 1, replayed at lengths it has never seen, with rows written after the capture."""
    attention = get_attention(default_attention(torch.device("cuda")))
    heads, kv_heads, size, longest = 8, 2, 64, 3000
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    pools = normal(tokens * longest + 1, kv_heads, size), normal(tokens * longest + 1, kv_heads, size)
    q, k, v = normal(tokens, heads, size), normal(tokens, kv_heads, size), normal(tokens, kv_heads, size)
    rows = torch.zeros(tokens, longest, dtype=torch.int32, device="cuda")
    token_rows = torch.arange(tokens, dtype=torch.int32, device="cuda")
    positions = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return attention.update_and_attend(q, k, v, *pools, rows, token_rows, positions, scale=0.125)

    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    rows.copy_(torch.randperm(tokens * longest, device="cuda", generator=generator).view(tokens, longest))
    for length in (1, 64, 65, 1000, longest):
        positions.copy_((length - 1 - torch.arange(tokens, device="cuda")).clamp(min=0))
        q.copy_(normal(tokens, heads, size))
        graph.replay()
        torch.testing.assert_close(captured, call(), rtol=0, atol=0)
