"""What a CUDA graph asks of a forward, shown without a GPU: families run on tensors with a device and a shape only.

What would read a number, bring one from the host, or allocate by a length does not run there, or is seen.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from microtome.cuda_runtime.attention.registry import get_attention
from microtome.cuda_runtime.checkpoint import Checkpoint
from microtome.cuda_runtime.linear.int8 import quantize_linears
from microtome.cuda_runtime.model import CellModel, skeleton
from tests.support.families import FAMILIES, checkpoint_of

DEVICE = torch.device("meta")
SMALL, LARGE = (5, 24, 40), (64, 4096, 5000)  # sequences, entries of a row, cells


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what every operator gives, and refuses what a capture would."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        for tensor in (*taken, *tensors) if copies else tensors:
            assert tensor.is_meta or (tensor.dim() == 0 and not copies), f"{func} meets the host"
        self.given.append((str(func), tuple(tuple(tensor.shape) for tensor in tensors)))
        return result


def on_device(causal_lm: nn.Module) -> nn.Module:
    """Its weights' shapes, and no number."""
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
            module.register_parameter(name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE))
    return causal_lm


def operators_of(model: CellModel, checkpoint: Checkpoint, width: int, geometry: tuple[int, int, int]) -> Watch:
    """One forward of `width` tokens over a table and a pool of that geometry."""
    sequences, length, cells = geometry
    config = checkpoint.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    pools = [
        [torch.empty(cells, heads, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(config.num_hidden_layers)]
        for _ in "kv"
    ]
    given = integers(1, width), integers(1, width), integers(width), integers(width)
    rows = integers(sequences, length, dtype=torch.int32)
    watch = Watch()
    with torch.no_grad(), watch:
        logits = model(*given, rows, *pools)
    assert logits.shape == (width, config.vocab_size)
    return watch


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_reads_nothing_on_the_host_and_allocates_by_its_width_alone(family: str, width: int) -> None:
    checkpoint = checkpoint_of(family)
    causal_lm = skeleton(checkpoint, dtype=torch.bfloat16)
    model = CellModel(on_device(causal_lm), get_attention("triton"))
    small = operators_of(model, checkpoint, width, SMALL)
    large = operators_of(model, checkpoint, width, LARGE)
    assert any("update_and_attend_triton" in name for name, _ in small.given)
    assert small.given == large.given


def test_weights_of_8_bits_are_as_safe() -> None:
    checkpoint = checkpoint_of("llama")
    causal_lm = skeleton(checkpoint, dtype=torch.bfloat16)
    quantize_linears(causal_lm, device=torch.device("cuda"))
    model = CellModel(on_device(causal_lm), get_attention("triton"))
    small, large = (operators_of(model, checkpoint, 4, geometry) for geometry in (SMALL, LARGE))
    assert sum("int8_linear_triton" in name for name, _ in small.given) == 2 * 7 + 1
    assert small.given == large.given


def test_what_a_capture_would_refuse_is_found() -> None:
    class Reads(nn.Module):
        def forward(self, positions: Tensor) -> Tensor:
            return positions[: int(positions.max())]

    class Brings(nn.Module):
        def forward(self, positions: Tensor) -> Tensor:
            return positions + torch.arange(len(positions)).to(positions.device)

    positions = torch.empty(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match="meta"), Watch():
        Reads()(positions)
    with pytest.raises(AssertionError, match="meets the host"), Watch():
        Brings()(positions)
