"""What the planner costs: `Control.handle(StepDone)` against sessions that decode, and against what must not matter.

`python -m bench.planner [--json FILE] [--quick]` prints, in microseconds of this thread's processor time (median, and
the middle half):

- a step's event with 1, 64, 256 and 1024 decoding sessions (aim at 256: 1000 us at most);
- the same at 64 sessions, while one of these grows and the others stay: cells in the pool, sessions resident but idle,
  tokens of each history, generations in line. Each is quoted as a ratio to its smallest value, measured in turns in
  this run; the slope must be flat;
- radix tree look-ups and insertions a second, and a look-up's cost against the tokens that match;
- what writing the journal adds to a step, as a share of the step's own planning and of a step of 10 ms.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from microtome.planner.cells import CellTable
from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import (
    Event,
    Instruction,
    OpenSession,
    RunStep,
    SessionAnswer,
    StepDone,
    Submit,
    WorkerJoined,
)
from microtome.planner.journal import Encoder
from microtome.planner.prefix import PrefixCache
from microtome.planner.types import (
    Capability,
    Cell,
    GenerationId,
    GenerationOptions,
    Incarnation,
    InputFlag,
    MethodSpec,
    MethodTable,
    SessionId,
    StepPlan,
    StepResult,
    WorkerId,
)

WORKER = WorkerId("w")
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
VOCAB = 50_000
STEP_US = 10_000  # what a step takes on a device, for the journal's share


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds per event: the median and the quartiles."""

    median_us: float
    low_us: float
    high_us: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Sample":
        low, median, high = statistics.quantiles([s * 1e6 for s in seconds], n=4)
        return Sample(round(median, 1), round(low, 1), round(high, 1))

    def __str__(self) -> str:
        return f"{self.median_us:8.0f} us  ({self.low_us:.0f} to {self.high_us:.0f})"


class Rig:
    """A planner with one worker that answers at once; `sessions` generations decode for ever."""

    def __init__(
        self,
        sessions: int,
        *,
        usable_cells: int = 2_000_000,
        idle: int = 0,
        history: int = 32,
        waiting: int = 0,
        limit: int = 10_000,
        policy: str = "decode-first",
    ) -> None:
        self.plans: list[StepPlan] = []
        self.answers: list[SessionAnswer] = []
        self.control = Control(
            PlannerConfig(
                policy=policy,
                max_batch_tokens=4096,
                max_decodes=2048,
                max_waiting=100_000,
                max_waiting_tokens=2**40,
                max_sessions=100_000,
                headroom_tokens=0,
            )
        )
        capability = Capability(
            incarnation=Incarnation("0" * 32),
            device="cpu",
            device_uuid="",
            model="none",
            fingerprint="none",
            vocab_size=VOCAB,
            usable_cells=usable_cells,
            scratch_cell=Cell(usable_cells),
            max_sequences=sessions + idle,
            max_session_tokens=min(usable_cells, 1_000_000),
            windows=(0,),
            table=MethodTable(
                tuple(MethodSpec(name=f"forward_{n}", max_tokens=n, static=True, cost_us=500 + n) for n in WIDTHS)
            ),
            max_output_rows=4096,
        )
        self._names = 0
        self.handle(WorkerJoined(at_us=0, worker=WORKER, capability=capability))
        for _ in range(idle):
            self.handle(OpenSession(at_us=0, ticket=0))
            self._submit((1, 2), 1, self.answers[-1].session)
            while self.plans:
                self.step()
        for number in range(sessions):
            self._submit([(number * 31 + k) % VOCAB for k in range(history)], limit, None)
            while len(self.control._models.served.line):
                self.step()
        for number in range(waiting):
            self._submit((number % VOCAB,), 100, None)
        while any(len(plan.tokens) for plan in self.plans):
            self.step()

    def _submit(self, prompt: Sequence[int], limit: int, session: SessionId | None) -> None:
        self._names += 1
        options = GenerationOptions(max_new_tokens=limit, stop_token_ids=(1, 2))
        name = GenerationId(f"{self._names:016x}")
        self.handle(Submit(at_us=0, generation=name, prompt=tuple(prompt), options=options, session=session))

    def handle(self, event: Event) -> list[Instruction]:
        instructions = self.control.handle(event)
        self.take(instructions)
        return instructions

    def take(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, RunStep):
                self.plans.append(instruction.plan)
            elif isinstance(instruction, SessionAnswer):
                self.answers.append(instruction)

    def answered(self) -> StepDone:
        """The oldest plan's result."""
        plan = self.plans.pop(0)
        outputs = sum(1 for flags in plan.flags if flags & InputFlag.WANTS_OUTPUT)
        tokens = tuple(range(100, 100 + outputs))
        result = StepResult(incarnation=plan.incarnation, step=plan.step, tokens=tokens, step_us=STEP_US)
        return StepDone(at_us=0, worker=WORKER, result=result)

    def step(self) -> None:
        self.handle(self.answered())

    def timed_step(self) -> float:
        event = self.answered()
        begin = time.thread_time()
        instructions = self.control.handle(event)
        took = time.thread_time() - begin
        self.take(instructions)
        return took

    def timed_entry(self, journal: Encoder, event: Event) -> tuple[float, float, int]:
        """Seconds in the planner and in the journal, and the entry's bytes."""
        begin = time.thread_time()
        instructions = self.control.handle(event)
        planned = time.thread_time()
        entry = journal.entry(event, instructions)
        written = time.thread_time()
        self.take(instructions)
        return planned - begin, written - planned, len(entry)


