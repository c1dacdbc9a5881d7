"""Attention over cells: how long one forward's layers take, per realisation, as ratios within one run.

    python -m bench.attention [--dtype bfloat16] [--threads 2] [--layers 30] [--rounds 7] [--scattered]

Geometry of SmolLM2-135M (9 query heads, 3 key/value heads of 64, 30 layers). Every layer has pools of its own, so that
K and V come from where a model's would. Rounds are interleaved; times are medians, the spread is (max - min) / median.
`GB/s` counts each K and V that a token sees once (a prefill: once per run), which is what must be read at least.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from microtome.cuda_runtime.attention.registry import get_attention
from microtome.cuda_runtime.attention.seam import Attention

HEADS, KV_HEADS, SIZE = 9, 3, 64


@dataclass(frozen=True)
class Case:
    name: str
    inputs: tuple[tuple[int, int], ...]  # (positions in cells already, new tokens) per sequence


def cases() -> list[Case]:
    decodes = [
        Case(f"decode {rows:>2} x {length}", ((length - 1, 1),) * rows)
        for rows in (1, 16)
        for length in (64, 128, 256, 512, 1024)
    ]
    prefills = [Case(f"prefill {width}", ((0, width),)) for width in (32, 128, 512, 1024)]
    mixed = [
        Case("prefill 4 x 128", ((0, 128),) * 4),
        Case("16 decodes + 256", ((300, 1),) * 16 + ((0, 256),)),
        Case("chunk 32 after 480", ((480, 32),)),
    ]
    return decodes + prefills + mixed


class Setup:
    """The tensors of one case."""

    def __init__(self, case: Case, dtype: torch.dtype, layers: int, scattered: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        total = sum(held + new for held, new in case.inputs)
        order = torch.randperm(total, generator=generator) if scattered else torch.arange(total)
        tokens = sum(new for _, new in case.inputs)
        self.rows = torch.zeros(len(case.inputs) + 1, max(held + new for held, new in case.inputs), dtype=torch.int32)
        token_rows: list[int] = []
        positions: list[int] = []
        begin = 0
        for row, (held, new) in enumerate(case.inputs):
            self.rows[row, : held + new] = order[begin : begin + held + new].int()
            token_rows += [row] * new
            positions += range(held, held + new)
            begin += held + new
        self.token_rows = torch.tensor(token_rows, dtype=torch.int32)
        self.positions = torch.tensor(positions, dtype=torch.int32)
        shape = (layers, total + 1, KV_HEADS, SIZE)
        self.k_pools = torch.randn(shape, generator=generator).to(dtype)
        self.v_pools = torch.randn(shape, generator=generator).to(dtype)
        self.q = torch.randn(HEADS, tokens, SIZE, generator=generator).to(dtype).transpose(0, 1)
        self.k = torch.randn(KV_HEADS, tokens, SIZE, generator=generator).to(dtype).transpose(0, 1)
        self.v = torch.randn(KV_HEADS, tokens, SIZE, generator=generator).to(dtype).transpose(0, 1)
        self.bytes_read = 2 * layers * total * KV_HEADS * SIZE * dtype.itemsize

    def run(self, attention: Attention) -> Tensor:
        out = self.q
        for k_pool, v_pool in zip(self.k_pools, self.v_pools, strict=True):
            out = attention.update_and_attend(
                self.q, self.k, self.v, k_pool, v_pool, self.rows, self.token_rows, self.positions, scale=SIZE**-0.5
            )
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scattered", action="store_true", help="cells in random order instead of ascending")
    parser.add_argument("--realisations", default="cpu,cpu_native")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.realisations.split(",")
    realisations = [get_attention(name) for name in names]
    columns = "  ".join(f"{name:>12} ms (spread)" for name in names)
    print(f"{arguments.dtype}, {arguments.threads} threads, {arguments.layers} layers, torch {torch.__version__}")
    print(f"{'case':<20}  {columns}  {names[0]} ÷ {names[-1]}   {names[-1]} GB/s")
    with torch.inference_mode():
        for case in cases():
            if arguments.only not in case.name:
                continue
            setup = Setup(case, getattr(torch, arguments.dtype), arguments.layers, arguments.scattered)
            times: list[list[float]] = [[] for _ in realisations]
            for round_number in range(arguments.rounds + 1):
                for attention, measured in zip(realisations, times, strict=True):
                    begin = time.perf_counter()
                    setup.run(attention)
                    if round_number:  # the first warms up
                        measured.append((time.perf_counter() - begin) * 1e3)
            medians = [statistics.median(measured) for measured in times]
            spreads = [(max(m) - min(m)) / median for m, median in zip(times, medians, strict=True)]
            cells = "  ".join(f"{m:>15.3f} ({s:>4.0%})" for m, s in zip(medians, spreads, strict=True))
            rate = setup.bytes_read / medians[-1] / 1e6
            print(f"{case.name:<20}  {cells}  {medians[0] / medians[-1]:>8.2f}   {rate:>8.1f}")


if __name__ == "__main__":
    main()
