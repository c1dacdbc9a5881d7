"""An engine's process: it starts the engine, then runs one load for each line it is given. Standard library only.

Lines are JSON, in by standard input, out by what was standard output when the process began; whatever the engine's own
code prints goes to standard error. First comes `{"ready": facts}`; then, for each load, its records and what the
machine's processors did meanwhile. An error ends the process: its last words are in the log.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

from bench.peer_engines.records import Record
from bench.peer_engines.workload import Asked, Load


class Engine(Protocol):
    @property
    def facts(self) -> Mapping[str, Any]:
        """Versions and settings, for the report."""

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        """Answer all, at most `in_flight` at a time; one record per request, in their order."""


Reply = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def answer_lines(start: Callable[[], AbstractContextManager[tuple[Mapping[str, Any], Reply]]]) -> None:
    """Start something that has facts and a reply to each line, and reply until the lines end."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with start() as (facts, reply):
            print(json.dumps({"ready": dict(facts)}), file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(reply(json.loads(line))), file=answers, flush=True)


def turn(engine: Engine, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run one load."""
    load = _load(asked)
    if load.first:
        engine.run(load.first, len(load.first))
    busy, stolen = processor_seconds()
    began_s = time.perf_counter()
    records = engine.run(load.requests, load.in_flight)
    took_s = time.perf_counter() - began_s
    busy_after, stolen_after = processor_seconds()
    return {
        "records": [asdict(record) for record in records],
        "cores_busy": (busy_after - busy) / took_s,
        "cores_stolen": (stolen_after - stolen) / took_s,
    }


def _load(said: Mapping[str, Any]) -> Load:
    requests, first = (
        tuple(Asked(tuple(one["prompt"]), one["new_tokens"]) for one in said[name]) for name in ("requests", "first")
    )
    return Load(requests, said["in_flight"], first)


def processor_seconds() -> tuple[float, float]:
    """Of the whole machine since it began: busy, and taken from it by its host."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, interrupt, soft_interrupt, stolen = map(int, file.readline().split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupt + soft_interrupt) / ticks, stolen / ticks
