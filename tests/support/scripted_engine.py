"""An engine's process for tests of the bench: answers are made up, at once, and each token is its request's length.

`BENCH_SETTINGS` may hold `short_after`: from that load on, answers lack a token; `dies_after`: then it ends; and
`other_from`: tokens from that position on are others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Record
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked


class Scripted:
    facts: Mapping[str, Any] = {"scripted": "1", "settings": {"dtype": asked_for.dtype()}}

    def __init__(self) -> None:
        self._loads = 0

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        settings = asked_for.settings()
        if self._loads == settings.get("dies_after"):
            raise SystemExit("as scripted")
        lacking = self._loads >= settings.get("short_after", self._loads + 1)
        self._loads += 1
        print("an engine may print what it likes")
        records = []
        for asked in requests:
            times = [float(number + 1) for number in range(asked.new_tokens - lacking)]
            tokens = [len(asked.prompt) + (at >= settings.get("other_from", at + 1)) for at in range(len(times))]
            records.append(Record(0.0, times, [1] * len(times), tokens))
        return records


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    engine = Scripted()

    def reply(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if not asked:
            return {"read_bytes_per_s": 1e10, "operations_per_s": 1e12}
        if "contexts" in asked:
            return {"leads": [len(context) / 1000 for context in asked["contexts"]]}
        return turn(engine, asked)

    yield engine.facts, reply


if __name__ == "__main__":
    answer_lines(started)
