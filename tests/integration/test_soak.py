"""Clients under load while workers, the driver and clients are killed and stopped at random: no token differs.

`make soak` runs ten minutes; every test run has a short one. A failing run prints its seed and its story.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import psutil
import pytest
import ray

import microtome
from microtome.errors import DeadlineExceeded, MicrotomeError, Unavailable
from microtome.retry import Retry
from tests.support.calls import undisturbed
from tests.support.growth import Growth
from tests.support.on_ray import up

CLIENTS, WORKERS = 32, 3
LONGEST_CHAIN = Retry(attempts=60, resume_attempts=60, most_s=1.0)
SETTLED_S = 60.0
STOP_S = 2.0


@dataclass
class Story:
    """What was done to the service, and what came of it."""

    seed: int
    begun_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def tell(self, what: str, who: object = "") -> None:
        self.counts[what] += 1
        self.lines.append(f"{time.monotonic() - self.begun_s:7.2f} s  {what} {who}")

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {dict(self.counts)}", *self.lines[-60:]])


async def one_client(client: microtome.AsyncClient, random: Random, story: Story, end_s: float) -> None:
    while time.monotonic() < end_s:
        prompt = [random.randrange(1000) for _ in range(random.randint(1, 60))]
        length, seed, hangs_up = random.randint(1, 120), random.getrandbits(64), random.random() < 0.15
        temperature = random.choice([0.0, 1.0])
        expected = undisturbed(prompt, length, seed, temperature)
        tokens: list[int] = []
        async with client.generate(
            token_ids=prompt, max_new_tokens=length, seed=seed, temperature=temperature, resumable=True
        ) as generation:
            async for update in generation:
                assert update.offset == len(tokens), f"{update.offset} after {len(tokens)} tokens\n{story}"
                tokens += update.token_ids
                assert tokens == expected[: len(tokens)], f"a token differs\n{story}"
                if hangs_up and len(tokens) > length // 2:
                    break
            else:
                assert tokens == expected, f"{len(tokens)} of {length} tokens came\n{story}"
        story.counts["hung up" if len(tokens) < length else "complete"] += 1


async def chaos(client: microtome.AsyncClient, name: str, random: Random, story: Story, end_s: float) -> None:
    while time.monotonic() < end_s:
        await asyncio.sleep(random.uniform(0.5, 3.0))
        act = random.choices(["worker killed", "driver killed", "worker stopped"], [5, 3, 2])[0]
        if act == "driver killed":
            driver = ray.get_actor(name, namespace=name)
            with contextlib.suppress(ray.exceptions.RayError):
                pid = await asyncio.wait_for(driver.pid.remote(), 10)
                story.tell(act, pid)
                os.kill(pid, signal.SIGKILL)
            continue
        with contextlib.suppress(Unavailable, DeadlineExceeded):
            ready = [worker for worker in (await client.status()).workers if worker.state == "ready"]
            if not ready:
                continue
            victim = random.choice(ready)
            story.tell(act, f"{victim.name} {victim.pid}")
            with contextlib.suppress(ProcessLookupError):
                if act == "worker killed":
                    os.kill(victim.pid, signal.SIGKILL)
                else:
                    os.kill(victim.pid, signal.SIGSTOP)
                    await asyncio.sleep(random.uniform(0.05, STOP_S))
                    os.kill(victim.pid, signal.SIGCONT)


async def watch(client: microtome.AsyncClient, name: str, growth: Growth, end_s: float) -> None:
    while time.monotonic() < end_s:
        await asyncio.sleep(1.0)
        with contextlib.suppress(ray.exceptions.RayError, MicrotomeError, TimeoutError):
            driver = ray.get_actor(name, namespace=name)
            growth.look("driver", await asyncio.wait_for(driver.pid.remote(), 2))
            for worker in (await client.status()).workers:
                if worker.state == "ready":
                    growth.look(worker.name, worker.pid)


async def soak(name: str, seconds: float, seed: int, *, calm_s: float) -> tuple[Story, Growth]:
    """`seconds` of chaos, then `calm_s` of load alone, in which nothing may grow."""
    story, growth, random = Story(seed), Growth(), Random(seed)
    # Ended streams are kept for a short while only, so that what is judged has reached its size.
    endpoint = up(name, "fake:step_ms=2", workers__count=WORKERS, service__retain_s=5)
    chaos_end_s = time.monotonic() + seconds
    end_s = chaos_end_s + calm_s
    async with microtome.AsyncClient(endpoint.address, retry=LONGEST_CHAIN) as client:
        await asyncio.gather(
            *(one_client(client, Random(random.getrandbits(64)), story, end_s) for _ in range(CLIENTS)),
            chaos(client, name, random, story, chaos_end_s),
            watch(client, name, growth, end_s),
        )
        settled_s = time.monotonic() + SETTLED_S
        while True:
            status = await client.status()
            ready = sum(worker.state == "ready" for worker in status.workers)
            used = sum(worker.cells_used for worker in status.workers)
            if (status.running, status.waiting, used, ready) == (0, 0, 0, WORKERS):
                return story, growth
            assert time.monotonic() < settled_s, f"{status}\n{story}"
            await asyncio.sleep(0.05)


async def test_a_short_storm_costs_no_token(service_name: str) -> None:
    story, _ = await soak(service_name, 15.0, seed=time.time_ns() % 2**32, calm_s=1.0)
    print(story)
    assert story.counts["complete"] > CLIENTS
    assert story.counts["worker killed"] + story.counts["driver killed"] + story.counts["worker stopped"] >= 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_ten_minutes_of_it_cost_no_token_and_nothing_grows(service_name: str) -> None:
    seconds = float(os.environ.get("MICROTOME_SOAK_S", "600"))
    story, growth = await soak(service_name, seconds * 0.6, seed=time.time_ns() % 2**32, calm_s=seconds * 0.4)
    print(story)
    print(growth)
    assert growth.flat(at_least_s=seconds * 0.3) == [], f"{growth}\n{story}"
    assert psutil.pid_exists(os.getpid())
