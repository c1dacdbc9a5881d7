"""Attention over cells on a GPU: chooses blocks and launches the Triton kernels.

Promises `seam.Attention` on CUDA tensors: float16, bfloat16 and float32 tokens; pools of those and of fp8 (e4m3) where
the device has it; head sizes up to 256. Nothing here looks at a number on the device, so every call can be captured.
A narrow forward (at most NARROW tokens) takes all its tokens alone; a wider one hands runs of tokens to tiles.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from microtome.cuda_runtime.attention import torch_operator
from microtome.cuda_runtime.attention import triton_kernels as kernels
from microtome.cuda_runtime.attention.seam import Attention

NARROW = 32  # tokens: up to here splitting the positions fills the device better than sharing them among tokens
PROGRAMS = 1024  # what a launch should have at least, to fill every current device several times over
LONE_PER_PROGRAM = 8  # in a wide forward most tokens are not lone: one program looks at several


@dataclass(frozen=True, slots=True)
class Launch:
    """The compile-time numbers of one kernel's launch."""

    constants: dict[str, Any]
    warps: int
    stages: int


def power_of_two(number: int) -> int:
    """The next one, at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def splits_of(tokens: int, kv_heads: int) -> int:
    """Into how many parts a lone token's positions are cut, whatever their number."""
    if tokens > NARROW:
        return 8
    return max(4, min(64, power_of_two(PROGRAMS // (tokens * kv_heads) or 1)))


def _precision(itemsize: int) -> str:
    """Float32 tokens are multiplied as float32, not as TF32; for narrower ones the word means nothing."""
    return "ieee" if itemsize == 4 else "tf32"


def _positions_at_once(block_h: int, itemsize: int) -> int:
    """Of a lone token: enough bytes in flight to stream, few enough to stay in registers."""
    if itemsize == 4:
        return 32 if block_h <= 64 else 16
    return 64 if block_h <= 128 else 32


def alone_launch(*, heads: int, kv_heads: int, size: int, itemsize: int, splits: int, narrow: bool) -> Launch:
    """`attend_alone`: 16 query heads at least, as the matrix units want; wide blocks of positions, since it streams."""
    block_h = max(16, power_of_two(size))
    return Launch(
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "SPLITS": splits,
            "TOKENS": 1 if narrow else LONE_PER_PROGRAM,
            "ONLY_LONE": not narrow,
            "PRECISION": _precision(itemsize),
            "BLOCK_G": max(16, power_of_two(heads // kv_heads)),
            "BLOCK_H": block_h,
            "BLOCK_P": _positions_at_once(block_h, itemsize),
        },
        warps=4,
        stages=3 if block_h * itemsize <= 512 else 2,
    )


def combine_launch(*, heads: int, size: int, splits: int, block_p: int, narrow: bool) -> Launch:
    return Launch(
        {
            "HEADS": heads,
            "SIZE": size,
            "SPLITS": splits,
            "TOKENS": 1 if narrow else LONE_PER_PROGRAM,
            "ONLY_LONE": not narrow,
            "BLOCK_H": max(16, power_of_two(size)),
            "BLOCK_P": block_p,
        },
        warps=4,
        stages=1,
    )


def tiles_launch(*, heads: int, kv_heads: int, size: int, itemsize: int, roomy: bool) -> Launch:
    """`attend_tiles`: as many queries a tile as no architecture has to spill for (`bench.kernel_resources`).

    `roomy` is sm_90 and up, whose matrix units take operands from shared memory and leave more registers free.
    """
    block_g = power_of_two(heads // kv_heads)
    block_h = max(16, power_of_two(size))
    row_bytes = block_h * itemsize
    if itemsize == 4:  # no matrix unit at full precision: everything stands in registers
        queries, positions = (32, 16) if row_bytes <= 512 else (16, 16)
    elif row_bytes <= 128:
        queries, positions = 128, 64
    elif row_bytes <= 256:
        queries, positions = 128, 64 if roomy else 32
    else:
        queries, positions = 64, 32
    return Launch(
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "PRECISION": _precision(itemsize),
            "BLOCK_T": max(1, queries // block_g),
            "BLOCK_G": block_g,
            "BLOCK_H": block_h,
            "BLOCK_P": positions,
        },
        warps=8 if queries >= 64 else 4,
        stages=3 if row_bytes <= 128 else 2,
    )


def write_launch(*, kv_heads: int, size: int, from_rows: bool) -> Launch:
    return Launch(
        {
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "BLOCK_K": power_of_two(kv_heads),
            "BLOCK_H": power_of_two(size),
            "FROM_ROWS": from_rows,
        },
        warps=4,
        stages=1,
    )


def write_cells(k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
    """Store K and V of each token in its cell, in place."""
    _write(k_TKH, v_TKH, k_pool, v_pool, cells_T, cells_T, cells_T, cells_T, from_rows=False)


def attend(
    q_TNH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows_SL: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_N: Tensor | None,
    out_TNH: Tensor,
) -> None:
    """Two launches for a narrow forward, three for a wide one."""
    tokens, heads, size = q_TNH.shape
    kv_heads = k_pool.shape[1]
    narrow = tokens <= NARROW
    splits = splits_of(tokens, kv_heads)
    itemsize = q_TNH.element_size()
    flags = {"CAPPED": softcap > 0, "WINDOWED": window > 0}
    sinks = positions_T if sinks_N is None else sinks_N  # never read without SINKS
    if not narrow:
        roomy = q_TNH.is_cuda and torch.cuda.get_device_capability(q_TNH.device)[0] >= 9
        tiles = tiles_launch(heads=heads, kv_heads=kv_heads, size=size, itemsize=itemsize, roomy=roomy)
        kernels.attend_tiles[(triton.cdiv(tokens, tiles.constants["BLOCK_T"]), kv_heads)](
            q_TNH,
            k_pool,
            v_pool,
            rows_SL,
            token_rows_T,
            positions_T,
            sinks,
            out_TNH,
            q_TNH.stride(0),
            q_TNH.stride(1),
            out_TNH.stride(0),
            out_TNH.stride(1),
            rows_SL.stride(0),
            tokens,
            scale,
            softcap,
            window,
            SINKS=sinks_N is not None,
            **flags,
            **tiles.constants,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    alone = alone_launch(heads=heads, kv_heads=kv_heads, size=size, itemsize=itemsize, splits=splits, narrow=narrow)
    partial_acc = q_TNH.new_empty((tokens, heads, splits, size), dtype=torch.float32)
    partial_stats = q_TNH.new_empty((tokens, heads, splits, 2), dtype=torch.float32)
    blocks = triton.cdiv(tokens, alone.constants["TOKENS"])
    kernels.attend_alone[(blocks, kv_heads, splits)](
        q_TNH,
        k_pool,
        v_pool,
        rows_SL,
        token_rows_T,
        positions_T,
        partial_acc,
        partial_stats,
        q_TNH.stride(0),
        q_TNH.stride(1),
        rows_SL.stride(0),
        tokens,
        scale,
        softcap,
        window,
        **flags,
        **alone.constants,
        num_warps=alone.warps,
        num_stages=alone.stages,
    )
    join = combine_launch(heads=heads, size=size, splits=splits, block_p=alone.constants["BLOCK_P"], narrow=narrow)
    kernels.combine[(blocks, heads)](
        partial_acc,
        partial_stats,
        sinks,
        out_TNH,
        token_rows_T,
        positions_T,
        out_TNH.stride(0),
        out_TNH.stride(1),
        tokens,
        window,
        SINKS=sinks_N is not None,
        WINDOWED=window > 0,
        **join.constants,
        num_warps=join.warps,
        num_stages=join.stages,
    )


def update_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The cells to write are looked up by the kernel that writes them."""
    _write(k, v, k_pool, v_pool, token_rows, rows, token_rows, positions, from_rows=True)
    out = q.new_empty(q.shape)
    attend(q, k_pool, v_pool, rows, token_rows, positions, scale, window, softcap, sinks, out)
    return out


def load() -> Attention:
    """The realisation. Once per process."""
    return torch_operator.build("triton", write_cells, attend, update_and_attend)


def _write(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cells_T: Tensor,
    rows_SL: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    *,
    from_rows: bool,
) -> None:
    tokens, kv_heads, size = k_TKH.shape
    launch = write_launch(kv_heads=kv_heads, size=size, from_rows=from_rows)
    kernels.write_cells[(tokens,)](
        k_TKH,
        v_TKH,
        k_pool,
        v_pool,
        cells_T,
        rows_SL,
        token_rows_T,
        positions_T,
        k_TKH.stride(0),
        k_TKH.stride(1),
        v_TKH.stride(0),
        v_TKH.stride(1),
        rows_SL.stride(0),
        tokens,
        **launch.constants,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
