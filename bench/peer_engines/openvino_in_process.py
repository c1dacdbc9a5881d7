"""OpenVINO GenAI's continuous batching pipeline, stepped in this process.

At bfloat16 it keeps its own defaults, which on such a CPU are bfloat16 arithmetic and keys and values of 8 bits; at
float32 both are float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Handed, Record, step_through
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked

BATCH_TOKENS = 4096


class OpenVino:
    def __init__(self) -> None:
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": asked_for.THREADS}
        if asked_for.dtype() == "float32":
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        properties |= asked_for.settings()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = asked_for.IN_FLIGHT
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = asked_for.CACHE_GIB
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            asked_for.model(), scheduler_config=scheduler, device="CPU", properties=properties
        )
        self._submitted = 0
        self.facts = {
            "openvino_genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "settings": properties | {"max_num_batched_tokens": BATCH_TOKENS},
        }

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        unfinished: dict[int, Any] = {}

        def submit(index: int, asked: Asked) -> None:
            greedy = openvino_genai.GenerationConfig()
            greedy.max_new_tokens = greedy.min_new_tokens = asked.new_tokens
            greedy.ignore_eos = True
            greedy.do_sample = False
            self._submitted += 1
            prompt = openvino.Tensor(np.array([asked.prompt], dtype=np.int64))
            unfinished[index] = self._pipeline.add_request(self._submitted, prompt, greedy)

        def step() -> Iterator[Handed]:
            self._pipeline.step()
            for index, handle in list(unfinished.items()):
                tokens: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                finished = handle.get_status() == openvino_genai.GenerationStatus.FINISHED
                if finished:
                    del unfinished[index]
                if tokens or finished:
                    yield index, tokens, finished

        return step_through(requests, in_flight, submit, step)


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    engine = OpenVino()
    yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
