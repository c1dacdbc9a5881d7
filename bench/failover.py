"""What a failure costs: how soon it is seen, how long clients wait, how much is computed again.

`python -m bench.failover` serves the tests' fake model on real Ray and gRPC, and kills real processes under load: a
worker, the driver, a worker that is stopped (hung) and one that is drained; then it lets the service go to no worker at
all and times the first answer. Per kind it prints, over all rounds: time to detection, the longest gap between two
messages of each stream (median and 99th percentile), and tokens run again. Gaps are also given as a ratio to the
longest gap of the same streams before the failure. Every token that came is compared with an undisturbed run.

What a start from no worker consists of is read from the logs: until the driver asks for a worker; until its process, in
a place, begins; until it is ready; until the driver has joined it; the answer itself. `--model PATH` starts a worker of
that model there, eager, in the place of the fake one.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import grpc.aio
import ray

import microtome
from microtome.actors import cluster, ray_private
from microtome.actors.config import ServiceConfig
from microtome.actors.link import DEFAULT_EXECUTOR
from microtome.answers import ServiceStatus
from microtome.errors import MicrotomeError
from microtome.retry import Retry
from microtome.solo import percentiles
from microtome.v1 import admin_pb2, admin_pb2_grpc
from tests.support.calls import undisturbed
from tests.support.in_process import fake_config

NAME = "bench-failover"
MODEL = "fake:step_ms=10"
WORKERS, STREAMS, PROMPT_TOKENS, NEW_TOKENS = 2, 16, 64, 500
POOL = 2 * STREAMS * (PROMPT_TOKENS + NEW_TOKENS)  # so that nothing is parked
BEFORE_S, POLL_S = 1.5, 0.005
PATIENT = Retry(attempts=100, resume_attempts=100, first_s=0.02, most_s=0.2)


@dataclass
class Stream:
    """When its messages came, and which tokens."""

    prompt: list[int]
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def longest_gap_s(self, since_s: float, until_s: float = float("inf")) -> float:
        """Of the gaps that end within the time given."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max((after - before for before, after in pairs if since_s <= after <= until_s), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    detected_s: float | None  # None: nothing to detect
    before_s: list[float]  # per stream, the longest gap before the failure
    gaps_s: list[float]  # per stream, the longest gap after it
    tokens_again: int


async def read(client: microtome.AsyncClient, stream: Stream) -> None:
    async with client.generate(token_ids=stream.prompt, max_new_tokens=NEW_TOKENS, resumable=True) as generation:
        async for update in generation:
            stream.at_s.append(time.monotonic())
            stream.tokens += update.token_ids
    assert stream.tokens == undisturbed(stream.prompt, NEW_TOKENS), "a token differs"


async def state_when(client: microtome.AsyncClient, true: Callable[[ServiceStatus], bool]) -> ServiceStatus:
    while True:
        try:
            status = await client.status()
        except MicrotomeError:  # the driver is away
            status = None
        if status is not None and true(status):
            return status
        await asyncio.sleep(POLL_S)


def ready(status: ServiceStatus) -> int:
    return sum(worker.state == "ready" for worker in status.workers)