def in_turns(rigs: Sequence[Rig], rounds: int) -> list[Sample]:
    """Steps of each rig, one after the other, so that a change of the machine's speed meets all."""
    gc.collect()
    gc.freeze()
    times: list[list[float]] = [[] for _ in rigs]
    for rig in rigs:
        for _ in range(20):
            rig.timed_step()
    for _ in range(rounds):
        for rig, sample in zip(rigs, times, strict=True):
            sample.append(rig.timed_step())
    return [Sample.of(sample) for sample in times]


def report(title: str, names: Sequence[object], samples: Sequence[Sample]) -> dict[str, object]:
    print(f"\n{title}")
    first = samples[0].median_us
    rows: dict[str, object] = {}
    for name, sample in zip(names, samples, strict=True):
        print(f"  {name!s:>10}  {sample}   x {sample.median_us / first:.2f}")
        rows[str(name)] = {**asdict(sample), "ratio": round(sample.median_us / first, 3)}
    return rows


def sweep(title: str, values: Sequence[int], make: Callable[[int], Rig], rounds: int) -> dict[str, object]:
    return report(title, values, in_turns([make(value) for value in values], rounds))


def prefix_tree(rounds: int) -> dict[str, int]:
    """Look-ups and insertions of prompts that share half of their tokens with others."""
    rng = Random(1)
    table = CellTable(4_000_000, 4096)
    cache = PrefixCache(table)
    heads = [[rng.randrange(VOCAB) for _ in range(256)] for _ in range(20)]
    inserted = looked_up = 0.0
    prompts = []
    for _ in range(rounds):
        prompt = rng.choice(heads) + [rng.randrange(VOCAB) for _ in range(256)]
        prompts.append(prompt)
        shared = cache.match(("k",), prompt)
        sequence = table.open(shared)
        table.commit(table.plan([(sequence, len(shared), len(prompt) - len(shared))]))
        cells = table.cells(sequence)
        begin = time.thread_time()
        cache.insert(("k",), prompt, cells)
        inserted += time.thread_time() - begin
        table.remove(sequence)
    for prompt in prompts:
        begin = time.thread_time()
        cache.match(("k",), prompt)
        looked_up += time.thread_time() - begin
    figures = {"lookups_per_s": round(rounds / looked_up), "inserts_per_s": round(rounds / inserted)}
    print(
        "\nradix tree, prompts of 512 tokens: {lookups_per_s:,} look-ups/s, {inserts_per_s:,} insertions/s".format(
            **figures
        )
    )
    return figures


def journal(rounds: int) -> dict[str, object]:
    rig, encoder = Rig(256), Encoder()
    gc.collect()
    gc.freeze()
    samples = [rig.timed_entry(encoder, rig.answered()) for _ in range(rounds)][20:]
    planned = statistics.median(s[0] for s in samples) * 1e6
    written = statistics.median(s[1] for s in samples) * 1e6
    size = samples[-1][2]
    share = written / planned
    print(
        f"\njournal, 256 sessions: {written:.0f} us and {size} bytes a step; "
        f"{share:.1%} of planning it, {written / STEP_US:.2%} of a step of {STEP_US // 1000} ms"
    )
    coming = journal_with_coming_and_going(rounds)
    return {
        "us": round(written, 1),
        "bytes": size,
        "of_planning": round(share, 4),
        "of_step": round(written / STEP_US, 5),
        "of_planning_with_coming_and_going": round(coming, 4),
    }


def journal_with_coming_and_going(rounds: int) -> float:
    """The journal's share of planning while generations end and as many begin: about 2 of 256 with each step."""
    output, prompt = 128, 128
    rig, encoder = Rig(256, limit=output), Encoder()
    for number, generation in enumerate(rig.control._generations.values()):
        generation.limit = generation.delivered + 4 + number // 2  # as if they had begun one after the other
    gc.collect()
    gc.freeze()
    planned = written = 0.0
    names = size = 0

    def take_in(event: Event) -> None:
        nonlocal planned, written, size
        one, other, length = rig.timed_entry(encoder, event)
        planned, written, size = planned + one, written + other, size + length

    for _ in range(rounds):
        take_in(rig.answered())
        for _ in range(256 - len(rig.control._generations)):
            names += 1
            options = GenerationOptions(max_new_tokens=output, stop_token_ids=(1, 2))
            tokens = tuple((names * 37 + k) % VOCAB for k in range(prompt))
            take_in(Submit(at_us=0, generation=GenerationId(f"n{names:015x}"), prompt=tokens, options=options))
    print(
        f"the same with {names / rounds:.1f} generations that come and go in each step: "
        f"{written / planned:.1%} of planning, {size / rounds:.0f} bytes"
    )
    return written / planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller extremes")
    given = parser.parse_args()
    rounds = 60 if given.quick else 300
    top = 10 if given.quick else 100
    figures = {
        "sessions": sweep("decoding sessions", (1, 64, 256, 1024), Rig, rounds),
        "policies": report(
            "policies, 256 sessions",
            ("decode-first", "fair-priority"),
            in_turns([Rig(256), Rig(256, policy="fair-priority")], rounds),
        ),
        "pool": sweep("cells in the pool", (40_000, 400_000, 40_000 * top), lambda n: Rig(64, usable_cells=n), rounds),
        "resident": sweep("idle sessions resident", (0, 10 * top, 40 * top), lambda n: Rig(64, idle=n), rounds),
        "history": sweep("tokens of each history", (32, 320, 32 * top), lambda n: Rig(64, history=n), rounds),
        "waiting": sweep("generations in line", (0, 10 * top, 100 * top), lambda n: Rig(64, waiting=n), rounds),
        "prefix": prefix_tree(10 * rounds),
        "journal": journal(rounds),
    }
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
