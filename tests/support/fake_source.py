"""A model source without a network: a child process that writes given bytes, held at a gate or broken on request."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from microtome.known_models import KnownModel
from microtome.sources import PinnedFile, SourceFailed

CONTENT = b"weights " * 4096

# Counts itself, writes half, waits at the gate (until it opens, or whoever started this is gone), writes the rest.
WRITER = """
import os, sys, time
from pathlib import Path
work, runs, gate, ending, half = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
parent = os.getppid()
with runs.open("a") as log:
    log.write(f"{os.getpid()}\\n")
with (work / "weights.bin").open("wb") as out:
    out.write(bytes.fromhex(half))
    out.flush()
    while gate and not os.path.exists(gate):
        if os.getppid() != parent:
            sys.exit(1)
        time.sleep(0.01)
    out.write(bytes.fromhex(half))
if ending:
    print("the far end hung up", file=sys.stderr)
sys.exit(ending)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSource:
    """Delivers `CONTENT`, or what the other fields say instead. `runs` gets a line per download that began."""

    runs: Path
    key: str = "fake"
    delivered: bytes = CONTENT
    gate: Path | None = None
    ending: int = 0
    unreachable: str = ""
    download_bytes: int = len(CONTENT)
    entry: str = "weights.bin"

    @property
    def place(self) -> str:
        return f"a fake ({self.key})"

    @property
    def files(self) -> tuple[PinnedFile, ...]:
        return (PinnedFile(name="weights.bin", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()),)

    def check_reachable(self) -> None:
        if self.unreachable:
            raise SourceFailed(self.unreachable)

    def command(self, work: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        half = self.delivered[: len(self.delivered) // 2].hex()
        gate = str(self.gate) if self.gate else ""
        return [sys.executable, "-c", WRITER, str(work), str(self.runs), gate, str(self.ending), half], {}

    def unpack(self, work: Path, keep: Path) -> None:
        (work / "weights.bin").rename(keep / "weights.bin")


def only(*sources: FakeSource) -> dict[str, KnownModel]:
    """A catalogue whose one model, "toy", comes from these sources."""
    return {"toy": KnownModel(title="Toy", licence="none", sources=sources)}
