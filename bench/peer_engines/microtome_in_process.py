"""Microtome's planner and executor in one process, as `microtome solo` runs them.

A line with `contexts` is not a load: the answer holds, for each of these token lists, by how much the likeliest next
token's log-probability is above the second's. It tells a tie that rounding broke from an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Record
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked
from microtome import solo
from microtome.actors.worker import load_executor_factory
from microtome.local import configuration
from microtome.planner.control import Control
from microtome.planner.types import GenerationOptions, SamplingParams

# Twice what the cache of a peer holds at bfloat16 does not matter: no work here fills either.
KV_TOKENS = 65536


def microtome_settings() -> dict[str, object]:
    """Defaults, beside what makes engines comparable."""
    return {
        "model": asked_for.model(),
        "runtime.dtype": asked_for.dtype(),
        "runtime.threads": asked_for.THREADS,
        "runtime.kv_tokens": KV_TOKENS,
        "runtime.methods": "compiled",
        **asked_for.settings(),
    }


class InProcess:
    def __init__(self, settings: Mapping[str, object]) -> None:
        config = configuration(settings)
        self._executor = load_executor_factory(config.workers.executor)(config.runtime)
        self._control = Control(config.planner)
        table = {method.name: [method.cost_us, method.cost_ns_per_token] for method in self._methods}
        self.facts = {"torch": torch.__version__, "settings": dict(settings), "costs_us_ns_per_token": table}

    @property
    def _methods(self) -> Sequence[Any]:
        return self._executor.describe().table.methods

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        report = solo.run(self._executor, self._control, [_request(one) for one in requests], concurrency=in_flight)
        return [_record(answer) for answer in report.answers]

    def lead(self, context: Sequence[int]) -> float:
        """Of the likeliest token after `context` over the second."""
        sampling = SamplingParams(prompt_tokens=len(context), logprobs=2)
        options = GenerationOptions(max_new_tokens=1, sampling=sampling)
        report = solo.run(self._executor, self._control, [solo.Request(prompt=tuple(context), options=options)])
        (found,) = report.answers[0].logprobs
        assert found is not None
        (_, first), (_, second) = found.top
        return float(first - second)


def _request(asked: Asked) -> solo.Request:
    sampling = SamplingParams(prompt_tokens=len(asked.prompt))
    options = GenerationOptions(max_new_tokens=asked.new_tokens, sampling=sampling)
    return solo.Request(prompt=asked.prompt, options=options)


def _record(answer: solo.Answer) -> Record:
    if answer.error is not None:
        raise answer.error
    times_s = [time_us / 1e6 for time_us in answer.token_times_us]
    return Record(answer.submitted_us / 1e6, times_s, [1] * len(times_s), answer.tokens)


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    engine = InProcess(microtome_settings())

    def reply(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if "contexts" in asked:
            return {"leads": [engine.lead(context) for context in asked["contexts"]]}
        return turn(engine, asked)

    yield engine.facts, reply


if __name__ == "__main__":
    answer_lines(started)