async def failure(client: microtome.AsyncClient, number: int, fail: "Fail") -> Outcome:
    """One round: streams under way, something fails, all of them end as they should."""
    await state_when(client, lambda status: ready(status) == WORKERS and not status.running)
    streams = [Stream([number % 1000, n] * (PROMPT_TOKENS // 2)) for n in range(STREAMS)]
    reading = [asyncio.create_task(read(client, stream)) for stream in streams]
    begun_s = time.monotonic()
    await asyncio.sleep(BEFORE_S)
    prefilled = (await client.status()).counters["prefilled_tokens"]
    failed_s = time.monotonic()
    detected_s, restarted = await fail(client)
    await asyncio.gather(*reading)
    now = (await client.status()).counters["prefilled_tokens"]
    settled_s = begun_s + 0.3  # prompts are run in the first steps, and are no gap
    return Outcome(
        detected_s,
        [stream.longest_gap_s(settled_s, failed_s) for stream in streams],
        [stream.longest_gap_s(failed_s) for stream in streams],
        now if restarted else now - prefilled,
    )


Fail = Callable[[microtome.AsyncClient], Coroutine[None, None, tuple[float | None, bool]]]


async def kill_worker(client: microtome.AsyncClient, how: signal.Signals = signal.SIGKILL) -> tuple[float, bool]:
    victim = next(worker for worker in (await client.status()).workers if worker.state == "ready")
    begin = time.monotonic()
    os.kill(victim.pid, how)
    await state_when(client, lambda s: any(w.name == victim.name and w.state == "lost" for w in s.workers))
    return time.monotonic() - begin, False


async def stop_worker(client: microtome.AsyncClient) -> tuple[float, bool]:
    return await kill_worker(client, signal.SIGSTOP)


async def kill_driver(client: microtome.AsyncClient) -> tuple[float, bool]:
    """Detection: until it serves again."""
    pid = await ray.get_actor(NAME, namespace=NAME).pid.remote()
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(POLL_S)
    await state_when(client, lambda status: True)
    return time.monotonic() - begin, True


async def drain_worker(client: microtome.AsyncClient) -> tuple[None, bool]:
    victim = next(worker for worker in (await client.status()).workers if worker.state == "ready")
    async with grpc.aio.insecure_channel(client.address) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        await stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker=victim.name))
    return None, False


def show(kind: str, outcomes: Sequence[Outcome]) -> None:
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    before = [gap for outcome in outcomes for gap in outcome.before_s]
    middle, high = percentiles(gaps, 50, 99)
    detected = [outcome.detected_s for outcome in outcomes if outcome.detected_s is not None]
    seen = f"seen after {1e3 * statistics.median(detected):6.0f} ms" if detected else "nothing to see     "
    print(
        f"{kind:<16} {seen}   gap {1e3 * middle:6.0f} ms median, {1e3 * high:6.0f} ms p99, "
        f"{middle / statistics.median(before):5.1f} times the longest before   "
        f"{statistics.median(o.tokens_again for o in outcomes):6.0f} tokens run again"
    )


async def failures(address: str, rounds: int) -> None:
    kinds: list[tuple[str, Fail]] = [
        ("worker killed", kill_worker),
        ("worker stopped", stop_worker),
        ("driver killed", kill_driver),
        ("worker drained", drain_worker),
    ]
    print(f"{STREAMS} streams on {WORKERS} workers, steps of 10 ms, prompts of {PROMPT_TOKENS} tokens; {rounds} rounds")
    async with microtome.AsyncClient(address, retry=PATIENT) as client:
        for kind, fail in kinds:
            show(kind, [await failure(client, number, fail) for number in range(rounds)])


PARTS = ("asked for", "placed", "loaded", "joined", "answered")


def logged_s(pid: int, words: str) -> float:
    """When the process last logged a line with these words, in seconds since 1970."""
    (log,) = ray_private.logs_folder().glob(f"worker-*-{pid}.err")
    line = [line for line in log.read_text().splitlines() if words in line][-1]
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


async def parts_of_start(client: microtome.AsyncClient, begun_s: float, ended_s: float) -> list[float]:
    """Seconds, as `PARTS` has them, of the start that ended with an answer."""
    driver = await ray.get_actor(NAME, namespace=NAME).pid.remote()
    worker = next(worker for worker in (await client.status()).workers if worker.state == "ready")
    at_s = [
        begun_s,
        logged_s(driver, f"{worker.name} is started"),
        logged_s(worker.pid, "worker starts"),
        logged_s(worker.pid, "worker ready"),
        logged_s(driver, f"{worker.name} is ready"),
        ended_s,
    ]
    return [after - before for before, after in pairwise(at_s)]


async def from_zero(address: str, rounds: int) -> None:
    """The first answer of a service without workers, and what it consists of."""
    times: list[float] = []
    warm: list[float] = []
    parts: list[list[float]] = []
    async with microtome.AsyncClient(address, retry=PATIENT) as client:
        for _ in range(rounds):
            await state_when(client, lambda status: ready(status) == 0)
            for kept in (times, warm):
                begin, begun_s = time.monotonic(), time.time()
                await client.complete(token_ids=[5, 6, 7], max_new_tokens=1)
                kept.append(time.monotonic() - begin)
                if kept is times:
                    parts.append(await parts_of_start(client, begun_s, time.time()))
    start, answer = statistics.median(times), statistics.median(warm)
    middle = ", ".join(
        f"{part} {1e3 * statistics.median(seconds):.0f}"
        for part, seconds in zip(PARTS, zip(*parts, strict=True), strict=True)
    )
    print(
        f"from no worker   first token after {1e3 * start:.0f} ms ({1e3 * min(times):.0f} to {1e3 * max(times):.0f}; "
        f"{start / answer:.0f} times a warm one): {middle} ms"
    )


def resting(model: str | None) -> ServiceConfig:
    """A service that goes to no worker."""
    settings: dict[str, object] = {
        "service__name": NAME,
        "workers__min": 0,
        "workers__max": 1,
        "workers__settle_s": 0,
        "workers__idle_s": 1.5,
    }
    if model is None:
        return fake_config(MODEL, **settings)
    settings |= {"workers__executor": DEFAULT_EXECUTOR, "runtime__methods": "eager", "runtime__kv_tokens": 2048}
    return fake_config(model, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="of the start from no worker; default: the fake one")
    parser.add_argument("--only-from-zero", action="store_true", help="nothing but the start from no worker")
    given = parser.parse_args()
    try:
        if not given.only_from_zero:
            config = fake_config(MODEL, service__name=NAME, workers__count=WORKERS, runtime__kv_tokens=POOL)
            asyncio.run(failures(cluster.up(config).address, given.rounds))
            cluster.down(NAME)
        asyncio.run(from_zero(cluster.up(resting(given.model)).address, given.rounds))
    finally:
        if ray.is_initialized():
            cluster.down(NAME)
            ray.shutdown()


if __name__ == "__main__":
    main()
