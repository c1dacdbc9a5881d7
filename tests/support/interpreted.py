"""Runs the Triton realisation through Triton's interpreter, in a process of its own.

Triton decides at import whether kernels are compiled or interpreted, and other tests import it to compile.
Interpreted kernels run on CPU tensors; a masked-off lane touches no memory, so poison outside the masks shows.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from tests.support.ragged import Shape, make_ragged


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """One process in which Triton interprets."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # a spawned process takes the environment of the moment it starts
    try:
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(_start).result()
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
            yield pool
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)


def _start() -> None:
    import numpy as np

    from microtome.cuda_runtime.attention import triton_attention

    torch.set_num_threads(1)
    triton_attention.PROGRAMS = 64  # a program costs the interpreter milliseconds; fewer splits, of the same code
    np.seterr(over="ignore")  # 2^x of a large x is infinity, as on a GPU; that is what the formulas count on


def attend(shape: Shape, seed: int) -> torch.Tensor:
    """In the interpreting process: write the batch's tokens, then attend into a poisoned output."""
    from microtome.cuda_runtime.attention.registry import get_attention

    attention = get_attention("triton")
    batch = make_ragged(shape, seed)
    attention.write_cells(batch.k, batch.v, batch.k_pool, batch.v_pool, batch.cells)
    return attention.attend(
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
        out_TNH=torch.full_like(batch.q, float("nan")),
    )


def update_and_attend(shape: Shape, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the interpreting process: the one operator a layer calls, on heads in a model's layout; output and pools."""
    from microtome.cuda_runtime.attention.registry import get_attention

    batch = make_ragged(shape, seed)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v))
    out = get_attention("triton").update_and_attend(
        q,
        k,
        v,
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
    return out, batch.k_pool, batch.v_pool
