"""A load through an asynchronous call per request, so many at a time: for engines behind a socket. Standard library."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bench.peer_engines.records import Record
from bench.peer_engines.workload import Asked


async def closed_loop(
    requests: Sequence[Asked], in_flight: int, answer: Callable[[Asked], Awaitable[Record]]
) -> list[Record]:
    """A request is sent when fewer than `in_flight` are unanswered; so no wait at this end counts as the engine's."""
    gate = asyncio.Semaphore(in_flight)

    async def one(asked: Asked) -> Record:
        async with gate:
            return await answer(asked)

    return list(await asyncio.gather(*(one(asked) for asked in requests)))
