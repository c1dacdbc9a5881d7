"""Drawing tokens on a CPU: our kernel beside torch's operators and beside a whole sort, as ratios within one run.

    python -m bench.sampler [--threads 1] [--vocabulary 49152] [--rows 16] [--rounds 9]

Logits are normal with a standard deviation of 3, as a language model's roughly are, and the temperature is 1. Every
contender draws for the same rows under the same policies, and the tokens must be equal. Rounds are interleaved; times
are medians of the process's processor time, which other processes on the machine disturb least, and the spread is
(max - min) / median. With two threads or more, waiting for each other counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microtome.cuda_runtime.drawing import cpu_native, stock
from microtome.cuda_runtime.drawing.policies import DrawnRows, drawn_rows, restricts
from microtome.cuda_runtime.log_probabilities import stock_logprob_table
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.planner.types import SamplingParams

POLICIES = {
    "temperature alone": SamplingParams(temperature=1.0),
    "top-k 40": SamplingParams(temperature=1.0, top_k=40),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-p 0.999": SamplingParams(temperature=1.0, top_p=0.999),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
}
LIKELIEST = 5
Draw = Callable[[Tensor, DrawnRows], Tensor]


def _no_history() -> NDArray[np.int64]:
    raise AssertionError("no policy here has penalties")


def whole_sort(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    """As most samplers do it: sort the vocabulary, add up, cut."""
    ordered_RV, order_RV = logits_RV.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    weights_RV = torch.exp((ordered_RV - ordered_RV[:, :1]) / policy.temperature[:, None])
    running_RV = weights_RV.cumsum(dim=-1)
    keep_RV = torch.arange(logits_RV.shape[-1]) < policy.top_k[:, None]
    keep_RV &= running_RV - weights_RV <= policy.top_p[:, None] * running_RV[:, -1:]
    keep_RV &= weights_RV >= policy.min_p[:, None]
    kept_R1 = keep_RV.sum(dim=-1, keepdim=True).clamp_min(1)
    mass_R1 = running_RV.gather(-1, kept_R1 - 1)
    passed_R1 = (running_RV <= policy.coin[:, None] * mass_R1).sum(dim=-1, keepdim=True)
    return order_RV.gather(-1, torch.minimum(passed_R1, kept_R1 - 1))[:, 0]


def native(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    return cpu_native.draw(logits_RV, torch.arange(len(logits_RV)), policy)


def likelihoods(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return cpu_native.likelihoods(logits_RV, tokens_R, LIKELIEST)


def stock_table(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """What a machine without a compiler does."""
    return stock_logprob_table(logits_RV, tokens_R, LIKELIEST)


def whole_log_softmax(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """The short way, without a rule for ties."""
    logprobs_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=-1)
    top = logprobs_RV.topk(LIKELIEST, dim=-1)
    own_R1 = logprobs_RV.gather(-1, tokens_R[:, None])
    return torch.cat((own_R1, top.indices.to(torch.float64), top.values), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if cpu_native.operators() is None:
        raise SystemExit("the kernel needs a C++ compiler, and there is none here")
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(given.rows, given.vocabulary, generator=generator) * 3
    print(f"{given.rows} rows of {given.vocabulary} logits, {given.threads} threads, median of {given.rounds} rounds\n")
    print("| policy | kernel, ms | stock operators, ms | a whole sort, ms | stock / kernel | sort / kernel |")
    print("|---|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        rows = [SampledRow(policy, position, _no_history) for position in range(given.rows)]
        drawn = drawn_rows(rows, given.vocabulary, logits_RV.device)
        by_rank = restricts(rows[0], given.vocabulary)
        contenders: dict[str, Draw] = {
            "native": native,
            "stock": stock.draw_by_rank if by_rank else stock.draw_by_id,
            "sort": whole_sort,
        }
        if not by_rank:
            del contenders["sort"]
        tokens = {contender: draw(logits_RV, drawn).tolist() for contender, draw in contenders.items()}
        if any(found != tokens["native"] for found in tokens.values()):
            raise SystemExit(f"{name}: the contenders draw different tokens: {tokens}")
        report(
            name, {contender: partial(draw, logits_RV, drawn) for contender, draw in contenders.items()}, given.rounds
        )
    tokens_R = torch.arange(given.rows)
    whole = {"native": likelihoods, "stock": stock_table, "sort": whole_log_softmax}
    found = [look(logits_RV, tokens_R)[:, : 1 + LIKELIEST] for look in whole.values()]
    if not all(torch.allclose(one, found[0], rtol=1e-6) for one in found):
        raise SystemExit("the contenders find other log-probabilities, or other likeliest tokens")
    report(
        f"log-probabilities, {LIKELIEST} likeliest; for a whole sort: torch.log_softmax and topk",
        {contender: partial(look, logits_RV, tokens_R) for contender, look in whole.items()},
        given.rounds,
    )


def report(name: str, contenders: Mapping[str, Callable[[], Tensor]], rounds: int) -> None:
    """One row of the table."""
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, run in contenders.items():
            begin = time.process_time()
            run()
            times[contender].append((time.process_time() - begin) * 1e3)
    medians = {contender: statistics.median(values) for contender, values in times.items()}
    cells = {
        contender: f"{medians[contender]:.2f} ± {(max(values) - min(values)) / medians[contender]:.0%}"
        for contender, values in times.items()
    }
    ratios = {contender: f"{median / medians['native']:.1f}" for contender, median in medians.items()}
    columns = [name, *(cells.get(c, "—") for c in ("native", "stock", "sort"))]
    print(f"| {' | '.join([*columns, ratios['stock'], ratios.get('sort', '—')])} |", flush=True)


if __name__ == "__main__":
    main()
