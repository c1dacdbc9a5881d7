"""llama.cpp's server, and streaming clients of it in this process. Standard library only.

The precision is that of its model file. Its slots share no prefix with each other.
"""

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


class LlamaServer:
    def __init__(self, port: int, facts: Mapping[str, Any]) -> None:
        self._port = port
        self.facts = facts

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        return asyncio.run(closed_loop(requests, in_flight, self._answer))

    async def _answer(self, asked: Asked) -> Record:
        body = {
            "prompt": asked.prompt,
            "n_predict": asked.new_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        record = Record(time.perf_counter())
        async for event in events(HOST, self._port, "/completion", body):
            now_s = time.perf_counter()
            if event.get("stop"):
                # Tokens of a character that never got whole are counted here and told nowhere else.
                record.note(now_s, event["tokens_predicted"] - sum(record.counts))
            else:
                tokens = event.get("tokens") or ()
                record.note(now_s, len(tokens), tokens)
        return record


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    port = free_port()
    flags = {
        "-m": asked_for.model(),
        "-t": asked_for.THREADS,
        "-tb": asked_for.THREADS,
        "-np": asked_for.IN_FLIGHT,
        "-c": asked_for.IN_FLIGHT * asked_for.LONGEST,
        "-b": 2048,
        "-ub": 512,
        "--host": HOST,
        "--port": port,
        **asked_for.settings(),
    }
    command = [environ["BENCH_SERVER"], "--no-webui", *(str(part) for pair in flags.items() for part in pair)]
    with server(command, port, {}):
        told = first_line([environ["BENCH_SERVER"], "--version"])
        engine = LlamaServer(port, {"llama.cpp": told.removeprefix("version: "), "settings": flags})
        yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
