"""What one step costs on the wire: a decode plan and its result, written and read, over the number of sequences.

`python -m bench.wire` prints, per number of sequences, bytes and the median time of each direction, and the time per
sequence as a ratio to the smallest plan's of the same run. Both ends together are to stay within 500 us at 256
sequences, and writing a plan within 300 us.
"""

import statistics
import time
from collections.abc import Callable

from microtome.actors import wire
from microtome.planner.types import Incarnation, InputFlag, StepNumber, StepPlan, StepResult
from microtome.v1 import worker_pb2 as pb

ROUNDS = 300
SEQUENCES = (16, 64, 256, 1024)
WHO = Incarnation("00112233445566778899aabbccddeeff")


def decode_plan(inputs: int) -> StepPlan:
    """A decode step of so many long sequences in a pool of millions of cells, run by the widest method in turns."""
    width = min(inputs, 32)
    return StepPlan(
        incarnation=WHO,
        step=StepNumber(10**6),
        table_digest=2**62 + 1,
        sequences=list(range(inputs)),
        starts=[8000 + i for i in range(inputs)],
        widths=[1] * inputs,
        flags=[int(InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK)] * inputs,
        cells=[2_000_000 + 7 * i for i in range(inputs)],
        slice_offsets=list(range(0, inputs, width)),
        slice_lengths=[width] * (inputs // width),
        slice_methods=[5] * (inputs // width),
    )


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(
        incarnation=plan.incarnation,
        step=plan.step,
        tokens=[40_000 + i for i in range(len(plan.sequences))],
        step_us=12_345,
        idle_us=45,
        forwards=[0, 0, 0, 0, 0, len(plan.slice_offsets)],
    )


def median_us(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        started_ns = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started_ns)
    return statistics.median(times) / 1000


def main() -> None:
    print("sequences plan bytes  write us  read us result us  all us per seq.")
    first: float | None = None
    for inputs in SEQUENCES:
        plan = decode_plan(inputs)
        sent = wire.plan_to_message(plan).SerializeToString()
        answer = wire.answer_to_message(result_of(plan)).SerializeToString()
        write_us = median_us(lambda plan=plan: wire.plan_to_message(plan).SerializeToString())
        read_us = median_us(lambda sent=sent: wire.plan_from_message(pb.StepPlan.FromString(sent)))
        result_us = median_us(
            lambda plan=plan: wire.answer_to_message(result_of(plan)).SerializeToString()
        ) + median_us(lambda answer=answer: wire.answer_from_message(pb.StepResult.FromString(answer)))
        each_us = (write_us + read_us) / inputs
        first = first or each_us
        print(
            f"{inputs:>9} {len(sent):>10} {write_us:>9.1f} {read_us:>8.1f} {result_us:>9.1f} "
            f"{write_us + read_us + result_us:>7.1f} {each_us / first:>8.2f}"
        )


if __name__ == "__main__":
    main()
