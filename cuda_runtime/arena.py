"""Large host tensors on large pages: one mapping per arena, handed out from the front, given back with its tensors.

Weights and cells are read in streams or at random over hundreds of megabytes, where pages of 4 KiB cost a third of the
memory's rate in address translation. The kernel is advised to use pages of 2 MiB; where it does not, all still works.
Memory starts at zero and is really taken when it is first written.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # bytes: a cache line


class Arena:
    """`size` bytes for tensors on the CPU."""

    def __init__(self, size: int) -> None:
        # Private: what is shared would be a file in memory, to which the advice does not apply.
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
        self._bytes = whole[-whole.data_ptr() % HUGE_PAGE :][:size]
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor of zeros: nothing was written to it yet. Raises `MemoryError` when the arena is full."""
        size = prod(shape) * dtype.itemsize
        if self._used + size > len(self._bytes):
            raise MemoryError(f"{size} bytes asked for, {len(self._bytes) - self._used} of {len(self._bytes)} left")
        tensor = self._bytes[self._used : self._used + size].view(dtype).view(*shape)
        self._used += room(size)
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers, here."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def room(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes of an arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT
