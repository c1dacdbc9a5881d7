"""In a traced graph, runs of stock operators between packed linear layers become one native operator each.

    silu(gate(x)) * up(x)                            packed_gated
    weight * (x / sqrt(mean(x^2) + epsilon))         norm, or add_norm where x is a sum of two, which others use too
    q and k turned by the same cosines and sines     rotate

What is not found in exactly this form stays as it is. A native operator computes in float32 and rounds at least where
the stock ones did, so results differ by roundings at most. Each wakes threads once, or does little work on one.
"""

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from microtome.cuda_runtime.linear.packed import operators

_aten = torch.ops.aten
Call = Any  # a node of the graph, whose arguments are known by what it calls
_DTYPES = (torch.float32, torch.bfloat16)
_CHECK = _aten._assert_tensor_metadata.default  # export leaves one before each conversion


def fuse(graph: Graph) -> int:
    """Put native operators in place of what they stand for; how many were."""
    found = operators()
    if found is None or not found.float32_served():
        return 0
    done = _fuse_gates(graph) + _fuse_norms(graph) + _fuse_rotations(graph)
    graph.lint()
    return done


# --- gates ---


def _fuse_gates(graph: Graph) -> int:
    done = 0
    linear = torch.ops.microtome.packed_linear.default
    for product in _calls(graph, _aten.mul.Tensor):
        for silu, up in (product.args[:2], product.args[1::-1]):
            if not _is(silu, _aten.silu.default, users=1) or not _is(up, linear, users=1):
                continue
            gate = silu.args[0]
            if not _is(gate, linear, users=1) or gate.args[0] is not up.args[0] or gate.args[3] != up.args[3]:
                continue
            arguments = (*gate.args[:3], *up.args[1:3], gate.args[3])
            _replace(graph, product, torch.ops.microtome.packed_gated.default, arguments)
            for node in (silu, gate, up):
                _drop(graph, node)
            done += 1
            break
    return done


# --- norms ---


def _fuse_norms(graph: Graph) -> int:
    done = 0
    for product in _calls(graph, _aten.mul.Tensor):
        for weight, normed in (product.args[:2], product.args[1::-1]):
            found = _norm_of(weight, normed)
            if found is None or _value(product).dtype != _value(weight).dtype:
                continue
            x, epsilon = found
            if _is_row_sum(x) and weight.op == "placeholder":  # a weight that is computed may come after the sum
                _replace_add_norm(graph, x, product, weight, epsilon)
            else:
                _replace(graph, product, torch.ops.microtome.norm.default, (x, weight, epsilon))
            _drop(graph, normed)
            done += 1
            break
    return done


def _norm_of(weight: Any, normed: Any) -> tuple[Call, float] | None:
    """x and epsilon, where `normed` is x / sqrt(mean(x^2) + epsilon) and `weight` fits it."""
    if not _is_node(weight) or not _is_node(normed) or _real_users(normed) != 1:
        return None
    quotient = _unconverted(normed)
    if not _is(quotient, _aten.mul.Tensor, users=1):
        return None
    for wide, inverse in (quotient.args[:2], quotient.args[1::-1]):
        if not _is(inverse, _aten.rsqrt.default, users=1) or not _is_node(wide):
            continue
        total = inverse.args[0]
        if not _is(total, _aten.add.Tensor, users=1) or not isinstance(total.args[1], float) or total.kwargs:
            continue
        mean = total.args[0]
        if not _is(mean, _aten.mean.dim, users=1) or list(mean.args[1]) != [-1] or mean.args[2:] != (True,):
            continue
        square = mean.args[0]
        if not _is(square, _aten.pow.Tensor_Scalar, users=1) or square.args != (wide, 2):
            continue
        x = _unconverted(wide)
        x_value, weight_value = _value(x), _value(weight)
        wide_enough = _value(wide).dtype == torch.float32 and x_value.dtype in _DTYPES
        fits = weight_value.dim() == 1 and weight_value.shape[0] == x_value.shape[-1]
        if wide_enough and fits and _value(normed).dtype == weight_value.dtype == x_value.dtype:
            return x, total.args[1]
    return None


def _is_row_sum(x: Call) -> bool:
    if not _is(x, _aten.add.Tensor) or x.kwargs or not all(_is_node(part) for part in x.args):
        return False
    a, b = (_value(part) for part in x.args)
    return a.shape == b.shape and a.dtype == b.dtype == _value(x).dtype


