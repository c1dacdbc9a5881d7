"""Drives an executor by hand: keeps lengths and cells, builds the plans, hands back tokens.

Cells are handed out by a permutation of the pool, so that neighbours in a sequence are strangers in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from microtome.planner.protocols import Executor
from microtome.planner.slicing import plan_ladder
from microtome.planner.types import (
    Cell,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    InputFlag,
    OpenSequence,
    Position,
    SamplingParams,
    SequenceId,
    SequenceOp,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TruncateSequence,
)

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Work:
    """An input by hand. `tokens` None: feed back the token sampled last.

    `asks`: how likely each token behind one of these is; `next_token`: the one behind the last, if no output is wanted.
    """

    sequence: int
    tokens: Sequence[int] | None = None
    wants_output: bool = True
    asks: bool = False
    next_token: int = 0


class StepDriver:
    def __init__(self, executor: Executor, *, seed: int = 0, scattered: bool = True) -> None:
        self.executor = executor
        self.capability = executor.describe()
        self.cells: dict[int, list[int]] = {}
        self._free = list(range(self.capability.usable_cells))
        if scattered:
            Random(seed).shuffle(self._free)
        self._ops: list[SequenceOp] = []
        self._step = 0
        self.last: StepResult | None = None

    def open(self, sampling: SamplingParams = GREEDY, cells: Sequence[int] = ()) -> int:
        sequence = self._new()
        self.cells[sequence] = list(cells)
        self._ops += [OpenSequence(SequenceId(sequence), tuple(cells)), SetSampling(SequenceId(sequence), sampling)]
        return sequence

    def open_without_policy(self) -> int:
        sequence = self._new()
        self.cells[sequence] = []
        self._ops.append(OpenSequence(SequenceId(sequence)))
        return sequence

    def clone(self, source: int, upto: int, sampling: SamplingParams = GREEDY) -> int:
        sequence = self._new()
        self.cells[sequence] = self.cells[source][:upto]
        self._ops += [
            CloneSequence(SequenceId(sequence), SequenceId(source), Position(upto)),
            SetSampling(SequenceId(sequence), sampling),
        ]
        return sequence

    def extend(self, sequence: int, cells: Sequence[int]) -> None:
        """`cells` hold the sequence's next tokens, or are written by the next step before it reads them."""
        self.cells[sequence] += cells
        self._ops.append(ExtendSequence(SequenceId(sequence), tuple(map(Cell, cells))))

    def next_cells(self, count: int) -> list[int]:
        """Those that the first `count` tokens of the next step will lie in."""
        return self._free[: -count - 1 : -1]

    def truncate(self, sequence: int, length: int) -> None:
        """The cells given up are not used again: a sequence that still needs one would be found out."""
        del self.cells[sequence][length:]
        self._ops.append(TruncateSequence(SequenceId(sequence), Position(length)))

    def drop(self, sequence: int) -> None:
        del self.cells[sequence]
        self._ops.append(DropSequence(SequenceId(sequence)))

    def plan(self, *work: Work) -> StepPlan:
        """The plan of the next step, without running it or counting it as run."""
        starts, widths, flags, cells, tokens = [], [], [], [], []
        free, lengths = list(self._free), {sequence: len(held) for sequence, held in self.cells.items()}
        for item in work:
            width = 1 if item.tokens is None else len(item.tokens)
            starts.append(lengths[item.sequence])
            widths.append(width)
            feedback = InputFlag.FEEDBACK if item.tokens is None else InputFlag(0)
            wants_output = InputFlag.WANTS_OUTPUT if item.wants_output else InputFlag(0)
            asks = InputFlag.PROMPT_LOGPROBS if item.asks else InputFlag(0)
            flags.append(int(feedback | wants_output | asks))
            cells += [free.pop() for _ in range(width)]
            tokens += item.tokens or []
            lengths[item.sequence] += width
        forwards = plan_ladder(len(cells), self.capability.table)
        return StepPlan(
            incarnation=self.capability.incarnation,
            step=StepNumber(self._step + 1),
            table_digest=self.capability.table.digest,
            ops=tuple(self._ops),
            sequences=[item.sequence for item in work],
            starts=starts,
            widths=widths,
            flags=flags,
            cells=cells,
            tokens=tokens,
            slice_offsets=[forward.offset for forward in forwards],
            slice_lengths=[forward.length for forward in forwards],
            slice_methods=[forward.method for forward in forwards],
            next_tokens=[item.next_token for item in work if item.asks and not item.wants_output],
        )

    def step(self, *work: Work) -> list[int]:
        """Run one step; the tokens of the inputs that want one."""
        plan = self.plan(*work)
        self.last = self.executor.run(plan)
        self._ops.clear()
        self._step += 1
        offset = 0
        for item, width in zip(work, plan.widths, strict=True):
            self.cells[item.sequence] += plan.cells[offset : offset + width]
            offset += width
        del self._free[len(self._free) - offset :]
        return list(self.last.tokens)

    def generate(self, sequence: int, prompt: Sequence[int], count: int, *, chunk: int | None = None) -> list[int]:
        """`count` tokens after `prompt`, which goes in chunks of at most `chunk` tokens, one a step."""
        chunk = chunk or len(prompt)
        for begin in range(0, len(prompt), chunk):
            last = begin + chunk >= len(prompt)
            produced = self.step(Work(sequence, prompt[begin : begin + chunk], wants_output=last))
        while len(produced) < count:
            produced += self.step(Work(sequence))
        return produced

    def _new(self) -> int:
        return next(number for number in range(self.capability.max_sequences) if number not in self.cells)
