"""What weights of 8 bits cost in exactness and give in time, beside the same model's own weights, in one process.

`python -m bench.quantize MODEL` prints and writes:

- per position of greedy continuations of some prompts, the norm of the difference of logits ÷ the norm of the logits,
  of int8 against the weights as they are, and of those against float32, which is what rounding to `--dtype` costs;
- at how many of these positions the likeliest token is the same, and how long a greedy run of its own stays the same;
- milliseconds of a forward, smallest of rounds in turns, and the ratio to the weights as they are.
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from bench.methods import CELLS, LENGTH, ROWS, SHAPES, arguments, smallest_ms
from microtome.cuda_runtime.checkpoint import find_checkpoint, load_tokenizer
from microtome.cuda_runtime.kv_pool import allocate_pool
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.ready_model import ReadyModel, ready_model, target_of
from microtome.cuda_runtime.rows import RowTable
from microtome.cuda_runtime.start_up import StartUp
from microtome.fetch import resolve_model

CPU = torch.device("cpu")
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a small machine that",
    "def fibonacci(n):",
    "The three laws of motion say that",
    "To make bread you need flour,",
    "In the year 1969, for the first time,",
    "A good friend is somebody who",
    "The difference between a list and a tuple in Python is",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,",
    "The sum of the angles of a triangle is",
)


class Runner:
    """One variant over cells of its own, all in row 0."""

    def __init__(self, options: RuntimeOptions) -> None:
        checkpoint, target = find_checkpoint(options.model), target_of(options)
        self.model: ReadyModel = ready_model(options, checkpoint, target, StartUp())
        self.pool = allocate_pool(self.model.layers, CELLS, device=CPU, dtype=target.kv_dtype)
        self.rows = RowTable(ROWS, LENGTH, self.pool.scratch_cell, CPU)
        generator = torch.Generator().manual_seed(0)
        self.rows.device[:ROWS] = torch.randperm(CELLS, generator=generator)[:LENGTH].to(torch.int32)

    def logits(self, tokens: list[int], start: int = 0) -> Tensor:
        """Float64 [T, V] of `tokens` at positions from `start` on."""
        count = len(tokens)
        forward = self.model.decode if count == 1 else self.model.prefill
        indices = torch.arange(count)
        rows = torch.zeros(count, dtype=torch.int64)
        given = (torch.tensor([tokens]), indices[None] + start, rows, indices, self.rows.device)
        return forward(*given, self.pool.k, self.pool.v).double()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        found = [int(self.logits(prompt)[-1].argmax())]
        while len(found) < count:
            found.append(int(self.logits(found[-1:], len(prompt) + len(found) - 1)[-1].argmax()))
        return found


def compared(ours: Runner, theirs: Runner, runs: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Logits of `ours` against those of `theirs` over (prompt, continuation)."""
    errors: list[float] = []
    same, first_difference, whole = 0, [], 0
    for prompt, continuation in runs:
        a, b = (runner.logits(prompt + continuation[:-1])[len(prompt) - 1 :] for runner in (ours, theirs))
        errors += ((a - b).norm(dim=-1) / b.norm(dim=-1)).tolist()
        same += int((a.argmax(dim=-1) == b.argmax(dim=-1)).sum())
        own = ours.greedy(prompt, len(continuation))
        differs = next((i for i, pair in enumerate(zip(own, continuation, strict=True)) if pair[0] != pair[1]), None)
        whole += differs is None
        first_difference.append(len(continuation) if differs is None else differs)
    return {
        "positions": len(errors),
        "logit_error_median": median(errors),
        "logit_error_p99": quantiles(errors, n=100)[98],
        "same_likeliest_token": same / len(errors),
        "greedy_runs_alike": f"{whole} of {len(runs)}",
        "first_difference_median": median(first_difference),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default="eager", choices=("eager", "compiled"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=64, help="of each greedy continuation")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)

    def runner(dtype: str, quantize: str, methods: str) -> Runner:
        model = resolve_model(asked.model)
        options = RuntimeOptions(
            model=model, dtype=dtype, quantize=quantize, methods=methods, max_session_tokens=LENGTH
        )
        return Runner(options)

    exact = runner("float32", "none", "eager")
    plain, rounded = (runner(asked.dtype, quantize, asked.methods) for quantize in ("none", "int8"))
    checkpoint = find_checkpoint(resolve_model(asked.model))
    tokenizer = load_tokenizer(checkpoint)
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        runs = [
            (prompt, plain.greedy(prompt, asked.new_tokens))
            for prompt in (tokenizer(text)["input_ids"] for text in PROMPTS)
        ]
        figures[f"int8 against {asked.dtype}"] = compared(rounded, plain, runs)
        figures[f"{asked.dtype} against float32"] = compared(
            plain, exact, [(p, exact.greedy(p, asked.new_tokens)) for p, _ in runs]
        )
        for name, found in figures.items():
            print(f"{name}: {found}", flush=True)
        times: dict[str, dict[str, tuple[float, float]]] = {}
        for name, (tokens, position) in SHAPES.items():
            forwards: dict[str, Callable[[], Tensor]] = {}
            for key, variant in (("as they are", plain), ("int8", rounded)):
                given = arguments(tokens, position, checkpoint.vocab_size, variant.rows, variant.pool)
                forwards[key] = partial(variant.model.decode if tokens == 1 else variant.model.prefill, *given)
            times[name] = smallest_ms(forwards, asked.rounds)
            (cpu, wall), (cpu_int8, wall_int8) = times[name].values()
            told = f"{cpu:.1f} ms ({wall:.1f} wall), int8 {cpu_int8:.1f} ms ({wall_int8:.1f} wall)"
            print(f"{name}: {told}, x{cpu / cpu_int8:.2f} (x{wall / wall_int8:.2f} wall)", flush=True)
    if asked.json:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": asked.threads,
            "methods": asked.methods,
            "model": checkpoint.name,
            "exactness": figures,
            "ms_processor_wall": times,
        }
        asked.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
