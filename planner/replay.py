"""Runs a journal's events again, and says where the instructions first differ from those written down.

The same events give the same instructions, so a difference is a change of the planner's code or of its configuration:
`replay` finds the first one. What another policy would have cost is another question: see `what_if`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import Event, Instruction
from microtome.planner.journal import Encoder, Entry
from microtome.planner.records import to_json


@dataclass(frozen=True, slots=True)
class Difference:
    """The entry of this `record` is the first that was answered otherwise; `at` is the first instruction that differs.

    What is neither an instruction nor None is what the planner raised instead of answering.
    """

    record: int
    event: Event
    at: int
    recorded: Instruction | str | None  # None: there were fewer
    replayed: Instruction | str | None

    def __str__(self) -> str:
        event = type(self.event).__name__
        return (
            f"record {self.record} ({event} at {self.event.at_us} us), instruction {self.at}:\n"
            f"  recorded: {_side(self.recorded)}\n  replayed: {_side(self.replayed)}"
        )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    entries: int  # replayed, the one that differs included
    instructions: int  # of those that agree
    difference: Difference | None
    raised: str | None = None  # how the life ended, then and now: the planner's own defect

    def __str__(self) -> str:
        if self.difference is not None:
            return f"first difference: {self.difference}"
        end = f"; the planner broke on the last one, as recorded: {self.raised}" if self.raised else ""
        return f"{self.entries} events replayed, {self.instructions} instructions, no difference{end}"


def replay(entries: Iterable[Entry], config: PlannerConfig) -> ReplayReport:
    """Run one life again. Stops at the first difference: what follows it would be compared with another state."""
    control, encoder = Control(config), Encoder()
    count = instructions = 0
    for entry in entries:
        count += 1
        raised: str | None = None
        answered: list[Instruction] = []
        try:
            answered = control.handle(entry.event)
        except Exception as error:  # what breaks it is what the journal may have been kept for
            raised = described(error)
        if raised is not None or entry.raised is not None:
            difference = None if raised == entry.raised else _broken(entry, answered, raised)
            return ReplayReport(count, instructions, difference, raised if difference is None else None)
        # Equal bytes mean equal instructions. Others may: a later encoder need not choose the same bytes.
        if encoder.body(entry.event, answered) != entry.body:
            difference = _first_difference(entry, answered)
            if difference is not None:
                return ReplayReport(count, instructions, difference)
        instructions += len(answered)
    return ReplayReport(count, instructions, None)


def described(error: BaseException) -> str:
    """An exception in one line, as a journal keeps it."""
    return f"{type(error).__name__}: {error}"


def _first_difference(entry: Entry, answered: list[Instruction]) -> Difference | None:
    recorded = entry.instructions
    for at in range(max(len(recorded), len(answered))):
        one = recorded[at] if at < len(recorded) else None
        other = answered[at] if at < len(answered) else None
        if to_json(one) != to_json(other):
            return Difference(entry.record, entry.event, at, one, other)
    return None


def _broken(entry: Entry, answered: list[Instruction], raised: str | None) -> Difference:
    recorded: Instruction | str | None = entry.raised or next(iter(entry.instructions), None)
    return Difference(entry.record, entry.event, 0, recorded, raised or next(iter(answered), None))


def _side(what: Instruction | str | None) -> str:
    if what is None:
        return "nothing more"
    return f"the planner raised {what}" if isinstance(what, str) else str(what)
