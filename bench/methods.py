"""What a forward costs, by how its method is made: the library's code, packed weights, or compiled programs.

`python -m bench.methods MODEL` runs one-token, 16-row and prefill forwards of each variant in turns in one process and
prints milliseconds of processor time and of wall clock, smallest of the rounds, and ratios to the library's code:

- `library`: transformers' modules as they are, our attention;
- `packed`: the same with packed linear layers on large pages; what eager methods run;
- `compiled`: the two exported programs of the artifact; what compiled methods run.

Processor time is what counts where other processes share the machine.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.checkpoint import find_checkpoint
from microtome.cuda_runtime.kv_pool import KvPool, allocate_pool
from microtome.cuda_runtime.linear.packed import pack_linears
from microtome.cuda_runtime.model import CellModel, load_model, read_geometry
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.program import Forward
from microtome.cuda_runtime.ready_model import ready_model, target_of
from microtome.cuda_runtime.rows import RowTable
from microtome.cuda_runtime.start_up import StartUp
from microtome.fetch import resolve_model

CPU = torch.device("cpu")
CELLS, ROWS, LENGTH = 8192, 32, 2048
# name: tokens of the forward, position of each (None: a prompt from 0)
SHAPES: dict[str, tuple[int, int | None]] = {
    "1 token, 64 seen": (1, 63),
    "1 token, 1024 seen": (1, 1023),
    "16 rows, 128 seen": (16, 127),
    "16 rows, 512 seen": (16, 511),
    "prefill of 512": (512, None),
}


def arguments(tokens: int, position: int | None, vocabulary: int, rows: RowTable, pool: KvPool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(tokens)
    tokens_1T = torch.randint(1, vocabulary, (1, tokens), generator=generator)
    if position is None:
        positions = torch.arange(tokens)
        token_rows, selector = torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens - 1, tokens - 1])
    else:
        positions = torch.full((tokens,), position)
        token_rows, selector = torch.arange(tokens), torch.arange(tokens)
    return tokens_1T, positions[None], token_rows, selector, rows.device, pool.k, pool.v


def smallest_ms(variants: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, tuple[float, float]]:
    """Per variant (processor, wall) milliseconds, in turns."""
    for run in variants.values():
        run()
    found = {name: [float("inf"), float("inf")] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            run()
            took = time.process_time() - cpu_s, time.perf_counter() - wall_s
            found[name] = [min(old, new * 1e3) for old, new in zip(found[name], took, strict=True)]
    return {name: (cpu, wall) for name, (cpu, wall) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    options = RuntimeOptions(model=resolve_model(asked.model), dtype=asked.dtype, methods="compiled")
    checkpoint, target = find_checkpoint(options.model), target_of(options)
    attention = get_attention(default_attention(CPU))

    def library() -> CellModel:
        return CellModel(load_model(checkpoint, device=CPU, dtype=target.dtype), attention)

    plain, packed = library(), library()
    layers = read_geometry(plain.causal_lm, CPU)
    pack_linears(packed.causal_lm)
    started = StartUp()
    compiled = ready_model(options, checkpoint, target, started)
    print(f"compiled methods are ready after: {started}")
    pool = allocate_pool(layers, CELLS, device=CPU, dtype=target.kv_dtype)
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
    rows = RowTable(ROWS, LENGTH, pool.scratch_cell, CPU)
    generator = torch.Generator().manual_seed(0)
    rows.device[:ROWS] = torch.randint(CELLS, (ROWS, LENGTH), generator=generator, dtype=torch.int32)

    figures: dict[str, dict[str, tuple[float, float]]] = {}
    with torch.inference_mode():
        for name, (tokens, position) in SHAPES.items():
            given = arguments(tokens, position, checkpoint.vocab_size, rows, pool)
            forwards: dict[str, Forward] = {
                "library": plain,
                "packed": packed,
                "compiled": compiled.decode if tokens == 1 else compiled.prefill,
            }
            found = smallest_ms({key: partial(run, *given) for key, run in forwards.items()}, asked.rounds)
            figures[name] = found
            base = found["library"][0]
            told = ", ".join(
                f"{key} {cpu:.1f} ms ({wall:.1f} wall), x{base / cpu:.2f}" for key, (cpu, wall) in found.items()
            )
            print(f"{name}: {told}", flush=True)
    if asked.json:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": asked.threads,
            "dtype": asked.dtype,
            "model": checkpoint.name,
            "start": started.seconds,
            "ms_processor_wall": figures,
        }
        asked.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
