"""What the planner's parts cost by themselves: slicing, cells, scheduling, the prefix cache.

`python -m bench.planner_leaves [--repeats N]` prints per row the median, least and most of N runs, and the median as a
ratio to the first row of its group: where a cost must not grow with something, that ratio is to stay near 1. Aims: a
cold table of 8192 tokens on 12 static widths and a dynamic method within 50 ms, a warm plan within 5 us. Times are
processor time of the one thread that plans: what other processes take meanwhile is not counted.
"""

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from microtome.planner.cells import CellTable
from microtome.planner.policies import POLICIES
from microtome.planner.prefix import PrefixCache
from microtome.planner.slicing import CheapestPlanner
from microtome.planner.types import Input, Kind, MethodSpec, MethodTable, Position, SequenceId, SessionId

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
DECODES = 256
KEY = ("fingerprint", "")


@dataclass(frozen=True, slots=True)
class Row:
    group: str
    what: str
    unit: str
    per_unit_ns: float  # nanoseconds in one of the unit
    run: Callable[[], int]  # runs once, and returns nanoseconds for what one row counts


def timed(call: Callable[[], object], times: int = 1) -> int:
    """Nanoseconds per call."""
    started_ns = time.thread_time_ns()
    for _ in range(times):
        call()
    return (time.thread_time_ns() - started_ns) // times


# --- slicing ---


def method_table() -> MethodTable:
    statics = [MethodSpec(name=f"forward_{w}", max_tokens=w, static=True, cost_us=900 + 7 * w) for w in WIDTHS]
    dynamic = MethodSpec(
        name="prefill", max_tokens=512, static=False, min_tokens=2, cost_us=1400, cost_ns_per_token=7300
    )
    return MethodTable((*statics, dynamic))


def slicing() -> Iterator[Row]:
    table = method_table()
    for total in (512, 2048, 8192):
        yield Row(
            "a cold table of costs, and the first plan",
            f"{total} tokens",
            "ms",
            1e6,
            lambda total=total: timed(lambda: CheapestPlanner(table).plan(total)),
        )
    planner = CheapestPlanner(table)
    planner.plan(8192)
    for total in (512, 2048, 8192):
        planner.plan(total)
        yield Row(
            "a plan asked for before",
            f"{total} tokens",
            "us",
            1e3,
            lambda total=total: timed(lambda: planner.plan(total), 20_000),
        )


# --- cells ---


def filled(pool: int, sequences: int, history: int) -> tuple[CellTable, list[SequenceId]]:
    """A table with sequences, whose free cells are partly used ones given back in no order."""
    table = CellTable(pool, max_sequences=sequences + 64)
    guests = [table.open() for _ in range(64)]
    live = [table.open() for _ in range(sequences)]
    for _ in range(8):
        table.commit(table.plan([(guest, table.length(guest), 4) for guest in guests]))
    for sequence in live:
        table.commit(table.plan([(sequence, 0, history)]))
    for guest in Random(1).sample(guests, len(guests)):
        table.remove(guest)
    return table, live


def decode_steps(table: CellTable, sequences: list[SequenceId], steps: int = 40) -> int:
    """Plan and commit decode steps; every history is cut back afterwards, which is not counted."""
    started_ns = time.thread_time_ns()
    for _ in range(steps):
        table.commit(table.plan([(sequence, table.length(sequence), 1) for sequence in sequences]))
    spent_ns = time.thread_time_ns() - started_ns
    for sequence in sequences:
        table.rewind(sequence, table.length(sequence) - steps)
    return spent_ns // steps


def cells() -> Iterator[Row]:
    for pool in (30_000, 200_000, 2_000_000):
        table, live = filled(pool, DECODES, history=50)
        yield Row(
            f"cells of a decode step, {DECODES} sequences, by pool size",
            f"{pool} cells",
            "us",
            1e3,
            lambda table=table, live=live: decode_steps(table, live),
        )
    for history in (50, 1000, 7000):
        table, live = filled(2_000_000, DECODES, history)
        yield Row(
            f"cells of a decode step, {DECODES} sequences, by history",
            f"{history} tokens each",
            "us",
            1e3,
            lambda table=table, live=live: decode_steps(table, live),
        )
    for resident in (DECODES, 4 * DECODES, 16 * DECODES):
        table, live = filled(2_000_000, resident, history=50)
        yield Row(
            f"cells of a decode step, {DECODES} sequences, by residents",
            f"{resident} sequences",
            "us",
            1e3,
            lambda table=table, live=live: decode_steps(table, live[:DECODES]),
        )


# --- scheduling ---


def decode(session: int, start: int) -> Input:
    return Input(session=SessionId(session), kind=Kind.DECODE, start=Position(start), width=1, wants_output=True)


def prefill(session: int, start: int, width: int) -> Input:
    return Input(session=SessionId(session), kind=Kind.PREFILL, start=Position(start), width=width, wants_output=False)


def decode_batches(policy: str, waiting: int, steps: int = 20) -> int:
    """Hand out batches of decodes while `waiting` sessions want one; each comes back for the next step."""
    scheduler = POLICIES[policy](max_batch_tokens=512, max_decodes=DECODES, max_prefill_tokens=256)
    for session in range(waiting):
        scheduler.admit(SessionId(session), priority=session % 3, tenant=f"tenant {session % 7}")
    scheduler.submit([decode(session, 0) for session in range(waiting)])
    spent_ns = 0
    for _ in range(steps):
        started_ns = time.thread_time_ns()
        batch = scheduler.next_batch()
        spent_ns += time.thread_time_ns() - started_ns
        again = [decode(item.session, item.start + 1) for item in batch]
        started_ns = time.thread_time_ns()
        scheduler.submit(again)
        spent_ns += time.thread_time_ns() - started_ns
    return spent_ns // steps


