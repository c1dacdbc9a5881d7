"""The coin behind every drawn token: a function of (seed, position) and of nothing else.

A counter-based generator: the 128 bits of (seed, position) go through two rounds of the splitmix64 finaliser (Steele,
Lea, Flood, "Fast splittable pseudorandom number generators", 2014), position and seed both mixed, so that seed 0 and
neighbouring seeds or positions are as good as any. Integer operations that wrap, hence the same on every device.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def coins(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Float64 coins in [0, 1) for int64 seeds (the bits of unsigned ones) and positions, element by element."""
    mixed = _finalise(seeds_R + _GOLDEN)
    mixed = _finalise(mixed ^ ((positions_R + 1) * _GOLDEN))
    return _shift_right(mixed, 11).to(torch.float64) * 2.0**-53


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros: torch's own shift of an int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
