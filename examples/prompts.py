"""What both example jobs do with a service once they have its address: many prompts, few at a time, one line each."""

import asyncio
import json
import sys
from collections.abc import Iterator

import microtome

AT_ONCE = 64
TOPICS = ("a river", "a clock", "the moon", "bread", "a bridge", "winter", "a lighthouse", "rust", "tea", "a map")


def prompts(count: int) -> Iterator[str]:
    for number in range(count):
        yield f"Write one sentence about {TOPICS[number % len(TOPICS)]}, the {number + 1}th of its kind."


async def answer_all(address: str, count: int, max_new_tokens: int) -> int:
    """Print a JSON line per prompt, in order of completion; return how many failed."""
    gate, failed = asyncio.Semaphore(AT_ONCE), 0

    async with microtome.AsyncClient(address) as client:
        await client.wait_ready(timeout_s=60)

        async def answer(number: int, prompt: str) -> None:
            nonlocal failed
            async with gate:
                line: dict[str, object] = {"number": number, "prompt": prompt}
                try:
                    pieces, usage = [], None
                    messages = [{"role": "user", "content": prompt}]
                    async for update in client.generate(messages=messages, max_new_tokens=max_new_tokens):
                        pieces.append(update.text)
                        usage = update.usage or usage
                    line |= {"text": "".join(pieces), "output_tokens": usage.output_tokens if usage else 0}
                except microtome.MicrotomeError as error:
                    failed += 1
                    line |= {"error": str(error)}
                print(json.dumps(line, ensure_ascii=False), flush=True)

        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts(count)):
                group.create_task(answer(number, prompt))
    print(f"{count - failed} answered, {failed} failed", file=sys.stderr)
    return failed
