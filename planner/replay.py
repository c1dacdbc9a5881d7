"""Runs a journal's events again, and says where the instructions first differ from those written down.

The same events give the same instructions, so a difference is a change of the planner's code or of its configuration:
`replay` finds the first one. What another policy would have cost is another question: see `what_if`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import Event, Instruction
from microtome.planner.journal import Entry, encode_instructions


@dataclass(frozen=True, slots=True)
class Difference:
    """Entry `number` (from 0) is the first that was answered otherwise; `at` is the first instruction that differs."""

    number: int
    event: Event
    at: int
    recorded: Instruction | None  # None: there were fewer
    replayed: Instruction | None

    def __str__(self) -> str:
        event = type(self.event).__name__
        return (
            f"entry {self.number} ({event} at {self.event.at_us} us), instruction {self.at}:\n"
            f"  recorded: {self.recorded}\n  replayed: {self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    entries: int  # replayed, the one that differs included
    instructions: int  # of those that agree
    difference: Difference | None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.entries} events replayed, {self.instructions} instructions, no difference"
        return f"first difference: {self.difference}"


def replay(entries: Iterable[Entry], config: PlannerConfig) -> ReplayReport:
    """Stops at the first difference: what follows it would be compared with another state."""
    control = Control(config)
    count = instructions = 0
    for number, entry in enumerate(entries):
        answered = control.handle(entry.event)
        count = number + 1
        if encode_instructions(answered) != entry.answers:
            return ReplayReport(count, instructions, _first_difference(number, entry, answered))
        instructions += len(answered)
    return ReplayReport(count, instructions, None)


def _first_difference(number: int, entry: Entry, answered: list[Instruction]) -> Difference:
    recorded = entry.instructions
    at = 0
    for one, other in zip(recorded, answered, strict=False):
        if encode_instructions([one]) != encode_instructions([other]):
            break
        at += 1
    return Difference(
        number,
        entry.event,
        at,
        recorded[at] if at < len(recorded) else None,
        answered[at] if at < len(answered) else None,
    )
