"""Valid plans for one worker, one after the other: a prompt of one sequence, then its decodes."""

from dataclasses import dataclass, field

from microtome.planner.types import (
    Annotate,
    Capability,
    InputFlag,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SequenceOp,
    SetSampling,
    StepNumber,
    StepPlan,
)

DECODE = InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK


@dataclass
class PlanScript:
    """`next()` is a plan that the worker accepts if it has run those before. Cells are taken in order, none twice."""

    capability: Capability
    prompt: tuple[int, ...] = (11, 12, 13)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    note: bytes = b""
    step: int = 0
    length: int = 0

    def next(self) -> StepPlan:
        self.step += 1
        first = self.length == 0
        sequence = SequenceId(1)
        ops: tuple[SequenceOp, ...] = ()
        if first:
            ops = (OpenSequence(sequence), SetSampling(sequence, self.sampling), Annotate(sequence, self.note))
        width = len(self.prompt) if first else 1
        start, self.length = self.length, self.length + width
        return StepPlan(
            incarnation=self.capability.incarnation,
            step=StepNumber(self.step),
            table_digest=self.capability.table.digest,
            ops=ops,
            sequences=[sequence],
            starts=[start],
            widths=[width],
            flags=[int(InputFlag.WANTS_OUTPUT if first else DECODE)],
            cells=list(range(start, self.length)),
            tokens=list(self.prompt) if first else [],
            slice_offsets=[0],
            slice_lengths=[width],
            slice_methods=[next(i for i, m in enumerate(self.capability.table.methods) if m.max_tokens >= width)],
        )
