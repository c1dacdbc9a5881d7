"""Every realisation that runs on a CPU gives what attention over the plain history gives, and reads nothing else."""

import random
from collections.abc import Iterator

import pytest
import torch

from microtome.cuda_runtime.attention.registry import get_attention
from microtome.cuda_runtime.attention.seam import Attention
from microtome.planner.errors import BadConfig
from tests.support.ragged import Ragged, Shape, make_ragged

ON_CPU = ["reference", "cpu", "cpu_native"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What threads change is tested where threads are promised something; here they would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ON_CPU)
def attention(request: pytest.FixtureRequest) -> Attention:
    return get_attention(request.param)


def attend_all(attention: Attention, batch: Ragged) -> torch.Tensor:
    """Write the new tokens, then attend into a poisoned output."""
    attention.write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
    out = torch.full_like(batch.q, float("nan"))
    result = attention.attend(
        batch.q,
        batch.k_pool,
        batch.v_pool,
        batch.rows,
        batch.token_rows,
        batch.positions,
        scale=batch.scale,
        window=batch.window,
        softcap=batch.softcap,
        sinks_N=batch.sinks,
        out_TNH=out,
    )
    assert result is out
    return out


def assert_as_expected(out: torch.Tensor, batch: Ragged, tolerance: float) -> None:
    assert torch.isfinite(out).all(), "padding tokens included, every output is finite"
    torch.testing.assert_close(out[: batch.real_tokens].double(), batch.expected, rtol=tolerance, atol=tolerance)


def random_shape(seed: int, dtype: torch.dtype) -> Shape:
    chosen = random.Random(seed)
    kv_heads = chosen.choice([1, 2, 3])
    return Shape(
        inputs=tuple(
            (chosen.choice([0, 0, 1, 5, 15, 16, 17, 40, 70, 131]), chosen.choice([1, 1, 1, 2, 3, 7, 16, 33, 65]))
            for _ in range(chosen.randint(1, 6))
        ),
        kv_heads=kv_heads,
        heads=kv_heads * chosen.choice([1, 2, 3, 4, 7]),
        head_size=chosen.choice([16, 32, 64, 80, 96, 128]),
        window=chosen.choice([0, 0, 1, 4, 9, 33]),
        softcap=chosen.choice([0.0, 0.0, 2.0]),
        sinks=chosen.random() < 0.3,
        padding=chosen.choice([0, 0, 1, 5]),
        clones=chosen.random() < 0.5,
        ordered_cells=chosen.random() < 0.3,
        dtype=dtype,
    )


# holds E21, E24
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(20))
def test_random_ragged_batches_equal_attention_over_histories(
    attention: Attention, seed: int, dtype: torch.dtype
) -> None:
    batch = make_ragged(random_shape(seed, dtype), seed)
    assert_as_expected(attend_all(attention, batch), batch, TOLERANCE[dtype])


def test_one_operator_writes_then_attends(attention: Attention) -> None:
    shape = Shape(inputs=((9, 1), (0, 7), (3, 2)), window=5, padding=2)
    apart, joined = make_ragged(shape, seed=1), make_ragged(shape, seed=1)
    expected = attend_all(attention, apart)
    out = attention.update_and_attend(
        joined.q,
        joined.k,
        joined.v,
        joined.k_pool,
        joined.v_pool,
        joined.rows,
        joined.token_rows,
        joined.positions,
        scale=joined.scale,
        window=joined.window,
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(joined.k_pool[:-1], apart.k_pool[:-1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(joined.v_pool[:-1], apart.v_pool[:-1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tokens_see_what_others_of_the_same_forward_write(
    attention: Attention, dtype: torch.dtype, window: int
) -> None:
    """The second and fourth sequences go on behind tokens of the first and third that this forward computes."""
    shape = Shape(inputs=((4, 30), (34, 7), (0, 70), (64, 1)), followers=True, window=window, padding=2, dtype=dtype)
    batch = make_ragged(shape, seed=4)
    out = attention.update_and_attend(
        batch.q,
        batch.k,
        batch.v,
        batch.k_pool,
        batch.v_pool,
        batch.rows,
        batch.token_rows,
        batch.positions,
        scale=batch.scale,
        window=batch.window,
    )
    torch.testing.assert_close(
        out[: batch.real_tokens].double(), batch.expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_writing_touches_no_other_cell(attention: Attention) -> None:
    batch = make_ragged(Shape(inputs=((4, 1), (0, 3))), seed=2)
    before = batch.k_pool.clone()
    attention.write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[batch.cells.long()] = False
    torch.testing.assert_close(batch.k_pool[untouched], before[untouched], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.k_pool[batch.cells.long()], batch.k, rtol=0, atol=0)
    torch.testing.assert_close(batch.v_pool[batch.cells.long()], batch.v, rtol=0, atol=0)


def test_heads_may_lie_in_a_models_layout(attention: Attention) -> None:
    """A model hands over [heads, T, H] turned round; nobody may take it for dense."""
    batch = make_ragged(Shape(inputs=((9, 1), (0, 7))), seed=3)
    expected = attend_all(attention, batch)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v)]
    assert not turned[0].is_contiguous()
    attention.write_cells(turned[1], turned[2], batch.k_pool, batch.v_pool, batch.cells)
    out = attention.attend(
        turned[0],
        batch.k_pool,
        batch.v_pool,
        batch.rows,
        batch.token_rows,
        batch.positions,
        scale=batch.scale,
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


# holds E22
def test_clone_sees_what_its_source_wrote(attention: Attention) -> None:
    shape = Shape(inputs=((40, 1), (40, 1), (20, 3), (25, 9)), clones=True)
    batch = make_ragged(shape, seed=4)
    first, second = batch.token_rows[0], batch.token_rows[1]
    assert torch.equal(batch.rows[first, :40], batch.rows[second, :40]), "the clone shares its source's cells"
    assert_as_expected(attend_all(attention, batch), batch, TOLERANCE[torch.float32])


def test_softmax_survives_large_logits(attention: Attention) -> None:
    batch = make_ragged(Shape(inputs=((70, 1), (30, 40)), sinks=True), seed=5)
    batch.q.mul_(200.0)  # exp of the raw logits overflows float32
    out = attend_all(attention, batch)
    assert torch.isfinite(out).all()


def test_fp8_pool_clamps_what_it_cannot_hold(attention: Attention) -> None:
    shape = Shape(inputs=((33, 1), (0, 20)), dtype=torch.bfloat16, pool_dtype=torch.float8_e4m3fn)
    batch = make_ragged(shape, seed=6)
    assert_as_expected(attend_all(attention, batch), batch, TOLERANCE[torch.bfloat16])
    batch.k[0] = 1e4
    attention.write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
    assert (batch.k_pool[batch.cells[0].long()].float() == 448.0).all()


def test_operator_is_sound_for_compile_and_export(attention: Attention) -> None:
    batch = make_ragged(Shape(inputs=((9, 1), (0, 7))), seed=7)
    name = f"update_and_attend_{attention.name}"
    torch.library.opcheck(
        getattr(torch.ops.microtome, name).default,
        (
            batch.q,
            batch.k,
            batch.v,
            batch.k_pool.nan_to_num(),
            batch.v_pool.nan_to_num(),
            batch.rows,
            batch.token_rows,
            batch.positions,
            batch.scale,
            0,
            0.0,
            None,
        ),
    )


def test_unknown_realisation_is_refused_by_name() -> None:
    with pytest.raises(
        BadConfig, match="attention 'flashy' is not known; known are reference, cpu, cpu_native, triton"
    ):
        get_attention("flashy")
