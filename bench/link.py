"""What the step stream costs a worker: how long it is idle between steps while the next plan is on its way.

`python -m bench.link` starts a worker process with the tests' fake executor, drives it over gRPC with `plan_ahead`
steps in flight, and prints for each step time: idle time between steps (median, 99th percentile) and as a share of
step time, and steps per second as a ratio to the same plans made and run in this process, one after the other. Rounds
of both are interleaved. The aim: at most 2 % idle at steps of 5 ms and more, with `plan_ahead` 2. A ratio above 1 is
the making of plans, which the link hides behind steps.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator

from microtome.actors.link import LinkSettings, WorkerSpec
from microtome.actors.step_runner import StepRunner
from microtome.actors.worker_client import WorkerClient
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.events import StepDone, StepFailed, WorkerGone
from microtome.planner.types import (
    Capability,
    InputFlag,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    WorkerId,
)
from tests.support.fake_executor import build_executor
from tests.support.worker_child import worker_child

STEPS, ROUNDS = 60, 3
SECRET = "00" * 32


def plans(capability: Capability, sequences: int) -> Iterator[StepPlan]:
    """Prompts of one token each, then decode steps of all sequences, for ever."""
    step = 0
    while True:
        first = step == 0
        base, step = step, step + 1
        width = capability.table.methods[5].max_tokens
        yield StepPlan(
            incarnation=capability.incarnation,
            step=StepNumber(step),
            table_digest=capability.table.digest,
            ops=tuple(
                op
                for n in range(sequences if first else 0)
                for op in (OpenSequence(SequenceId(n)), SetSampling(SequenceId(n), SamplingParams()))
            ),
            sequences=list(range(sequences)),
            starts=[base] * sequences,
            widths=[1] * sequences,
            flags=[int(InputFlag.WANTS_OUTPUT) | (0 if first else int(InputFlag.FEEDBACK))] * sequences,
            cells=list(range(base * sequences, step * sequences)),
            tokens=[1] * sequences if first else [],
            slice_offsets=list(range(0, sequences, width)),
            slice_lengths=[min(width, sequences - at) for at in range(0, sequences, width)],
            slice_methods=[5] * len(range(0, sequences, width)),
        )


def options(sequences: int, step_ms: float) -> RuntimeOptions:
    cells = sequences * (STEPS + 2)
    return RuntimeOptions(model=f"fake:step_ms={step_ms}", kv_tokens=max(cells, 512), max_sequences=max(sequences, 1))


async def over_the_link(sequences: int, step_ms: float, plan_ahead: int) -> tuple[float, list[StepResult]]:
    """Seconds for `STEPS` steps, and their results."""
    spec = WorkerSpec(
        worker=WorkerId("worker-0"),
        secret=SECRET,
        runtime=options(sequences, step_ms),
        executor="tests.support.fake_executor:build_executor",
    )
    results: list[StepResult] = []
    done = asyncio.Event()

    def post(event: StepDone | StepFailed | WorkerGone) -> None:
        assert isinstance(event, StepDone), event
        results.append(event.result)
        if len(results) == STEPS:
            done.set()
        elif event.result.step + plan_ahead <= STEPS:
            client.send(next(source))

    with worker_child(spec) as child:
        client = WorkerClient(
            child.endpoint,
            SECRET,
            link=LinkSettings(),
            hang_timeout_s=30,
            post=post,
            now_us=lambda: time.monotonic_ns() // 1000,
        )
        source = plans((await client.connect()).capability, sequences)
        started_s = time.perf_counter()
        for _ in range(plan_ahead):
            client.send(next(source))
        await done.wait()
        took_s = time.perf_counter() - started_s
        await client.close()
    return took_s, results


def in_process(sequences: int, step_ms: float) -> float:
    """Seconds for the same steps without a link."""
    runner = StepRunner(build_executor(options(sequences, step_ms)), 1)
    source = plans(runner.capability, sequences)
    started_s = time.perf_counter()
    for _ in range(STEPS):
        assert isinstance(runner.run(next(source)), StepResult)
    return time.perf_counter() - started_s


async def main() -> None:
    print("sequences step ms ahead  idle us (99 %)  idle share  steps/s ratio (min to max)")
    for sequences, step_ms, plan_ahead in (
        (1, 5, 1),
        (1, 5, 2),
        (256, 5, 2),
        (256, 10, 1),
        (256, 10, 2),
        (256, 10, 3),
    ):
        idle_us: list[int] = []
        step_us: list[int] = []
        ratios: list[float] = []
        for _ in range(ROUNDS):
            alone_s = in_process(sequences, step_ms)
            took_s, results = await over_the_link(sequences, step_ms, plan_ahead)
            ratios.append(alone_s / took_s)
            idle_us += [result.idle_us for result in results[2:]]  # the first waits for nobody
            step_us += [result.step_us for result in results[2:]]
        print(
            f"{sequences:>9} {step_ms:>7} {plan_ahead:>5} {statistics.median(idle_us):>8.0f} "
            f"({statistics.quantiles(idle_us, n=100)[98]:>5.0f}) {sum(idle_us) / sum(step_us):>10.2%} "
            f"{statistics.median(ratios):>14.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    asyncio.run(main())
