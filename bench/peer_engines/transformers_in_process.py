"""transformers' own continuous batching: its manager's thread takes requests and puts answers in a queue."""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Record
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked

NO_TOKEN = -1  # ends nothing
WAIT_S = 5.0  # for one answer, before a look whether the manager is still there


class Transformers:
    def __init__(self) -> None:
        torch.set_num_threads(asked_for.THREADS)
        model = AutoModelForCausalLM.from_pretrained(
            asked_for.model(), dtype=getattr(torch, asked_for.dtype()), attn_implementation="sdpa"
        ).eval()
        settings = {
            "page_size": 32,
            "num_blocks": 1024,
            "max_batch_tokens": 1024,
            "max_requests_per_batch": asked_for.IN_FLIGHT,
            "use_cuda_graph": False,
            "use_async_batching": False,
            "default_compile_level": 0,
            **asked_for.settings(),
        }
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=2),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
        )
        self._manager.start()
        self._submitted = 0
        self.facts = {"transformers": transformers.__version__, "torch": torch.__version__, "settings": settings}

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        waiting, names, records = deque(requests), dict[str, int](), list[Record]()
        while waiting or names:
            while waiting and len(names) < in_flight:
                asked = waiting.popleft()
                self._submitted += 1
                name = str(self._submitted)
                names[name] = len(records)
                records.append(Record(time.perf_counter()))
                self._manager.add_request(
                    list(asked.prompt),
                    request_id=name,
                    max_new_tokens=asked.new_tokens,
                    eos_token_id=NO_TOKEN,
                    record_timestamps=True,
                )
            output = self._manager.get_result(timeout=WAIT_S)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager's thread has ended")
            elif output.error:
                raise RuntimeError(output.error)
            elif output.is_finished():
                record = records[names.pop(output.request_id)]
                record.times_s = list(output.timestamps)
                record.counts = [1] * len(record.times_s)
                record.tokens = list(output.generated_tokens)
        return records

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    with torch.no_grad():
        engine = Transformers()
        yield engine.facts, lambda asked: turn(engine, asked)
        engine.close()


if __name__ == "__main__":
    answer_lines(started)
    os._exit(0)  # its threads are not waited for
