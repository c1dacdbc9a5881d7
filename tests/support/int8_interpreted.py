"""Linear layers over 8-bit weights through Triton's interpreter: what `tests.support.interpreted`'s process runs."""

import torch
from torch import Tensor


def int8_linear(x: Tensor, numbers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from microtome.cuda_runtime.linear import int8_triton

    int8_triton.load()
    result: Tensor = torch.ops.microtome.int8_linear_triton(x, numbers, scale, bias)
    return result
