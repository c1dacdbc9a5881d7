"""A client process with eight long streams under way, to be killed: `python -m tests.support.doomed_client host:port`.

It says so on standard output once the first tokens have come, and never ends by itself.
"""

import asyncio
import sys

import microtome
from microtome.retry import Retry

STREAMS, TOKENS = 8, 500


async def read(client: microtome.AsyncClient, number: int, begun: asyncio.Event) -> None:
    while True:
        async with client.generate(token_ids=[number + 1] * 20, max_new_tokens=TOKENS, ignore_eos=True) as generation:
            async for _ in generation:
                begun.set()


async def main(address: str) -> None:
    begun = asyncio.Event()
    patient = Retry(attempts=60, resume_attempts=60, most_s=1.0)
    async with microtome.AsyncClient(address, retry=patient) as client, asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(read(client, number, begun))
        await begun.wait()
        print("READY", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
