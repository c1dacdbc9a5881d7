"""The K/V tensors, indexed by cell: allocated once, zeroed, never moved, so that nothing captured ever goes stale.

Per layer K and V `[cells + 1, kv_heads, head_size]`. The last cell is the scratch cell: padding writes there, and no
real token ever reads it. Zeroed, because a cell may be attended by padding before anything was written to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import psutil
import torch
from torch import Tensor

from microtome.cuda_runtime.arena import Arena, room
from microtome.cuda_runtime.model import LayerGeometry
from microtome.planner.errors import BadConfig

CPU_POOL_BYTES = 2 << 30  # the most a worker takes unasked on a CPU, whose memory it shares with everybody


@dataclass(frozen=True, slots=True)
class KvPool:
    """`usable_cells` cells for tokens, and the scratch cell behind them."""

    k: list[Tensor]
    v: list[Tensor]
    usable_cells: int

    @property
    def scratch_cell(self) -> int:
        return self.usable_cells


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many tokens fit, and why that many."""

    usable_cells: int
    reason: str


def bytes_per_cell(layers: Sequence[LayerGeometry], dtype: torch.dtype) -> int:
    return sum(2 * layer.kv_heads * layer.head_size for layer in layers) * dtype.itemsize


def size_pool(
    layers: Sequence[LayerGeometry],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_tokens: int | None,
    memory_fraction: float,
    at_least: int,
) -> PoolSize:
    """Cells for `kv_tokens`, or as many as the free memory holds. Raises `BadConfig` below `at_least` cells."""
    cell = bytes_per_cell(layers, dtype)
    free = _free_bytes(device)
    budget = int(free * memory_fraction)
    told = f"{free / 2**30:.1f} GiB free x memory_fraction {memory_fraction:g}"
    if kv_tokens is not None:
        if (kv_tokens + 1) * cell > free:
            raise BadConfig(f"kv_tokens {kv_tokens} needs {(kv_tokens + 1) * cell} bytes, {free} are free")
        return PoolSize(kv_tokens, f"kv_tokens {kv_tokens} x {cell} bytes")
    if device.type == "cpu" and budget > CPU_POOL_BYTES:
        budget, told = CPU_POOL_BYTES, f"{CPU_POOL_BYTES / 2**30:.0f} GiB, the default bound on a CPU"
    usable = budget // cell - 1
    if usable < at_least:
        raise BadConfig(f"{told} holds {max(usable, 0)} tokens of {cell} bytes, a step needs room for {at_least}")
    return PoolSize(usable, f"{told} / {cell} bytes")


def allocate_pool(
    layers: Sequence[LayerGeometry], usable_cells: int, *, device: torch.device, dtype: torch.dtype
) -> KvPool:
    shapes = [(usable_cells + 1, layer.kv_heads, layer.head_size) for layer in layers]
    if device.type == "cpu":  # cells are read at random: large pages pay
        arena = Arena(2 * sum(room(prod(shape) * dtype.itemsize) for shape in shapes))
        k, v = ([arena.empty(shape, dtype) for shape in shapes] for _ in range(2))
    else:
        k, v = ([torch.zeros(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2))
    return KvPool(k, v, usable_cells)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later would count as taken
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
