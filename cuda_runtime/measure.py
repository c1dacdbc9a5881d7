"""What a forward of each method costs, measured on this device once it is warm.

Forwards of nothing but padding, in rounds that visit every method in turn, so that a busy moment of the machine falls
on all alike; the quickest of each counts. A narrower static method always counts as cheaper than a wider one: what was
measured otherwise was something else's doing. Touches the scratch cell only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from microtome.cuda_runtime.method import LINES, ROWS, Method
from microtome.cuda_runtime.rows import RowTable
from microtome.planner.types import MethodSpec

LEAST_ROUNDS, MOST_ROUNDS = 3, 12  # after one to warm up
ENOUGH_S = 2.0  # no further round after so long

Clock = Callable[[], int]  # nanoseconds


@torch.inference_mode()
def measured(methods: Sequence[Method], rows: RowTable, clock: Clock = time.perf_counter_ns) -> tuple[MethodSpec, ...]:
    """The methods' specs with their costs."""
    device = rows.device.device
    probes = [(index, width) for index, method in enumerate(methods) for width in _widths(method.spec)]
    columns: list[Tensor] = []
    for _, width in probes:
        columns_5N = torch.zeros(LINES, width, dtype=torch.int64, device=device)
        columns_5N[ROWS] = rows.padding_row
        columns.append(columns_5N)
    quickest_ns = [0] * len(probes)
    began_ns = clock()
    for turn in range(1 + MOST_ROUNDS):
        for place, (index, _) in enumerate(probes):
            started_ns = clock()
            methods[index].run(columns[place], 1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took_ns = clock() - started_ns
            if turn == 1 or (turn > 1 and took_ns < quickest_ns[place]):
                quickest_ns[place] = took_ns
        if turn >= LEAST_ROUNDS and clock() - began_ns > ENOUGH_S * 1e9:
            break
    found_us: dict[int, list[tuple[int, float]]] = {}
    for (index, width), took_ns in zip(probes, quickest_ns, strict=True):
        found_us.setdefault(index, []).append((width, took_ns / 1000))
    return _never_dearer([_with_cost(method.spec, found_us[index]) for index, method in enumerate(methods)])


def _widths(spec: MethodSpec) -> tuple[int, ...]:
    """Where a method is measured: a line needs two points."""
    if spec.static:
        return (spec.max_tokens,)
    narrow = max(spec.min_tokens, spec.max_tokens // 8)
    return (narrow, spec.max_tokens) if narrow < spec.max_tokens else (spec.max_tokens,)


def _with_cost(spec: MethodSpec, found: Sequence[tuple[int, float]]) -> MethodSpec:
    (narrow, narrow_us), (wide, wide_us) = found[0], found[-1]
    if spec.static or narrow == wide:
        return replace(spec, cost_us=max(1, round(wide_us)))
    per_token_us = max(0.0, (wide_us - narrow_us) / (wide - narrow))
    start_us = max(1, round(wide_us - per_token_us * wide))
    return replace(spec, cost_us=start_us, cost_ns_per_token=round(per_token_us * 1000))


def _never_dearer(specs: Sequence[MethodSpec]) -> tuple[MethodSpec, ...]:
    """Ascending by width; from the widest down, a static method costs a little less than a wider one at least."""
    result: list[MethodSpec] = []
    least_us: int | None = None
    for spec in reversed(specs):
        if spec.static:
            least_us = spec.cost_us if least_us is None else max(1, min(least_us - 1, spec.cost_us))
            spec = replace(spec, cost_us=least_us)
        result.append(spec)
    return tuple(reversed(result))
