"""The journal's file: lives follow each other, and nothing that a disk does reaches the service."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from microtome.actors import journal_file
from microtome.actors.journal_file import JournalFile
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.events import LookUpSession, RunStep, Tick
from microtome.planner.journal import Encoder, read_journal
from microtome.planner.types import Incarnation, SessionId, StepNumber, StepPlan, WorkerId

CONFIG = PlannerConfig(policy="fair")
MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.journal"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name == "journal"] == []


def begun(path: Path, max_bytes: int = MIB) -> JournalFile:
    journal = JournalFile(path, max_bytes)
    journal.open(CONFIG, "1.0")
    return journal


def event(n: int) -> LookUpSession:
    """One whose record is written at once, and as long as all of its kind."""
    return LookUpSession(at_us=n, ticket=1, session=SessionId(2))


SIZE = len(Encoder().entry(event(0), []))


def live(path: Path, events: int, max_bytes: int = MIB) -> JournalFile:
    """A life of so many events, to its end."""
    journal = begun(path, max_bytes)
    for n in range(events):
        journal.add([(event(n), [])])
    journal.close()
    return journal


def lives_of(path: Path) -> list[int]:
    return [len(life) for life in read_journal(path.read_bytes()).lives]


def test_each_life_is_appended_with_its_header(path: Path) -> None:
    first = live(path, 3)
    live(path, 2)
    journal = read_journal(path.read_bytes())
    assert [len(life) for life in journal.lives] == [3, 2]
    assert [life.config for life in journal.lives] == [CONFIG, CONFIG]
    assert journal.lives[1].began_unix_us >= journal.lives[0].began_unix_us > 1.7e15
    assert journal.lives[0].version == "1.0"
    assert 0 < first.written_bytes < path.stat().st_size


def test_only_the_owner_may_read_what_callers_asked(path: Path) -> None:
    live(path, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_crash_tore_is_cut_off_before_the_next_life(path: Path) -> None:
    live(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    live(path, 4)
    assert lives_of(path) == [2, 4]
    assert read_journal(path.read_bytes()).unread_bytes == 0


def test_a_damaged_file_is_moved_away_and_not_lost(path: Path) -> None:
    live(path, 3)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    live(path, 1)
    assert lives_of(path) == [1]
    assert path.with_name("chat.journal.1").read_bytes() == data


def test_a_file_that_is_half_full_makes_room_for_the_next_life(path: Path) -> None:
    frames = MIB // 2 // SIZE
    live(path, frames)
    assert path.stat().st_size > MIB // 2
    live(path, 2)
    assert lives_of(path) == [2]
    assert lives_of(path.with_name("chat.journal.1")) == [frames]


def test_recording_ends_at_the_bound_with_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live(path, 0)
    header = path.stat().st_size
    path.unlink()
    with caplog.at_level(logging.WARNING):
        journal = live(path, 200, header + 30 * SIZE + 5)
    assert not journal.recording
    assert path.stat().st_size == header + 30 * SIZE
    assert lives_of(path) == [30]
    assert read_journal(path.read_bytes()).unread_bytes == 0
    warning = f"it has reached journal.max_bytes {header + 30 * SIZE + 5}"
    assert caplog.messages == [f"journal {path}: nothing more of this life is recorded: {warning}"]


def test_a_full_disk_ends_the_recording_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [4000]

    def write(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[: room[0]])  # as much as fits, as a disk does
        room[0] -= count
        return count

    monkeypatch.setattr(journal_file.os, "write", write)
    with caplog.at_level(logging.WARNING):
        journal = begun(path)
        journal.add([(event(n), []) for n in range(50)])
        journal.close()
        journal.add([(event(1), [])])
    assert not journal.recording
    assert caplog.messages == [
        f"journal {path}: nothing more of this life is recorded: No space left on device",
    ]
    monkeypatch.undo()
    assert path.stat().st_size == journal.written_bytes == 4000
    live(path, 1)
    assert lives_of(path)[-1] == 1


def test_a_disk_that_does_not_keep_up_is_not_waited_for(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        entered.set()
        gate.wait()
        return real(fd, data)

    monkeypatch.setattr(journal_file.os, "write", write)
    monkeypatch.setattr(journal_file, "MAX_PENDING_TOKENS", 5000)
    plan = StepPlan(incarnation=Incarnation("0" * 32), step=StepNumber(1), table_digest=1, cells=range(99))
    journal = begun(path)
    assert entered.wait(10)
    with caplog.at_level(logging.WARNING):
        for n in range(1000):
            journal.add([(event(n), [RunStep(worker=WorkerId("w"), plan=plan)])])
    assert not journal.recording
    assert "the disk does not keep up: 5100 tokens of plans and prompts wait for it" in caplog.text
    gate.set()
    journal.close()
    assert lives_of(path) == [51]  # without a gap


def test_an_event_without_a_record_ends_the_recording_only(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = begun(path)
    journal.add([(event(1), [])])
    journal.add([(object(), [])])  # type: ignore[list-item]
    journal.add([(event(2), [])])
    journal.close()
    assert not journal.recording
    assert lives_of(path) == [1]
    assert "a record cannot be made" in caplog.text


def test_ticks_that_led_to_nothing_are_not_lost_at_the_end(path: Path) -> None:
    journal = begun(path)
    ticks = [Tick(at_us=n) for n in (5, 100_007, 200_100)]
    journal.add([(tick, []) for tick in ticks])
    journal.close()
    (life,) = read_journal(path.read_bytes()).lives
    assert [entry.event for entry in life] == ticks


def test_what_waits_is_encoded_in_turns_and_stays_in_order(path: Path) -> None:
    journal = begun(path)
    calls = [(event(n), []) for n in range(5 * journal_file.ENCODED_AT_ONCE + 3)]
    journal.add(calls[:40])
    journal.add(calls[40:])
    journal.close()
    (life,) = read_journal(path.read_bytes()).lives
    assert [entry.event for entry in life] == [one for one, _ in calls]


def test_what_broke_the_planner_is_the_last_record(path: Path) -> None:
    journal = begun(path)
    journal.add([(Tick(at_us=1), [])])
    journal.broke(Tick(at_us=2), "KeyError: 7")
    (life,) = read_journal(path.read_bytes()).lives
    assert [(entry.event.at_us, entry.raised) for entry in life] == [(1, None), (2, "KeyError: 7")]


def test_a_file_of_something_else_is_left_alone(path: Path) -> None:
    path.write_text("my thesis, chapter one")
    with pytest.raises(BadConfig, match=r"chat\.journal' is a file of something else: it is left alone"):
        begun(path)
    assert path.read_text() == "my thesis, chapter one"


def test_a_file_that_another_service_writes_is_refused(path: Path) -> None:
    journal = begun(path)
    with pytest.raises(BadConfig, match="is being written by another service"):
        begun(path)
    journal.close()
    live(path, 1)
    assert lives_of(path) == [0, 1]


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot be written: No such file or directory"):
        begun(tmp_path / "missing" / "x.journal")