def crowded_prefill(policy: str, waiting: int, steps: int = 40) -> int:
    """One narrow chunk goes beside a step's decodes, behind `waiting` sessions whose chunks do not fit it."""
    scheduler = POLICIES[policy](
        max_batch_tokens=512, max_decodes=DECODES, max_prefill_tokens=256, target_step_tokens=200, patience_steps=10**6
    )
    for session in range(waiting):
        scheduler.admit(SessionId(session), priority=session % 3, tenant=f"tenant {session % 7}")
        scheduler.submit([prefill(session, 0, 256)])
    spent_ns = 0
    for step in range(steps):
        scheduler.submit([decode(10**6, step), prefill(10**6 + 1 + step, 0, 100)])
        started_ns = time.thread_time_ns()
        batch = scheduler.next_batch()
        spent_ns += time.thread_time_ns() - started_ns
        assert len(batch) == 2
    return spent_ns // steps


def scheduling() -> Iterator[Row]:
    for waiting in (DECODES, 4 * DECODES):
        for policy in POLICIES:
            yield Row(
                f"queue and hand out {DECODES} decodes of {waiting} that wait",
                policy,
                "us",
                1e3,
                lambda policy=policy, waiting=waiting: decode_batches(policy, waiting),
            )
    for policy in ("decode-first", "fair-priority"):
        for waiting in (10, 1000, 10_000):
            yield Row(
                f"find the chunk that fits, {policy}",
                f"{waiting} in front",
                "us",
                1e3,
                lambda policy=policy, waiting=waiting: crowded_prefill(policy, waiting),
            )


# --- the prefix cache ---


def conversations(count: int, tokens: int = 512, shared: int = 128) -> list[list[int]]:
    """Prompts of which each shares its beginning with about a tenth of the others."""
    random = Random(2)
    systems = [[random.randrange(50_000) for _ in range(shared)] for _ in range(10)]
    return [
        [*random.choice(systems), *(random.randrange(50_000) for _ in range(tokens - shared))] for _ in range(count)
    ]


def cached(prompts: list[list[int]]) -> tuple[CellTable, PrefixCache]:
    table = CellTable(usable_cells=4_000_000, max_sequences=8)
    cache = PrefixCache(table)
    for prompt in prompts:
        shared = cache.match(KEY, prompt)
        sequence = table.open(shared)
        table.commit(table.plan([(sequence, len(shared), len(prompt) - len(shared))]))
        cache.insert(KEY, prompt, table.cells(sequence))
        table.remove(sequence)
    return table, cache


def inserting(cache: PrefixCache, table: CellTable, prompts: list[list[int]]) -> int:
    """Insert computed prompts; computing them is not counted."""
    spent_ns = 0
    for prompt in prompts:
        sequence = table.open()
        table.commit(table.plan([(sequence, 0, len(prompt))]))
        own = table.cells(sequence)
        started_ns = time.thread_time_ns()
        cache.insert(KEY, prompt, own)
        spent_ns += time.thread_time_ns() - started_ns
        table.remove(sequence)
    return spent_ns // len(prompts)


def prefixes() -> Iterator[Row]:
    numbers = itertools.count(10**6)
    fresh = iter(lambda: [[next(numbers), *range(511)] for _ in range(50)], None)
    caches = {count: (conversations(count), *cached(conversations(count))) for count in (100, 1000, 4000)}
    for count, (prompts, _, cache) in caches.items():
        asked = [[*prompt[:384], 60_000, 60_001] for prompt in Random(3).sample(prompts, 100)]
        yield Row(
            "look up a prompt of which 384 tokens match, by entries",
            f"{count} prompts of 512",
            "us",
            1e3,
            lambda cache=cache, asked=asked: timed(lambda: [cache.match(KEY, prompt) for prompt in asked], 5) // 100,
        )
    _, _, cache = caches[4000]
    for matched in (32, 128, 512):
        asked = [[*prompt[:matched], 60_000, 60_001] for prompt in caches[4000][0][:100]]
        yield Row(
            "look up a prompt, 4000 entries, by tokens that match",
            f"{matched} match",
            "us",
            1e3,
            lambda asked=asked: timed(lambda: [cache.match(KEY, prompt) for prompt in asked], 5) // 100,
        )
    for count, (_, table, cache) in caches.items():
        yield Row(
            "insert a computed prompt of 512, by entries",
            f"{count} prompts of 512",
            "us",
            1e3,
            lambda table=table, cache=cache: inserting(cache, table, next(fresh)),
        )
    for count in (100, 1000, 4000):
        prompts, table, cache = caches[count]

        def evicting(prompts: list[list[int]] = prompts, table: CellTable = table, cache: PrefixCache = cache) -> int:
            spent_ns = timed(lambda: cache.evict(256))
            inserting(cache, table, prompts[:20])
            return spent_ns

        yield Row("free 256 cells, by entries", f"{count} prompts of 512", "us", 1e3, evicting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=9, help="runs per row")
    repeats = parser.parse_args().repeats
    print(f"command: python -m bench.planner_leaves --repeats {repeats}")
    print(
        f"machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()}; Python {sys.version.split()[0]}"
    )
    group, first = "", 0.0
    for part in (slicing, cells, scheduling, prefixes):
        for row in part():
            times = sorted(row.run() / row.per_unit_ns for _ in range(repeats))
            median = statistics.median(times)
            if row.group != group:
                group, first = row.group, median
                print(f"\n{group} [{row.unit}]\n{'':<24} {'median':>9} {'least':>9} {'most':>9} {'ratio':>6}")
            print(f"{row.what:<24} {median:>9.2f} {times[0]:>9.2f} {times[-1]:>9.2f} {median / first:>6.2f}")


if __name__ == "__main__":
    main()
