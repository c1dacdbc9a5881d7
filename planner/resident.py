"""A session's place on one worker: its sequence, how far that is planned, and what of it is under way.

`planned` counts positions sent to the worker, answered or not. A position that is planned and not answered is under
way; `rows` of the steps under way hold this resident: with an input of its own, or with one of another session whose
cells it shares. `outputs` of those rows will each bring a token that the driver does not know yet.
"""

from typing import TYPE_CHECKING

from microtome.planner.types import FinishReason, Input, Kind, Position, SequenceId, SessionId, WorkerId

if TYPE_CHECKING:
    from microtome.planner.generations import Generation
    from microtome.planner.prefix import Place
    from microtome.planner.sessions import Session


class Resident:
    """Mutable; changed by its `WorkerPlan` and by `Control`."""

    __slots__ = (
        "ended",
        "feedback_at",
        "generation",
        "inserted",
        "leaving",
        "outputs",
        "place",
        "planned",
        "prompt_from",
        "rows",
        "sequence",
        "session",
        "undone",
        "worker",
    )

    def __init__(self, session: "Session", worker: WorkerId, sequence: SequenceId, length: int) -> None:
        self.session = session
        self.worker = worker
        self.sequence = sequence
        self.generation: Generation | None = None  # None: idle, or what is under way is void
        self.planned = length
        self.rows = 0
        self.outputs = 0
        self.undone = 0  # tokens of the transcript that wait in the scheduler to be prefilled
        self.feedback_at: int | None = None  # the device holds the token of this position, sampled last
        self.leaving = False  # gives up its cells once nothing of it is under way
        self.ended: FinishReason | None = None  # how the generation under way ended, if it did
        self.inserted = 0  # positions [0, inserted) are in the prefix cache
        self.place: Place | None = None  # while it prefills: where in the prefix tree `planned` is, if it is there
        self.prompt_from: int | None = None  # what it shares from here on counts as cached; None: nothing does

    def next_inputs(self, max_prefill_tokens: int, max_rows: int) -> list[Input]:
        """What the scheduler should hold for this resident, from `planned` on. Empty when nothing is to be run.

        `max_rows`: logits rows that a step can have; an input has one per token where the prompt is asked about.
        """
        g = self.generation
        if g is None or self.leaving:
            return []
        if self.feedback_at == self.planned:
            if g.delivered + self.outputs >= g.limit:
                return []
            return [decode_input(self.session.id, self.planned)]
        start, end = self.planned, len(self.session.transcript)
        inputs = []
        asked_from = g.runs_from
        while start < end:
            width = min(max_prefill_tokens, end - start)
            if asked_from is not None:
                width = min(width, asked_from - start if start < asked_from else max_rows)
            inputs.append(
                Input(
                    session=self.session.id,
                    kind=Kind.PREFILL,
                    start=Position(start),
                    width=width,
                    wants_output=start + width == end,
                )
            )
            start += width
        return inputs


def decode_input(session: SessionId, start: int) -> Input:
    """The token sampled last, at `start`."""
    return Input(session=session, kind=Kind.DECODE, start=Position(start), width=1, wants_output=True)
