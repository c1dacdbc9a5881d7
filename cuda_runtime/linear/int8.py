"""Linear layers whose weights are whole numbers of 8 bits, with a scale for each output; activations stay as they were.

`quantize_linears` exchanges a model's linear layers for these, in place: a step reads half the bytes of bfloat16.
Symmetric: a weight is its number times its output's scale, and the output's largest weight has number 127 or -127.

    CPU with AVX-512     one native operator over packed numbers, widened in registers
    CUDA                 one Triton kernel over [outputs, inputs], widened in registers
    anything else        stock operators, which widen the whole weight at every call: right, and slow

In all three products are summed in float32 and the scale is applied to the sum (stock operators sum as the device does
in the activations' type). N outputs, K inputs.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microtome.cuda_runtime.arena import Arena, room
from microtome.cuda_runtime.native_library import build_library
from microtome.planner.errors import BadConfig

_log = logging.getLogger("microtome.runtime")

SOURCES = Path(__file__).parent / "native_int8"
BLOCK, UNIT_INPUTS = 32, 32  # of the native layout: outputs of a block, and what inputs are a multiple of
LARGEST = 127
SIDE_BY_SIDE = (2, 3)  # layers that one native operator takes
NATIVE, TRITON, STOCK = "native", "triton", "stock"
_ROWS_AT_ONCE = 8192  # outputs that are quantised at once: their float32 copy is short-lived


class Int8Linear(nn.Module):
    """y = x (q s)^T + b for x [..., inputs], as `nn.Linear`; inference only."""

    numbers: Tensor  # int8: [N, K], or as the native operator reads it
    scale: Tensor  # float32 [N]
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, realisation: str, arena: Arena | None = None) -> None:
        super().__init__()
        self.inputs, self.outputs, self.realisation = linear.in_features, linear.out_features, realisation
        numbers, scale = quantize(linear.weight)
        if realisation == NATIVE:
            numbers = pack(numbers)
        self.register_buffer("numbers", numbers if arena is None else arena.copy(numbers))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor
        if self.realisation == NATIVE:
            result = torch.ops.microtome.int8_linear(x, self.numbers, self.scale, self.bias, self.outputs)
        elif self.realisation == TRITON:
            result = torch.ops.microtome.int8_linear_triton(x, self.numbers, self.scale, self.bias)
        else:
            result = stock(x, self.numbers, self.scale, self.bias)
        return result


def quantize(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest int8 [N, K], and float32 scales [N] (1 where an output has no weight but 0).

    Raises `BadConfig` for a weight that is no finite number.
    """
    numbers_NK = torch.empty_like(weight_NK, dtype=torch.int8)
    scale_N = torch.empty(len(weight_NK), dtype=torch.float32, device=weight_NK.device)
    if weight_NK.is_meta:
        return numbers_NK, scale_N
    for begin in range(0, len(weight_NK), _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        exact = weight_NK[some].detach().to(torch.float32)
        largest = exact.abs().amax(dim=1)
        if not bool(largest.isfinite().all()):
            raise BadConfig("quantize int8: a weight is infinite or not a number")
        scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
        scale_N[some] = scale
        numbers_NK[some] = (exact / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return numbers_NK, scale_N


def stock(x: Tensor, numbers_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """The layer in torch's own operators."""
    y = (x @ numbers_NK.to(x.dtype).T).to(torch.float32) * scale_N
    return (y if bias_N is None else y + bias_N).to(x.dtype)


def pack(numbers_NK: Tensor) -> Tensor:
    """In the layout of `native_int8/kernels.h`."""
    outputs, inputs = numbers_NK.shape
    padded = nn.functional.pad(numbers_NK, (0, 0, 0, -outputs % BLOCK))
    # block, half, output, four, input -> block, four, half, output, input
    return padded.view(-1, 2, 16, inputs // 4, 4).permute(0, 3, 1, 2, 4).contiguous()


@cache
def operators() -> Any:
    """The native operators, built or found in the cache; None where they cannot be. Once per process."""
    try:
        library = build_library("int8_linear", SOURCES)
    except BadConfig as problem:
        _log.warning("int8 layers run on stock operators, which are slower: %s", problem)
        return None
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    for name in ("int8_linear", *(f"int8_linear_{count}" for count in SIDE_BY_SIDE)):
        torch.library.register_fake(f"microtome::{name}", _fake)
    return torch.ops.microtome


def load_operators(device: torch.device) -> None:
    """Register the operators that programs of `device` may call. Raises `BadConfig` where they cannot be had."""
    if device.type == "cpu":
        operators()
    elif device.type == "cuda":
        if find_spec("triton") is None:
            raise BadConfig("quantize int8 needs the package triton on CUDA, which PyTorch's CUDA builds bring")
        import_module("microtome.cuda_runtime.linear.int8_triton").load()


def realisation_of(linear: nn.Linear, device: torch.device) -> str:
    """How the layer runs on `device`."""
    if device.type == "cuda":
        return TRITON
    if device.type == "cpu" and linear.in_features % UNIT_INPUTS == 0 and (found := operators()) is not None:
        if linear.weight.dtype == torch.float32 and found.int8_float32_served():
            return NATIVE
        if linear.weight.dtype == torch.bfloat16 and found.int8_bfloat16_unit() > 0:
            return NATIVE
    return STOCK


def quantize_linears(model: nn.Module, *, device: torch.device) -> int:
    """Exchange every linear layer, in place; how many were. Raises `BadConfig` where there is none.

    A model on the meta device is exchanged as it would be on `device`. A weight tied to something else, such as an
    embedding, stays there and is quantised beside it. What a family keeps elsewhere, such as experts, stays as it is.
    """
    load_operators(device)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not found:
        raise BadConfig(f"quantize int8: {type(model).__name__} has no linear layer")
    count, arena = len(found), None
    if device.type == "cpu" and not any(child.weight.is_meta for _, _, child in found):
        arena = Arena(sum(room(_most_bytes(child)) for _, _, child in found))
    while found:  # an old weight is let go of before the next is taken
        parent, name, child = found.pop()
        setattr(parent, name, Int8Linear(child, realisation_of(child, device), arena))
    return count


def _most_bytes(linear: nn.Linear) -> int:
    return -(-linear.out_features // BLOCK) * BLOCK * linear.in_features


def _fake(x: Tensor, *layers: Any) -> Tensor | tuple[Tensor, ...]:
    results = tuple(x.new_empty((*x.shape[:-1], outputs)) for outputs in layers[3::4])
    return results if len(results) > 1 else results[0]
