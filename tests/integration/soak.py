"""Minutes of load while everything that can go is killed or stopped at random: `python -m tests.integration.soak`.

32 clients ask a service of three workers on real Ray and gRPC, and compare every token with an undisturbed run. For a
third of the time, and a bit, workers, driver and client processes are killed and workers are stopped for a while; then
the same without the driver, which is watched for growth meanwhile; then there is load alone, and the workers are. It
ends with nothing running, nothing waiting and no cell in use, or it fails with its seed and its story.

`--model toy` runs a tiny Llama on torch instead of the tests' fake executor, on two workers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import ray

import microtome
from microtome.actors.link import DEFAULT_EXECUTOR
from microtome.errors import DeadlineExceeded, MicrotomeError, Unavailable
from microtome.retry import Retry
from tests.support.calls import undisturbed
from tests.support.growth import Growth
from tests.support.on_ray import up
from tests.support.toy_model import VOCABULARY, toy_directory

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 32
SHARES = (0.35, 0.35, 0.3)  # of the time: chaos, chaos with the driver spared, load alone
LONGEST_CHAIN = Retry(attempts=60, resume_attempts=60, most_s=1.0)
SETTLED_S = 60.0
LONGEST_STOP_S = 2.0
ACTS = {"worker killed": 5, "driver killed": 3, "worker stopped": 2, "client killed": 2}  # how often each


@dataclass(frozen=True, slots=True)
class Recipe:
    """One call and its answer."""

    prompt: list[int]
    seed: int
    temperature: float
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What is served, and how hard it is treated."""

    model: str
    settings: dict[str, object]
    workers: int
    pause_s: tuple[float, float]  # between two acts


FAKE = Stage(model="fake:step_ms=2", settings={}, workers=3, pause_s=(0.5, 3.0))


def toy(folder: str) -> Stage:
    """Greedy and float32: the argmax margin exceeds rounding, so tokens are exact. A worker starts in seconds."""
    settings: dict[str, object] = {
        "workers__executor": DEFAULT_EXECUTOR,
        "runtime__kv_tokens": 8192,
        "runtime__max_step_tokens": 128,
        "runtime__threads": 1,
        "runtime__methods": "eager",
    }
    return Stage(model=str(toy_directory(folder)), settings=settings, workers=2, pause_s=(5.0, 12.0))


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


class Menu:
    """What clients ask for: anything at all of the fake model, whose answers can be computed; of another one some calls
    whose answers it gave before anything was done to it."""

    def __init__(self, known: Sequence[Recipe] = ()) -> None:
        self._known = known

    def pick(self, random: Random) -> Recipe:
        if self._known:
            return random.choice(self._known)
        prompt = [random.randrange(1000) for _ in range(random.randint(1, 60))]
        length, seed, temperature = random.randint(1, 120), random.getrandbits(64), random.choice([0.0, 1.0])
        return Recipe(prompt, seed, temperature, undisturbed(prompt, length, seed, temperature))


async def first_answers(client: microtome.AsyncClient, random: Random) -> Menu:
    async def ask() -> Recipe:
        prompt = [random.randrange(3, VOCABULARY) for _ in range(random.randint(1, 60))]
        answer = await client.complete(token_ids=prompt, max_new_tokens=random.randint(1, 120), ignore_eos=True)
        return Recipe(prompt, 0, 0.0, list(answer.token_ids))

    return Menu(await asyncio.gather(*(ask() for _ in range(48))))


async def one_client(client: microtome.AsyncClient, menu: Menu, random: Random, story: Story, end_s: float) -> None:
    while time.monotonic() < end_s:
        recipe, hangs_up = menu.pick(random), random.random() < 0.15
        expected, tokens = recipe.tokens, list[int]()
        async with client.generate(
            token_ids=recipe.prompt,
            max_new_tokens=len(expected),
            seed=recipe.seed,
            temperature=recipe.temperature,
            ignore_eos=True,
            resumable=True,
        ) as generation:
            async for update in generation:
                assert update.offset == len(tokens), f"{update.offset} after {len(tokens)} tokens\n{story}"
                tokens += update.token_ids
                assert tokens == expected[: len(tokens)], f"a token differs\n{story}"
                if hangs_up and len(tokens) > len(expected) // 2:
                    break
            else:
                assert tokens == expected, f"{len(tokens)} of {len(expected)} tokens came\n{story}"
        story.counts["hung up" if len(tokens) < len(expected) else "complete"] += 1
        story.counts["tokens compared"] += len(tokens)


