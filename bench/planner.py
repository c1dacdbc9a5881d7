"""What the planner costs: `Control.handle(StepDone)` against sessions that decode, and against what must not matter.

`python -m bench.planner [--json FILE] [--quick]` prints, in microseconds of this thread's processor time (median, and
the middle half):

- a step's event with 1, 64, 256 and 1024 decoding sessions (aim at 256: 1000 us at most);
- the same at 64 sessions, while one of these grows and the others stay: cells in the pool, sessions resident but idle,
  tokens of each history, generations in line. Each is quoted as a ratio to its smallest value, measured in turns in
  this run; the slope must be flat;
- radix tree look-ups and insertions a second, and a look-up's cost against the tokens that match;
- what keeping a journal adds to a step, at rest and while generations come and go (about 2 of 256 with each step), as a
  share of planning the same steps and of a step of 10 ms. `loop`: handing calls to the journal's thread. `encoding`:
  what that thread encodes, ten steps at once, as when steps take 10 ms; these two are what a step pays. `thread`: all
  its processor time with steps 10 ms apart, waking, writing and syncing included. `inline`: each call encoded by
  itself, as it would be on the loop.
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
from tempfile import TemporaryDirectory

from microtome.actors.journal_file import WRITE_EVERY_S, JournalFile
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
STEPS_AT_ONCE = round(WRITE_EVERY_S * 1e6 / STEP_US)  # that the journal's thread finds


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


Share = tuple[float, float]  # microseconds a step, and as a share of the same steps' planning


class Journaled:
    """A rig of 256 sessions whose calls are recorded. `coming`: about 2 generations end and begin with each step."""

    def __init__(self, coming: bool) -> None:
        self.coming = coming
        self.rig = Rig(256, limit=128 if coming else 10_000)
        self.planned = self.kept = 0.0  # seconds of processor time
        self.began = self.rounds = 0  # generations; steps
        if coming:
            for number, generation in enumerate(self.rig.control._generations.values()):
                generation.limit = generation.delivered + 4 + number // 2  # as if they had begun one after the other

    def share(self, seconds: float) -> Share:
        return seconds / self.rounds * 1e6, seconds / self.planned

    def step(self, keep: Callable[[Event, Sequence[Instruction]], object]) -> None:
        """An answer, and a prompt of 128 tokens for each generation that ended with it."""
        self.rounds += 1
        self.call(self.rig.answered(), keep)
        for _ in range(256 - len(self.rig.control._generations) if self.coming else 0):
            self.began += 1
            options = GenerationOptions(max_new_tokens=128, stop_token_ids=(1, 2))
            tokens = tuple((self.began * 37 + k) % VOCAB for k in range(128))
            name = GenerationId(f"n{self.began:015x}")
            self.call(Submit(at_us=0, generation=name, prompt=tokens, options=options), keep)

    def call(self, event: Event, keep: Callable[[Event, Sequence[Instruction]], object]) -> None:
        begin = time.thread_time()
        instructions = self.rig.control.handle(event)
        planned = time.thread_time()
        keep(event, instructions)
        self.kept += time.thread_time() - planned
        self.planned += planned - begin
        self.rig.take(instructions)


def journal(rounds: int, coming: bool) -> tuple[dict[str, Share], float]:
    """What keeping a journal costs by each way of looking at it, and the bytes a step writes."""
    gc.collect()
    gc.freeze()
    shares: dict[str, Share] = {}

    inline, encoder = Journaled(coming), Encoder()
    for _ in range(rounds):
        inline.step(encoder.entry)
    shares["inline"] = inline.share(inline.kept)

    batched, encoder = Journaled(coming), Encoder()
    calls: list[tuple[Event, Sequence[Instruction]]] = []
    encoding = 0.0
    for number in range(rounds):
        batched.step(lambda event, instructions: calls.append((event, instructions)))
        if number % STEPS_AT_ONCE == STEPS_AT_ONCE - 1:
            begin = time.thread_time()
            for event, instructions in calls:
                encoder.entry(event, instructions)
            encoding += time.thread_time() - begin
            calls.clear()
    shares["encoding"] = batched.share(encoding)

    paced = Journaled(coming)
    with TemporaryDirectory() as folder:
        file = JournalFile(Path(folder) / "journal", 2**30)
        file.open(PlannerConfig(), "")
        time.sleep(2 * WRITE_EVERY_S)
        clock = time.pthread_getcpuclockid(file._thread.ident or 0)
        before, header = time.clock_gettime(clock), file.written_bytes
        due = time.monotonic()
        for _ in range(rounds):
            paced.step(lambda event, instructions: file.add([(event, instructions)]))
            due += STEP_US / 1e6
            time.sleep(max(0.0, due - time.monotonic()))
        time.sleep(2 * WRITE_EVERY_S)
        thread, size = time.clock_gettime(clock) - before, file.written_bytes - header
        file.close()
    shares["loop"], shares["thread"] = paced.share(paced.kept), paced.share(thread)
    return shares, size / rounds


def journal_report(rounds: int, repeats: int) -> dict[str, object]:
    """Both regimes in turns; of each figure the median, and the least and most of its share of planning."""
    seen: dict[bool, list[tuple[dict[str, Share], float]]] = {False: [], True: []}
    for _ in range(repeats):
        for coming, runs in seen.items():
            runs.append(journal(rounds, coming))
    figures: dict[str, object] = {}
    for coming, runs in seen.items():
        title = "while generations come and go" if coming else "at rest"
        size = round(statistics.median(written for _, written in runs))
        print(f"\njournal, 256 sessions {title}: {size} bytes a step")
        rows: dict[str, object] = {"bytes": size}
        for name in ("loop", "encoding", "thread", "inline"):
            us = statistics.median(shares[name][0] for shares, _ in runs)
            of = sorted(shares[name][1] for shares, _ in runs)
            share = statistics.median(of)
            print(
                f"  {name:>8} {us:6.1f} us: {share:.1%} of planning ({of[0]:.1%} to {of[-1]:.1%}), "
                f"{us / STEP_US:.2%} of a step of {STEP_US // 1000} ms"
            )
            rows[name] = {"us": round(us, 1), "of_planning": round(share, 4), "of_step": round(us / STEP_US, 5)}
        figures[title] = rows
    return figures


def write(file: Path | None, figures: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--journal", action="store_true", help="only what a journal costs")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller extremes")
    given = parser.parse_args()
    rounds = 60 if given.quick else 300
    top = 10 if given.quick else 100
    if given.journal:
        figures: dict[str, object] = {"journal": journal_report(rounds, 2 if given.quick else 5)}
        write(given.json, figures)
        return
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
        "journal": journal_report(rounds, 2 if given.quick else 5),
    }
    write(given.json, figures)


if __name__ == "__main__":
    main()
