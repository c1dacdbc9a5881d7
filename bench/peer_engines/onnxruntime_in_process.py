"""onnxruntime-genai's generator on the CPU, in float32: batches of up to as many requests as are in flight.

A batch is made in the order of the requests, filled up on the right, and runs until its longest output is done; tokens
beyond a request's own length do not count. Its engine for requests that come and go has no continuous batching on a
CPU. Time to a first token counts from the start of the request's batch.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime_genai

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Record
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked

FILLING = 2  # as its configuration has it; on the left, its attention would see it


class OnnxRuntime:
    def __init__(self) -> None:
        config = onnxruntime_genai.Config(asked_for.model())
        options = {"intra_op_num_threads": asked_for.THREADS, **asked_for.settings()}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self.facts = {"onnxruntime_genai": onnxruntime_genai.__version__, "settings": options}

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        records: list[Record] = []
        for begin in range(0, len(requests), in_flight):
            records += self._batch(requests[begin : begin + in_flight])
        return records

    def _batch(self, batch: Sequence[Asked]) -> list[Record]:
        longest = max(len(asked.prompt) for asked in batch)
        steps = max(asked.new_tokens for asked in batch)
        records = [Record(time.perf_counter()) for _ in batch]
        search = onnxruntime_genai.GeneratorParams(self._model)
        length = longest + steps
        search.set_search_options(batch_size=len(batch), max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, search)
        filled = [[*asked.prompt, *[FILLING] * (longest - len(asked.prompt))] for asked in batch]
        generator.append_tokens(np.array(filled, dtype=np.int32))
        for step in range(steps):
            generator.generate_next_token()
            now_s = time.perf_counter()
            for asked, record, token in zip(batch, records, generator.get_next_tokens(), strict=True):
                if step < asked.new_tokens:
                    record.note(now_s, 1, [int(token)])
        return records


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    engine = OnnxRuntime()
    yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
