"""A linear layer whose weight is laid out once, block by block, in the order in which the CPU's kernels read it.

Where the CPU and the layer's shape allow, `pack_linears` exchanges a model's linear layers for these, in place: the
packed weights are then the only ones, shared by every method. Memory is read at the machine's own rate, and a row's
result has the same bits whatever other rows share the forward and however many threads there are.
"""

import logging
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from microtome.cuda_runtime.arena import Arena, room
from microtome.cuda_runtime.native_library import build_library
from microtome.planner.errors import BadConfig

_log = logging.getLogger("microtome.runtime")

SOURCES = Path(__file__).parent / "native"
BLOCK = 32  # outputs of a block
SIDE_BY_SIDE = (2, 3)  # layers that one operator takes


class PackedLinear(nn.Module):
    """y = x W^T + b for x [..., inputs], as `nn.Linear`; inference only."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, arena: Arena | None = None) -> None:
        super().__init__()
        self.inputs, self.outputs = linear.in_features, linear.out_features
        packed = pack(linear.weight)
        self.register_buffer("packed", packed if arena is None else arena.copy(packed))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.microtome.packed_linear(x, self.packed, self.bias, self.outputs)
        return result


def pack(weight_NK: Tensor) -> Tensor:
    """A float32 or bfloat16 weight [outputs, inputs] in the layout of `native/kernels.h`."""
    outputs, inputs = weight_NK.shape
    padded = nn.functional.pad(weight_NK.detach(), (0, 0, 0, -outputs % BLOCK))
    if weight_NK.dtype == torch.float32:
        return padded.view(-1, BLOCK, inputs).transpose(1, 2).contiguous()
    # block, half, output, tile, pair, element -> block, tile, half, pair, output, element
    return padded.view(-1, 2, 16, inputs // 32, 16, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


@cache
def operators() -> Any:
    """The native operators, built or found in the cache; None where they cannot be. Once per process."""
    try:
        library = build_library("linear", SOURCES)
    except BadConfig as problem:
        _log.warning("linear layers run on stock operators, which are slower: %s", problem)
        return None
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    for name in ("packed_linear", *(f"packed_linear_{count}" for count in SIDE_BY_SIDE)):
        torch.library.register_fake(f"microtome::{name}", _fake)
    torch.library.register_fake("microtome::packed_gated", _fake_gated)
    torch.library.register_fake("microtome::norm", lambda x, weight, epsilon: x.new_empty(x.shape))
    torch.library.register_fake("microtome::add_norm", _fake_add_norm)
    torch.library.register_fake("microtome::rotate", lambda q, k, cos, sin: (_fake_turned(q), _fake_turned(k)))
    return torch.ops.microtome


def can_pack(linear: nn.Linear, device: torch.device | None = None) -> bool:
    """Whether the layer lies on a CPU whose kernels take its type and shape, or would if it lay on `device`."""
    if (device or linear.weight.device).type != "cpu":
        return False
    if linear.weight.dtype == torch.float32:
        return (found := operators()) is not None and bool(found.float32_served())
    if linear.weight.dtype == torch.bfloat16 and linear.in_features % 32 == 0:
        return (found := operators()) is not None and found.bfloat16_unit() > 0
    return False


def pack_linears(model: nn.Module, *, device: torch.device | None = None) -> int:
    """Exchange every linear layer that can be packed, in place; how many were.

    A model on the meta device is exchanged as it would be on `device`.

    A weight tied to something else, such as an embedding, stays there and is packed beside it.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child, device)
    ]
    if not found:
        return 0
    on_meta = all(child.weight.is_meta for _, _, child in found)
    arena = None if on_meta else Arena(sum(room(packed_bytes(child)) for _, _, child in found))
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, arena))
    return len(found)


def packed_bytes(linear: nn.Linear) -> int:
    return -(-linear.out_features // BLOCK) * BLOCK * linear.in_features * linear.weight.dtype.itemsize


def join_side_by_side(graph: Graph, name: str = "packed_linear") -> int:
    """In a traced graph, let layers over the same rows run as one operator, two or three at a time; how many were.

    `name` is the operator's whose `name`_2 and `name`_3 take two and three layers' arguments behind the rows.
    Threads are woken once for all of them. Weights are arguments of the graph, so each is there before the first.
    """
    if not hasattr(torch.ops.microtome, name):
        return 0
    alone = getattr(torch.ops.microtome, name).default
    over_same_rows: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is alone:
            over_same_rows.setdefault(node.args[0], []).append(node)
    joined = 0
    widest = max(SIDE_BY_SIDE)
    for rows, layers in over_same_rows.items():
        for begin in range(0, len(layers), widest):
            group = layers[begin : begin + widest]
            if len(group) < 2:
                continue
            operator = getattr(torch.ops.microtome, f"{name}_{len(group)}").default
            with graph.inserting_before(group[0]):
                arguments = [argument for layer in group for argument in layer.args[1:]]
                together = graph.call_function(operator, (rows, *arguments))
                together.meta["val"] = tuple(layer.meta["val"] for layer in group)
                for place, layer in enumerate(group):
                    result = graph.call_function(getitem, (together, place))
                    result.meta["val"] = layer.meta["val"]
                    layer.replace_all_uses_with(result)
            for layer in group:
                graph.erase_node(layer)
            joined += len(group)
    graph.lint()
    return joined


def _fake(x: Tensor, *layers: Any) -> Tensor | tuple[Tensor, ...]:
    results = tuple(x.new_empty((*x.shape[:-1], outputs)) for outputs in layers[2::3])
    return results if len(results) > 1 else results[0]


def _fake_gated(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None, up: Tensor, up_bias: Tensor | None, outputs: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def _fake_add_norm(a: Tensor, b: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


def _fake_turned(heads_1NTH: Tensor) -> Tensor:
    _, heads, tokens, size = heads_1NTH.shape
    return heads_1NTH.new_empty((1, tokens, heads, size)).transpose(1, 2)
