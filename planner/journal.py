"""A cluster's life as bytes: every event with the instructions it led to, in order, append-only.

A journal is a sequence of records, each a frame: length, CRC-32 of what follows, then that many bytes. A header begins
the life of a driver: magic, format, the planner's configuration, and what its records' fields are. Every other record
is what calls of `Control.handle` took and gave, in bytes by `journal_format_3`: one call, or the ticks that led to
nothing and then one call. A driver that starts again appends another header.

A record is read only behind those before it, so an `Encoder`, or a life that is read, has a memory. Lives of format 2
are read by `journal_format_2`.

A crash may tear the last record: a journal ends before one that is cut short. One whose checksum is wrong ends it too,
and is named. Bytes in, bytes out: files are the caller's. Not thread-safe.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from struct import Struct
from typing import Any

from microtome.planner import journal_format_2, journal_format_3
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput
from microtome.planner.events import Event, Instruction
from microtome.planner.records import from_json, to_json

FORMAT = 3
OLDEST_FORMAT = 2  # that is still read
MAGIC = b"microtome journal\n"
IDLE_TICKS_AT_MOST = 100  # that wait to be written: ten seconds of a service at rest
_FRAME = Struct("<II")  # length of what follows, CRC-32 of it
_MAX_FRAME = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of `Control.handle`. `record` counts from 0 in its file, headers too."""

    event: Event
    instructions: list[Instruction]
    raised: str | None = None  # it raised this instead of answering: the planner's defect
    record: int = 0
    body: bytes = b""  # as it stands in the file, for exact comparison; empty for a tick that shares its record


@dataclass(frozen=True, slots=True)
class Life:
    """A driver's life. Its entries are decoded anew each time they are iterated."""

    config: PlannerConfig
    version: str  # of the package that wrote it
    began_unix_us: int  # when; the events' times are another clock's
    format: int
    first_record: int
    bodies: "_Bodies"
    fields: Any = None  # what its records' fields are, from its header

    def __iter__(self) -> Iterator[Entry]:
        reader = self._reader()
        for number, body in enumerate(self.bodies, self.first_record + 1):
            try:
                for call in reader.calls(body):
                    yield Entry(call.event, call.instructions, call.raised, number, call.body)
            except BadInput as error:
                raise BadInput(f"record {number} cannot be read: {error}") from error

    def __len__(self) -> int:
        """Entries; looks at each record."""
        if self.format == 2:
            return len(self.bodies)
        return sum(journal_format_3.calls_in(body) for body in self.bodies)

    def _reader(self) -> journal_format_2.PartReader | journal_format_3.PartReader:
        return journal_format_2.PartReader() if self.format == 2 else journal_format_3.PartReader(self.fields)


@dataclass(frozen=True, slots=True)
class Journal:
    lives: Sequence[Life]
    unread_bytes: int  # behind the last good record
    damage: str | None  # why they are unread, if no crash while writing explains it


# --- writing ---


class Encoder:
    """Equal lives give equal bytes, whatever sequence types their columns have. Keeps the columns it is given."""

    def __init__(self) -> None:
        self._writer = journal_format_3.Writer()

    def header(self, config: PlannerConfig, *, version: str = "", unix_us: int = 0) -> bytes:
        """A life's first bytes."""
        self._writer = journal_format_3.Writer()
        fields = journal_format_3.header()
        return _frame(MAGIC + bytes([FORMAT]) + to_json((config, version, unix_us, fields)))

    def entry(self, event: Event, instructions: Sequence[Instruction]) -> bytes:
        """One record; to be appended. Empty for a tick that led to nothing: it waits for a record to stand in."""
        writer = self._writer
        if writer.waits(event, instructions):
            return self.waiting() if writer.waiting >= IDLE_TICKS_AT_MOST else b""
        return _frame(writer.ticks() + writer.body(event, instructions))

    def waiting(self) -> bytes:
        """The record of the ticks that wait; empty for none. A life's end, if nothing broke."""
        ticks = self._writer.ticks()
        return _frame(ticks) if ticks else b""

    def body(self, event: Event, instructions: Sequence[Instruction]) -> bytes:
        """One call without what frames it: as `Entry.body` has it."""
        return self._writer.body(event, instructions)

    def raised(self, event: Event, error: str) -> bytes:
        """The record of an event that broke the planner: a life's last."""
        return _frame(self._writer.ticks() + self._writer.raised(event, error))