async def kill_client(address: str, random: Random, story: Story) -> None:
    """A process of its own, with eight streams under way, is gone without a word."""
    words = (sys.executable, "-m", "tests.support.doomed_client", address)
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            await process.stdout.readline()
            await asyncio.sleep(random.uniform(0, 0.5))
        story.tell("client killed", process.pid)
    except TimeoutError:  # the service is away for longer than it waits
        pass
    finally:
        process.kill()
        await process.wait()


async def chaos(
    client: microtome.AsyncClient, name: str, stage: Stage, random: Random, story: Story, spared_s: float, end_s: float
) -> None:
    """Until `end_s`; from `spared_s` on the driver is spared."""
    while time.monotonic() < end_s:
        await asyncio.sleep(random.uniform(*stage.pause_s))
        acts = {act: weight for act, weight in ACTS.items() if act != "driver killed" or time.monotonic() < spared_s}
        act = random.choices(list(acts), list(acts.values()))[0]
        if act == "client killed":
            await kill_client(client.address, random, story)
        elif act == "driver killed":
            driver = ray.get_actor(name, namespace=name)
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                pid = await asyncio.wait_for(driver.pid.remote(), 10)
                story.tell(act, pid)
                os.kill(pid, signal.SIGKILL)
        else:
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
                        await asyncio.sleep(random.uniform(0.05, LONGEST_STOP_S))
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


async def settle(client: microtome.AsyncClient, stage: Stage, story: Story) -> None:
    """Nothing may be left: not of calls that ended, nor of clients that are gone."""
    settled_s = time.monotonic() + SETTLED_S
    while True:
        status = await client.status()
        ready = sum(worker.state == "ready" for worker in status.workers)
        used = sum(worker.cells_used for worker in status.workers)
        if (status.running, status.waiting, used, ready) == (0, 0, 0, stage.workers):
            return
        assert time.monotonic() < settled_s, f"{status}\n{story}"
        await asyncio.sleep(0.05)


async def soak(name: str, seconds: float, seed: int, stage: Stage = FAKE) -> tuple[Story, Growth]:
    """On the Ray this process is connected to, or else one of its own. Raises `AssertionError` with the story."""
    story, growth, random = Story(seed), Growth(), Random(seed)
    # Ended streams are kept for a short while only, so that what is judged has reached its size.
    endpoint = up(name, stage.model, workers__count=stage.workers, service__retain_s=5, **stage.settings)
    async with microtome.AsyncClient(endpoint.address, retry=LONGEST_CHAIN) as client:
        menu = Menu() if stage is FAKE else await first_answers(client, random)
        begun_s = time.monotonic()
        spared_s = begun_s + SHARES[0] * seconds
        calm_s, end_s = spared_s + SHARES[1] * seconds, begun_s + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(one_client(client, menu, Random(random.getrandbits(64)), story, end_s))
            tasks.create_task(chaos(client, name, stage, random, story, spared_s, calm_s))
            tasks.create_task(watch(client, name, growth, end_s))
        await settle(client, stage, story)
    return story, growth


def report(story: Story, growth: Growth, *, model: str, seconds: float) -> dict[str, Any]:
    """What is to be kept of a run: plain values. Processes: those that lived for a quarter of it."""
    return {
        "model": model,
        "seconds": round(seconds),
        "seed": story.seed,
        "counts": dict(sorted(story.counts.items())),
        "wrong, lost or doubled tokens": 0,  # one would have ended the run
        "processes": growth.figures(at_least_s=seconds / 4),
    }


def main() -> int:
    from microtome.actors import cluster

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--model", choices=("fake", "toy"), default="fake")
    parser.add_argument("--report", type=Path, help="where to write the figures, as JSON")
    given = parser.parse_args()
    name, seconds = "soak", 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        try:
            stage = FAKE if given.model == "fake" else toy(folder)
            story, growth = asyncio.run(soak(name, seconds, given.seed, stage))
        finally:
            if ray.is_initialized():
                cluster.down(name)
                ray.shutdown()
    text = json.dumps(report(story, growth, model=given.model, seconds=seconds), indent=2)
    if given.report is not None:
        given.report.write_text(text + "\n", encoding="utf-8")
    print(text)
    complaints = growth.flat(at_least_s=seconds / 4)
    print("\n".join(complaints) if complaints else "nothing grew")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
