"""`microtome replay`: a journal's file run again, or simulated otherwise, and what to show of it.

Needs the planner only, so the bare install has it. Every error is one sentence that names the file.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from microtome import __version__
from microtome.errors import InvalidRequest
from microtome.planner.errors import BadInput
from microtome.planner.journal import Journal, Life, read_journal
from microtome.planner.replay import ReplayReport, replay
from microtome.planner.what_if import WhatIfReport, what_if


@dataclass(frozen=True, slots=True)
class Replayed:
    """One life run again; `number` counts from 1."""

    number: int
    life: Life
    report: ReplayReport

    def __str__(self) -> str:
        wrote, runs = self.life.version, __version__
        other = self.report.difference is not None and wrote != runs
        return f"{self.report}" + (f"\n  recorded by version {wrote}, replayed by {runs}" if other else "")

    def as_dict(self) -> dict[str, object]:
        """For a JSON file."""
        difference = self.report.difference
        return {
            "life": self.number,
            "version": self.life.version,
            "began_unix_us": self.life.began_unix_us,
            "events": self.report.entries,
            "instructions": self.report.instructions,
            "raised": self.report.raised,
            "difference": None
            if difference is None
            else {
                "record": difference.record,
                "event": str(difference.event),
                "instruction": difference.at,
                "recorded": None if difference.recorded is None else str(difference.recorded),
                "replayed": None if difference.replayed is None else str(difference.replayed),
            },
        }


@contextmanager
def opened(file: Path) -> Iterator[Journal]:
    """The file's journal, whose entries are read as they are looked at: it may be larger than the memory.

    Raises `InvalidRequest` for a file that is missing or is no journal.
    """
    with ExitStack() as stack:
        try:
            source = stack.enter_context(file.open("rb"))
            data: bytes | mmap.mmap = b""
            if source.seek(0, 2):
                data = stack.enter_context(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))
            journal = read_journal(data)
        except OSError as error:
            raise InvalidRequest(f"journal {str(file)!r} cannot be read: {error.strerror or error}") from error
        except BadInput as error:
            raise InvalidRequest(f"journal {str(file)!r} cannot be read: {error}") from error
        yield journal


def unread(journal: Journal) -> str | None:
    """What of the file was left out, in a sentence; None: nothing."""
    if not journal.unread_bytes:
        return None
    cause = journal.damage or "the last record was being written"
    return f"{journal.unread_bytes} bytes at the end are left out: {cause}"


def run_again(journal: Journal, only: int | None) -> Iterator[Replayed]:
    """Each life, in order, as each is done."""
    for number, life in enumerate(journal.lives, 1):
        if only in (None, number):
            yield Replayed(number, life, replay(life, life.config))


def chosen(journal: Journal, number: int | None) -> Life:
    """That life, from 1; None: the one with the most entries, the newest of equals."""
    if number is None:
        return max(reversed(journal.lives), key=len)
    if not 1 <= number <= len(journal.lives):
        raise InvalidRequest(f"life {number} is not in 1 to {len(journal.lives)}")
    return journal.lives[number - 1]


def table(report: WhatIfReport) -> Table:
    """The figures side by side."""
    view = Table(title="what if", title_justify="left")
    view.add_column("")
    for title in ("recorded", "simulated as recorded", f"simulated: {report.asked}"):
        view.add_column(title, justify="right")
    for name, *figures in report.rows():
        view.add_row(name, *(f"{figure:,.6g}" for figure in figures))
    return view


def write_json(file: Path, value: object) -> None:
    """Raises `InvalidRequest` for a file that cannot be written."""
    try:
        file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"file {str(file)!r} cannot be written: {error.strerror or error}") from error


def run(
    file: Path,
    *,
    policy: str | None,
    workers: int | None,
    life: int | None,
    json_file: Path | None,
    console: Console,
    remarks: Console,
) -> bool:
    """All of the command. False: there is a difference, or a record is damaged."""
    with opened(file) as journal:
        sentence = unread(journal)
        if sentence is not None:
            remarks.print(f"microtome: {sentence}", soft_wrap=True, markup=False)
        one = chosen(journal, life)
        sound = journal.damage is None
        if policy is not None or workers is not None:
            figures = what_if(one, one.config, policy=policy, workers=workers)
            console.print(table(figures))
            found = figures.as_dict()
        else:
            said: list[Replayed] = []
            for replayed in run_again(journal, life):
                said.append(replayed)
                name = f"life {replayed.number}: " if len(journal.lives) > 1 else ""
                console.print(f"{name}{replayed}", soft_wrap=True, markup=False)
            sound = sound and all(replayed.report.difference is None for replayed in said)
            found = {"unread": sentence, "lives": [replayed.as_dict() for replayed in said]}
    if json_file is not None:
        write_json(json_file, found)
    return sound
