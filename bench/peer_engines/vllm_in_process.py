"""vLLM's engine on the CPU, stepped in this process: neither its server nor its second process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.records import Handed, Record, step_through
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked


class Vllm:
    def __init__(self) -> None:
        settings = {"max_num_seqs": asked_for.IN_FLIGHT, "max_model_len": asked_for.LONGEST, **asked_for.settings()}
        self._engine = vllm.LLM(asked_for.model(), dtype=asked_for.dtype(), **settings).llm_engine
        self._submitted = 0
        self.facts = {"vllm": vllm.__version__, "torch": torch.__version__, "settings": settings}

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        names: dict[str, int] = {}

        def submit(index: int, asked: Asked) -> None:
            self._submitted += 1  # a name is never used twice
            names[str(self._submitted)] = index
            greedy = vllm.SamplingParams(
                temperature=0,
                max_tokens=asked.new_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(str(self._submitted), {"prompt_token_ids": list(asked.prompt)}, greedy)

        def step() -> Iterator[Handed]:
            for output in self._engine.step():
                # Some versions put an ending of their own behind the name they are given.
                name = output.request_id.partition("-")[0]
                yield names[name], list(output.outputs[0].token_ids), output.finished

        return step_through(requests, in_flight, submit, step)


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    engine = Vllm()
    yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
