"""Many simulated lives: `python -m tests.simulation.soak --seeds 10000 [--first N] [--jobs N]`.

Each seed is lived three times: in a whole cluster, in a crowd, and under siege. Prints each failing seed with its
story, and a summary; exits with 1 if any failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from tests.simulation import siege, world

_AT_ONCE = 25


def lives(first: int, count: int) -> tuple[int, list[str]]:
    """Run `count` seeds; how many events they had, and the stories of those that failed."""
    events, failures = 0, []
    for seed in range(first, first + count):
        for live in (world.live, world.live_crowded, siege.live):
            try:
                events += live(seed).events
            except AssertionError as error:
                failures.append(str(error))
    return events, failures


def _portions(first: int, seeds: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, first + seeds, _AT_ONCE):
        yield begin, min(_AT_ONCE, first + seeds - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    began = time.monotonic()
    done = events = failed = 0
    portions = _portions(given.first, given.seeds)
    with ProcessPoolExecutor(given.jobs) as pool:
        while wave := list(islice(portions, 4 * given.jobs)):
            for some, failures in pool.map(lives, *zip(*wave, strict=True)):
                events += some
                failed += len(failures)
                for story in failures:
                    print(story, flush=True)
            done += sum(count for _, count in wave)
            print(f"{done} of {given.seeds} seeds, {events} events, {failed} failed", file=sys.stderr, flush=True)
    print(f"{given.seeds} seeds, {events} events, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
