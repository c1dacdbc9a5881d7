"""From what an engine did to figures, and from several rounds' figures to medians and ratios. Pure arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.peer_engines.records import Record
from bench.peer_engines.workload import Load


class WrongLengths(Exception):
    """An engine answered with other numbers of tokens than were asked for: its times say nothing."""


@dataclass(frozen=True)
class Measure:
    """A figure of one work."""

    work: str
    name: str
    unit: str
    digits: int
    rate: bool  # more is better; else it is a time, and less is better


MEASURES = (
    Measure("W1", "output", "tok/s", 0, rate=True),
    Measure("W1", "TTFT p50", "ms", 0, rate=False),
    Measure("W1", "TTFT p99", "ms", 0, rate=False),
    Measure("W1", "ITL p50", "ms", 1, rate=False),
    Measure("W1", "ITL p99", "ms", 1, rate=False),
    Measure("W2", "decode", "tok/s", 1, rate=True),
    Measure("W3", "prefill", "tok/s", 0, rate=True),
    Measure("W4", "time", "s", 2, rate=False),
    Measure("W4p", "time", "s", 2, rate=False),
)

Figures = dict[str, float]  # by a measure's name, of one work


def figures_of(work: str, load: Load, records: Sequence[Record]) -> Figures:
    """Of one run of the load. Raises WrongLengths.

    A time to a first token begins when the request is sent. Of several tokens handed out at once, the first follows
    the hand-out before it, and the others follow it at once.
    """
    check_lengths(work, load, records)
    began_s = min(record.submitted_s for record in records)
    seconds = max(record.times_s[-1] for record in records) - began_s
    first_ms = [1e3 * (record.times_s[0] - record.submitted_s) for record in records]
    if work == "W1":
        gaps_ms = [gap for record in records for gap in _gaps_ms(record)]
        return {
            "output": sum(asked.new_tokens for asked in load.requests) / seconds,
            "TTFT p50": percentile(first_ms, 50),
            "TTFT p99": percentile(first_ms, 99),
            "ITL p50": percentile(gaps_ms, 50),
            "ITL p99": percentile(gaps_ms, 99),
        }
    if work == "W2":
        (record,) = records
        return {"decode": sum(record.counts[1:]) / (record.times_s[-1] - record.times_s[0])}
    if work == "W3":
        return {"prefill": len(load.requests[0].prompt) / (1e-3 * first_ms[0])}
    return {"time": seconds}


def check_lengths(work: str, load: Load, records: Sequence[Record]) -> None:
    """Raises WrongLengths, naming the first request that differs."""
    if len(records) != len(load.requests):
        raise WrongLengths(f"{work}: {len(records)} answers to {len(load.requests)} requests")
    for number, (asked, record) in enumerate(zip(load.requests, records, strict=True)):
        came = sum(record.counts)
        if came != asked.new_tokens:
            raise WrongLengths(
                f"{work}: request {number} has {came} tokens of output, {asked.new_tokens} were asked for"
            )


def _gaps_ms(record: Record) -> Iterable[float]:
    for (before_s, after_s), count in zip(pairwise(record.times_s), record.counts[1:], strict=True):
        yield 1e3 * (after_s - before_s)
        yield from [0.0] * (count - 1)
    yield from [0.0] * (record.counts[0] - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """Of values that are not empty, by a line between the two nearest ranks."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def median_figures(runs: Sequence[Figures]) -> Figures:
    """Of a load that was run more than once in a round."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    most: float

    def told(self, digits: int) -> str:
        if self.least == self.most:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


Rounds = Sequence[Mapping[str, Figures]]  # per round, by work


def spreads(rounds: Rounds) -> dict[tuple[str, str], Spread]:
    """By work and measure."""
    return {
        (measure.work, measure.name): spread([one[measure.work][measure.name] for one in rounds])
        for measure in MEASURES
        if measure.work in rounds[0]
    }


def speed_ratios(ours: Rounds, peers: Rounds) -> dict[tuple[str, str], Spread]:
    """How many times as fast as the peer ours is: above 1, ours is ahead.

    Ours ÷ peer for a rate, peer ÷ ours for a time; taken round by round, so that a drift of the machine cancels.
    """
    result = {}
    for measure in MEASURES:
        ratios = []
        for own, other in zip(ours, peers, strict=True):
            if measure.work in own and measure.work in other:
                a, b = own[measure.work][measure.name], other[measure.work][measure.name]
                if a and b:
                    ratios.append(a / b if measure.rate else b / a)
        if ratios:
            result[measure.work, measure.name] = spread(ratios)
    return result
