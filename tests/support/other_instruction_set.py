"""Run as a program: the native kernels, built for another instruction set, against plain histories.

    python -m tests.support.other_instruction_set x86-64-v3

A program of its own, because a process can load one build only. Exits with 1 and the difference where they differ.
"""

import sys

import torch

from microtome.cuda_runtime.attention import cpu_native
from microtome.cuda_runtime.attention.registry import get_attention
from tests.support.ragged import Shape, make_ragged

SHAPES = (
    Shape(inputs=((300, 1), (40, 1), (0, 1), (5, 2)), heads=6, kv_heads=2, head_size=64, sinks=True, clones=True),
    Shape(inputs=((0, 70), (90, 33), (17, 1)), heads=3, kv_heads=1, head_size=80, window=40, padding=3),
    Shape(inputs=((0, 20), (64, 17)), heads=4, kv_heads=4, head_size=128, softcap=2.0),
)


def main(march: str) -> None:
    torch.set_num_threads(1)
    get_attention("cpu")
    attention = cpu_native.load(cpu_native.build(march=march))
    for shape in SHAPES:
        for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
            batch = make_ragged(Shape(**{**shape.__dict__, "dtype": dtype}), seed=1)
            attention.write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
            out = attention.attend(
                batch.q,
                batch.k_pool,
                batch.v_pool,
                batch.rows,
                batch.token_rows,
                batch.positions,
                scale=batch.scale,
                window=batch.window,
                softcap=batch.softcap,
                sinks_N=batch.sinks,
            )
            got = out[: batch.real_tokens].double()
            torch.testing.assert_close(got, batch.expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    main(sys.argv[1])
