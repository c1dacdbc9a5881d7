"""What Ray and gRPC cost: a service's throughput ÷ that of the same executor under the same planner in one process.

`python -m bench.overhead` serves a model on one worker through Ray and gRPC, and runs the same requests (prompts,
sampling, concurrency) through `microtome.solo`, which has neither, in turns on the same machine. It prints, per round
and as medians, output tokens per second of both and their ratio; the worker's idle share between steps; and what the
driver spends per step on events and on text. The aim: a ratio of 0.97 or more at steps of 10 ms and more.

`--step-ms N` takes the tests' fake executor with steps of that length instead of a model. The clients run in a process
of their own, as they would elsewhere; on a machine with few cores that costs the service, not the other side.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import grpc
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from microtome import solo
from microtome.actors.config import ServiceConfig
from microtome.actors.worker import load_executor_factory
from microtome.local import configuration, running
from microtome.planner.control import Control
from microtome.planner.types import GenerationOptions, SamplingParams
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc

FAKE_EXECUTOR = "tests.support.fake_executor:build_executor"
METRICS_PORT = 50151
READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """The same for both sides."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    concurrency: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.new_tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one round of the service."""

    tokens_per_s: float
    idle_share: float  # of the worker's time, between steps
    step_ms: float
    driver_us: float  # per step, on events
    text_us: float  # per step, on another thread


def make_load(arguments: argparse.Namespace, vocab_size: int) -> Load:
    random = Random(0)
    prompts = tuple(
        tuple(random.randrange(vocab_size) for _ in range(arguments.prompt_tokens)) for _ in range(arguments.requests)
    )
    return Load(prompts, arguments.new_tokens, arguments.concurrency)


# --- the service ---


async def _drive(address: str, load: Load) -> float:
    gate = asyncio.Semaphore(load.concurrency)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = rpc.GenerationStub(channel)

        async def one(prompt: tuple[int, ...]) -> None:
            async with gate:
                asked = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=prompt), max_new_tokens=load.new_tokens, ignore_eos=True
                )
                tokens = 0
                async for response in stub.Generate(asked):
                    tokens += len(response.token_ids)
                assert tokens == load.new_tokens, f"{tokens} tokens came, {load.new_tokens} were asked for"

        begin = time.perf_counter()
        await asyncio.gather(*(one(prompt) for prompt in load.prompts))
        return time.perf_counter() - begin


def _client(address: str, load: Load, begin: Any, took: Any) -> None:
    """A process of its own: one round for each time it is told to."""
    while begin.get():
        took.put(asyncio.run(_drive(address, load)))


@contextmanager
def client(address: str, load: Load) -> Iterator[Any]:
    """Something that runs the load once and says how many seconds it took."""
    spawn = multiprocessing.get_context("spawn")
    begin, took = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=_client, args=(address, load, begin, took), daemon=True)
    process.start()

    def once() -> float:
        begin.put(True)
        return float(took.get())

    try:
        yield once
    finally:
        begin.put(False)
        process.join()


def totals() -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=READ_TIMEOUT_S) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


def service_round(once: Any, load: Load) -> Cost:
    before = totals()
    seconds = once()
    after = totals()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    steps = max(1.0, grown["microtome_steps_total"])
    busy, idle = grown["microtome_step_seconds_total"], grown["microtome_idle_seconds_total"]
    return Cost(
        tokens_per_s=load.tokens / seconds,
        idle_share=idle / (busy + idle) if busy + idle else 0.0,
        step_ms=1e3 * busy / steps,
        driver_us=1e6 * grown["microtome_driver_seconds_total"] / steps,
        text_us=1e6 * grown["microtome_text_seconds_total"] / steps,
    )


# --- one process ---


def solo_round(executor: Any, control: Control, load: Load) -> float:
    """Output tokens per second."""
    requests = [
        solo.Request(
            prompt=prompt,
            options=GenerationOptions(
                max_new_tokens=load.new_tokens, sampling=SamplingParams(prompt_tokens=len(prompt))
            ),
        )
        for prompt in load.prompts
    ]
    begin = time.perf_counter()
    report = solo.run(executor, control, requests, concurrency=load.concurrency)
    seconds = time.perf_counter() - begin
    assert all(len(answer.tokens) == load.new_tokens for answer in report.answers)
    return load.tokens / seconds


# --- both ---


def configured(arguments: argparse.Namespace) -> ServiceConfig:
    settings: dict[str, object] = {
        "service.name": "bench-overhead",
        "service.port": 0,
        "service.metrics_port": METRICS_PORT,
        "planner.prefix_cache": False,  # rounds repeat their prompts
        "runtime.kv_tokens": arguments.kv_tokens,
        "runtime.threads": arguments.threads,
    }
    if arguments.step_ms is not None:
        model = f"fake:step_ms={arguments.step_ms}"
        settings |= {"model": model, "runtime.model": model, "workers.executor": FAKE_EXECUTOR}
    else:
        settings["model"] = arguments.model
    return configuration(settings)


def show(rounds: Sequence[Cost], alone: Sequence[float]) -> None:
    ratios = [cost.tokens_per_s / own for cost, own in zip(rounds, alone, strict=True)]
    for number, (cost, own, ratio) in enumerate(zip(rounds, alone, ratios, strict=True), 1):
        print(
            f"round {number}: service {cost.tokens_per_s:8.1f} tok/s   one process {own:8.1f} tok/s   "
            f"ratio {ratio:.3f}   step {cost.step_ms:.2f} ms   idle {100 * cost.idle_share:.2f} %"
        )
    print(f"ratio: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"worker idle between steps: median {100 * statistics.median(c.idle_share for c in rounds):.2f} %")
    print(
        f"per step of {statistics.median(c.step_ms for c in rounds):.2f} ms: driver "
        f"{statistics.median(c.driver_us for c in rounds):.0f} us on events, "
        f"{statistics.median(c.text_us for c in rounds):.0f} us on text"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--step-ms", type=float, help="the tests' fake executor, with steps of this length")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides")
    arguments = parser.parse_args()

    config = configured(arguments)
    executor = load_executor_factory(config.workers.executor)(config.runtime)
    control = Control(config.planner)
    load = make_load(arguments, executor.describe().vocab_size)
    rounds: list[Cost] = []
    alone: list[float] = []
    with running(config) as endpoint, client(endpoint.address, load) as once:
        warm = SimpleNamespace(service=once(), solo=solo_round(executor, control, load))
        print(f"warm-up: service {warm.service:.1f} s, one process {load.tokens / warm.solo:.1f} s")
        for number in range(arguments.rounds):
            if number % 2:  # in turns, so that a drift of the machine meets both
                alone.append(solo_round(executor, control, load))
                rounds.append(service_round(once, load))
            else:
                rounds.append(service_round(once, load))
                alone.append(solo_round(executor, control, load))
    show(rounds, alone)


if __name__ == "__main__":
    main()
