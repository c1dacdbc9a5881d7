"""The Triton kernel of linear layers over 8-bit weights, which are widened in registers.

y [M, N] = (x [M, K] numbers [N, K]^T) scale [N] + bias [N]; x and bias in y's type, sums in float32, over K in order.
The grid is (tiles of outputs, tiles of rows); x's rows are `x_stride` apart, all else is dense.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])  # any number of rows may come: none is worth a compilation of its own
def int8_linear_kernel(
    x,
    numbers,
    scale,
    bias,
    y,
    x_stride,
    M,
    N,
    K,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of y."""
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    outputs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inputs = tl.arange(0, BLOCK_K)
    row_there, output_there = rows < M, outputs < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + inputs
        input_there = k < K
        x_MK = tl.load(
            x + rows[:, None] * x_stride + k[None, :], mask=row_there[:, None] & input_there[None, :], other=0.0
        )
        # [K, N]: neighbouring inputs of an output lie side by side.
        bytes_KN = tl.load(
            numbers + outputs[None, :] * K + k[:, None], mask=input_there[:, None] & output_there[None, :], other=0
        )
        # 2^23 + 128 + n as the bits of a float, then without the 2^23 + 128: exact, and cheaper than the conversion,
        # of which a device does fewer in a second than memory delivers bytes.
        biased_KN = ((bytes_KN.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000
        w_KN = biased_KN.to(tl.float32, bitcast=True) - 8388736.0
        acc = tl.dot(x_MK, w_KN.to(x_MK.dtype), acc, input_precision=PRECISION)
    acc *= tl.load(scale + outputs, mask=output_there, other=0.0)[None, :]
    if BIASED:
        acc += tl.load(bias + outputs, mask=output_there, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + rows[:, None] * N + outputs[None, :],
        acc.to(y.dtype.element_ty),
        mask=row_there[:, None] & output_there[None, :],
    )
