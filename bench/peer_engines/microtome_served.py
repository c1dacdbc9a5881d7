"""Microtome's whole service: Ray, a driver and one worker of their own; streaming clients over gRPC in this process."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc.aio
import ray

from bench.peer_engines.closed_loop import closed_loop
from bench.peer_engines.microtome_in_process import microtome_settings
from bench.peer_engines.records import Record
from bench.peer_engines.turns import Reply, answer_lines, turn
from bench.peer_engines.workload import Asked
from microtome.local import configuration, running
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc


class Served:
    def __init__(self, address: str, facts: Mapping[str, Any]) -> None:
        self._address = address
        self.facts = facts

    def run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        return asyncio.run(self._run(requests, in_flight))

    async def _run(self, requests: Sequence[Asked], in_flight: int) -> list[Record]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            await channel.channel_ready()
            stub: Any = rpc.GenerationStub(channel)

            async def answer(asked: Asked) -> Record:
                ids = pb.TokenIds(ids=asked.prompt)
                request = pb.GenerateRequest(token_ids=ids, max_new_tokens=asked.new_tokens, ignore_eos=True)
                record = Record(time.perf_counter())
                async for response in stub.Generate(request):
                    record.note(time.perf_counter(), len(response.token_ids), response.token_ids)
                return record

            return await closed_loop(requests, in_flight, answer)


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    settings = {"service.name": "bench-peers", "service.port": 0, **microtome_settings()}
    with running(configuration(settings)) as endpoint:
        facts = {"ray": ray.__version__, "grpc": grpc.__version__, "settings": settings}
        engine = Served(endpoint.address, facts)
        yield engine.facts, lambda asked: turn(engine, asked)


if __name__ == "__main__":
    answer_lines(started)
