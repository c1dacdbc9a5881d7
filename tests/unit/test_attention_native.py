"""What the C++ realisation promises beyond being right: steady bits, checked input, one build, any instruction set."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from microtome.cuda_runtime import native_library
from microtome.cuda_runtime.attention import cpu_native
from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.planner.errors import BadConfig
from tests.support.ragged import Ragged, Shape, make_ragged

OTHER_INSTRUCTION_SETS = {"x86_64": ("x86-64", "x86-64-v3"), "aarch64": ("armv8-a",)}.get(platform.machine(), ())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that wants more says so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend(batch: Ragged, token: int | None = None) -> torch.Tensor:
    """The whole batch, or one token of it in a forward of its own; the batch's tokens are in their cells already."""
    which = slice(None) if token is None else slice(token, token + 1)
    return get_attention("cpu_native").attend(
        batch.q[which],
        batch.k_pool,
        batch.v_pool,
        batch.rows,
        batch.token_rows[which],
        batch.positions[which],
        scale=batch.scale,
        window=batch.window,
        softcap=batch.softcap,
        sinks_N=batch.sinks,
    )


def written(shape: Shape, seed: int) -> Ragged:
    batch = make_ragged(shape, seed)
    get_attention("cpu_native").write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_lone_tokens_bits_depend_on_no_batch_mate_and_no_thread(dtype: torch.dtype) -> None:
    """A generation must not change with its company, nor when its history grows past what one thread takes."""
    lengths = (1, 40, 255, 256, 257, 700, 1300)
    batch = written(
        Shape(inputs=tuple((n - 1, 1) for n in lengths), heads=6, kv_heads=2, head_size=64, sinks=True, dtype=dtype), 1
    )
    together = attend(batch)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(attend(batch), together)
        for token in range(len(lengths)):
            assert torch.equal(attend(batch, token)[0], together[token]), (count, lengths[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 150])
def test_long_prompt_in_chunks_equals_attention_over_histories(dtype: torch.dtype, window: int) -> None:
    """Longer than every block of every kernel; a chunk that starts in the middle of one."""
    shape = Shape(inputs=((0, 300), (333, 90)), heads=3, kv_heads=1, head_size=64, window=window, dtype=dtype)
    batch = written(shape, 2)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(batch).double(), batch.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_prompts_bits_depend_on_no_thread(dtype: torch.dtype) -> None:
    batch = written(Shape(inputs=((0, 150), (40, 1), (33, 90)), heads=6, kv_heads=2, head_size=64, dtype=dtype), 7)
    alone = attend(batch)
    torch.set_num_threads(2)
    assert torch.equal(attend(batch), alone)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_dtypes_may_differ_or_have_no_kernel(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    batch = written(Shape(inputs=((40, 1), (3, 30)), dtype=dtype, pool_dtype=pool_dtype), 3)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(batch).double(), batch.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [8, 24, 272])
def test_head_size_without_a_kernel_goes_to_the_stock_operators(size: int) -> None:
    batch = written(Shape(inputs=((20, 1), (0, 9)), head_size=size), 4)
    torch.testing.assert_close(attend(batch).double(), batch.expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_rows", 5, r"row 5 at token 1 is not in \[0, 5\)"),
        ("token_rows", -1, r"row -1 at token 1 is not in \[0, 5\)"),
        ("positions", 15, r"position 15 at token 1 is not in \[0, 15\)"),
        ("positions", 12, r"cell \S+ at token 1 is not in \[0, 21\)"),  # an entry of the row that nobody wrote
    ],
)
def test_number_that_names_nothing_is_refused_untouched(field: str, value: int, message: str) -> None:
    batch = make_ragged(Shape(inputs=((9, 1), (2, 1))), 5)
    getattr(batch, field)[1] = value
    before = batch.k_pool.clone()
    with pytest.raises(IndexError, match=message):
        get_attention("cpu_native").update_and_attend(
            batch.q,
            batch.k,
            batch.v,
            batch.k_pool,
            batch.v_pool,
            batch.rows,
            batch.token_rows,
            batch.positions,
            scale=batch.scale,
        )
    torch.testing.assert_close(batch.k_pool, before, rtol=0, atol=0, equal_nan=True)


def test_tensors_of_the_wrong_shape_are_refused() -> None:
    batch = written(Shape(inputs=((9, 1), (2, 1)), heads=4, kv_heads=2, head_size=32), 6)
    with pytest.raises(RuntimeError, match="q's 3 heads are no multiple of 2 key/value heads"):
        attend(replace(batch, q=batch.q[:, :3]))
    with pytest.raises(RuntimeError, match="positions is not a dense int32 vector of 2"):
        attend(replace(batch, positions=batch.positions.long()))
    with pytest.raises(RuntimeError, match="the pools are not dense"):
        attend(replace(batch, k_pool=batch.k_pool[:, :, ::2], v_pool=batch.v_pool[:, :, ::2], q=batch.q[:, :, ::2]))


@pytest.mark.parametrize("march", OTHER_INSTRUCTION_SETS)
def test_other_instruction_sets_give_the_same(march: str) -> None:
    """The vectors have other widths there; no machine at hand may have them, but every one runs the older sets."""
    command = [sys.executable, "-m", "tests.support.other_instruction_set", march]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_second_build_is_the_first(tmp_path: Path) -> None:
    built = cpu_native.build()
    stamp = built.stat().st_mtime_ns
    assert cpu_native.build() == built
    assert built.stat().st_mtime_ns == stamp


def test_machine_without_a_compiler_uses_stock_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(BadConfig, match="needs a C\\+\\+ compiler; none of no-such-compiler is on the path"):
        cpu_native.build()
    assert default_attention(torch.device("cpu")) == "cpu"
    assert "slower" in caplog.text


def test_failed_build_leaves_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_library, "KERNEL_FLAGS", ("-fno-such-flag",))
    monkeypatch.setattr(native_library, "BINDING_FLAGS", ("-fno-such-flag",))
    with pytest.raises(BadConfig, match=r"does not compile with .*: .*-fno-such-flag"):
        cpu_native.build(cache_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_default_on_a_cpu_with_a_compiler_is_native() -> None:
    assert default_attention(torch.device("cpu")) == "cpu_native"
    assert default_attention(torch.device("cuda")) == "triton"