def _frame(body: bytes) -> bytes:
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


# --- reading ---


@dataclass(frozen=True, slots=True)
class Extent:
    """Where records lie in a file's bytes: (begin, end) of each body. Beyond `end` nothing can be read."""

    bodies: Sequence[tuple[int, int]]
    end: int
    damage: str | None  # a record that was whole once; None: the file ends there, or was being written


def records_of(data: bytes | mmap) -> Extent:
    """Find the records of a file, by their lengths and checksums."""
    bodies: list[tuple[int, int]] = []
    at, size = 0, len(data)
    damage = None
    while at + _FRAME.size <= size:
        length, checksum = _FRAME.unpack_from(data, at)
        begin = at + _FRAME.size
        end = begin + length
        if not length and not any(data[at:]):
            break  # a machine that stopped may leave zeros behind what was written
        if not 0 < length <= _MAX_FRAME:
            damage = f"record {len(bodies)} at byte {at} is damaged: its length is {length}"
            break
        if end > size:
            break
        if zlib.crc32(data[begin:end]) != checksum:
            damage = f"record {len(bodies)} at byte {at} is damaged: its CRC-32 is not the one written with it"
            break
        bodies.append((begin, end))
        at = end
    return Extent(bodies, at, damage)


def is_journal(data: bytes | mmap) -> bool:
    """Whether a file that begins so is a journal, of any format. An empty one, or a torn header, is none."""
    return data[_FRAME.size : _FRAME.size + len(MAGIC)] == MAGIC


def read_journal(data: bytes | mmap) -> Journal:
    """A whole journal; `data` is kept. Raises `BadInput` if it does not begin with a header of this format."""
    if not is_journal(data):
        raise BadInput("it is not a journal: it does not begin with a journal's header")
    extent = records_of(data)
    if not extent.bodies:
        raise BadInput(f"it has no record that can be read: {extent.damage or 'its first one is cut short'}")
    lives: list[Life] = []
    heads = [k for k, (begin, _) in enumerate(extent.bodies) if data[begin : begin + len(MAGIC)] == MAGIC]
    for head, following in zip(heads, [*heads[1:], len(extent.bodies)], strict=True):
        begin, end = extent.bodies[head]
        bodies = _Bodies(data, extent.bodies[head + 1 : following])
        lives.append(_life(data[begin + len(MAGIC) : end], head, bodies))
    return Journal(lives, len(data) - extent.end, extent.damage)


def _life(header: bytes, record: int, bodies: "_Bodies") -> Life:
    number = header[0] if header else None
    if number not in (OLDEST_FORMAT, FORMAT):
        raise BadInput(f"it is a journal of format {number}; this reads formats {OLDEST_FORMAT} to {FORMAT}")
    match from_json(header[1:]):
        case (PlannerConfig() as config, str(version), int(unix_us), *fields) if len(fields) == number - 2:
            life = Life(config, version, unix_us, number, record, bodies, *fields)
            life._reader()  # a newer version's fields are refused here
            return life
    raise BadInput("it is not a journal: its header holds no configuration")


class _Bodies(Sequence[bytes]):
    """Slices of a file, made when they are looked at."""

    def __init__(self, data: bytes | mmap, extents: Sequence[tuple[int, int]]) -> None:
        self._data = data
        self._extents = extents

    def __len__(self) -> int:
        return len(self._extents)

    def __getitem__(self, at: Any) -> Any:
        begin, end = self._extents[at]
        return self._data[begin:end]
