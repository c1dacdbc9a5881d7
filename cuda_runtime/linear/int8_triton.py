"""Linear layers over 8-bit weights on a GPU: chooses tiles and launches the Triton kernel.

    microtome::int8_linear_triton(Tensor x, Tensor numbers, Tensor scale, Tensor? bias) -> Tensor

x [..., K] in float32, float16 or bfloat16; numbers int8 [N, K]; scale float32 [N]; bias [N] in x's type. Sums are
float32, over K in order. The launch follows from shapes alone, so every call can be captured.

M rows, N outputs, K inputs.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from microtome.cuda_runtime.attention.torch_operator import LIBRARY
from microtome.cuda_runtime.linear.int8_kernel import int8_linear_kernel

FEW_ROWS = 16  # up to here weights are the work: narrow tiles of outputs, so that many programs read at once


@dataclass(frozen=True, slots=True)
class Tile:
    """The compile-time numbers of one launch."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tile_of(rows: int, itemsize: int) -> Tile:
    if itemsize == 4:  # no matrix unit at full precision: everything stands in registers
        return Tile(rows=16, outputs=32, inputs=32, warps=4, stages=2)
    if rows <= FEW_ROWS:
        return Tile(rows=16, outputs=16, inputs=256, warps=4, stages=3)
    if rows <= 64:
        return Tile(rows=64, outputs=32, inputs=128, warps=4, stages=3)
    return Tile(rows=128, outputs=128, inputs=64, warps=8, stages=3)


def int8_linear(x: Tensor, numbers_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    outputs, inputs = numbers_NK.shape
    flat = x.reshape(-1, inputs)
    rows_MK = flat if flat.stride(1) == 1 else flat.contiguous()
    count = rows_MK.shape[0]
    y = x.new_empty((*x.shape[:-1], outputs))
    if count == 0:
        return y
    tile = tile_of(count, x.element_size())
    int8_linear_kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(count, tile.rows))](
        rows_MK,
        numbers_NK,
        scale_N,
        scale_N if bias_N is None else bias_N,  # never read without BIASED
        y,
        rows_MK.stride(0),
        count,
        outputs,
        inputs,
        BIASED=bias_N is not None,
        PRECISION="ieee" if x.element_size() == 4 else "tf32",  # the word means nothing for narrower types
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@cache
def load() -> None:
    """Define the operator. Once per process."""
    LIBRARY.define(  # type: ignore[no-untyped-call]
        "int8_linear_triton(Tensor x, Tensor numbers, Tensor scale, Tensor? bias) -> Tensor"
    )
    torch.library.register_fake("microtome::int8_linear_triton", _fake, lib=LIBRARY)
    LIBRARY.impl("int8_linear_triton", int8_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _fake(x: Tensor, numbers_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], numbers_NK.shape[0]))