def _replace_add_norm(graph: Graph, total: Call, product: Call, weight: Call, epsilon: float) -> None:
    with graph.inserting_before(total):
        operator = torch.ops.microtome.add_norm.default
        together = graph.call_function(operator, (*total.args, weight, epsilon))
        together.meta["val"] = (total.meta["val"], product.meta["val"])
        for place, node in enumerate((total, product)):
            part = graph.call_function(getitem, (together, place))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
    _drop(graph, product)
    _drop(graph, total)


# --- rotations ---


def _fuse_rotations(graph: Graph) -> int:
    places = {node: place for place, node in enumerate(graph.nodes)}
    done = 0
    before: tuple[Call, Call, Call, Call] | None = None
    for node in _calls(graph, _aten.add.Tensor):
        found = _rotation_of(node)
        if found is None:
            continue
        x, cos, sin = found
        if (
            before is not None
            and before[2:] == (cos, sin)
            and places[node] < min(places[user] for user in before[0].users)
        ):
            first, first_x = before[:2]
            with graph.inserting_before(node):
                operator = torch.ops.microtome.rotate.default
                together = graph.call_function(operator, (first_x, x, cos, sin))
                together.meta["val"] = tuple(_apart_by_tokens(part.meta["val"]) for part in (first, node))
                for place, part in enumerate((first, node)):
                    result = graph.call_function(getitem, (together, place))
                    result.meta["val"] = together.meta["val"][place]
                    part.replace_all_uses_with(result)
            _drop(graph, first)
            _drop(graph, node)
            before = None
            done += 1
        else:
            before = node, x, cos, sin
    return done


def _rotation_of(total: Call) -> tuple[Call, Call, Call] | None:
    """x [1, heads, T, H], cos and sin [1, T, H], where `total` is x * cos + (x's halves, exchanged) * sin."""
    if total.kwargs or not all(_is(part, _aten.mul.Tensor, users=1) for part in total.args):
        return None
    (x, cos), (exchanged, sin) = (part.args for part in total.args)
    for angle in (cos, sin):
        if not _is(angle, _aten.unsqueeze.default) or angle.args[1] != 1 or _value(angle).dim() != 4:
            return None
    if not _is(exchanged, _aten.cat.default, users=1) or exchanged.args[1:] not in ((-1,), (3,)):
        return None
    parts = exchanged.args[0]
    if len(parts) != 2 or not _is(parts[0], _aten.neg.default, users=1):
        return None
    high, low = parts[0].args[0], parts[1]
    if not all(_is(half, _aten.slice.Tensor, users=1) and half.args[0] is x for half in (high, low)):
        return None
    value = _value(x)
    if value.dim() != 4 or value.shape[0] != 1 or value.shape[-1] % 2 or value.dtype not in _DTYPES:
        return None
    half, size = value.shape[-1] // 2, value.shape[-1]
    if low.args[1:] != (3, 0, half) or high.args[1:3] != (3, half) or high.args[3] < size:
        return None
    cos_3, sin_3 = cos.args[0], sin.args[0]
    for angle in (cos_3, sin_3):
        angles = _value(angle)
        if angles.dim() != 3 or angles.shape[0] != 1 or angles.shape[-1] != size or angles.dtype != value.dtype:
            return None
    return x, cos_3, sin_3


def _apart_by_tokens(heads: Tensor) -> Tensor:
    """As the native operator lays [1, heads, T, H] out."""
    batch, count, tokens, size = heads.shape
    return heads.new_empty((batch, tokens, count, size)).transpose(1, 2)


# --- graphs ---


def _calls(graph: Graph, target: Any) -> Iterator[Call]:
    """Every call that is still there when its turn comes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is target and not node._erased:
            yield node


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _is(node: Any, target: Any, users: int | None = None) -> bool:
    if not _is_node(node) or node.op != "call_function" or node.target is not target:
        return False
    return users is None or _real_users(node) == users


def _real_users(node: Call) -> int:
    return sum(user.target is not _CHECK for user in node.users)


def _value(node: Call) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _unconverted(node: Call) -> Call:
    """What was converted to the type that `node` has, or `node`."""
    if _is(node, _aten.to.dtype) and len(node.args) == 2 and _is_node(node.args[0]):
        return node.args[0]
    return node


def _replace(graph: Graph, node: Call, operator: Any, arguments: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        native = graph.call_function(operator, arguments)
    native.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(native)
    _drop(graph, node)


def _drop(graph: Graph, node: Call) -> None:
    """Erase the node and whatever was there for it alone."""
    if node._erased or _real_users(node) or node.op != "call_function":
        return
    for check in list(node.users):
        graph.erase_node(check)
    inputs = list(node.all_input_nodes)
    graph.erase_node(node)
    for one in inputs:
        _drop(graph, one)
