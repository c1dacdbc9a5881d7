"""Known models, fetched once into the user's cache: `fetch("smollm2-135m")` is a path that can be served.

What it promises:

- A path it returns holds exactly the pinned bytes: every file's size and SHA-256 are compared on every call, also for
  files fetched long ago; what does not match is fetched anew.
- A model's folder appears in one rename, so a download that fails, stalls or is killed leaves nothing half. What a
  killed one left beside it is swept away by the next.
- One fetch of a model at a time, across processes: the second waits and uses what the first has brought.
- The sources of a model are tried in order; one that cannot be reached costs seconds, not minutes.

A download is a child process that writes below a staging folder, so that its progress can be watched from outside and
it can be ended whatever it is doing.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from microtome.known_models import KNOWN_MODELS, KnownModel
from microtome.planner.errors import BadConfig
from microtome.sources import PinnedFile, Source, SourceFailed

__all__ = ["CACHE_VARIABLE", "KNOWN_MODELS", "KnownModel", "cache_directory", "fetch", "resolve_model"]

CACHE_VARIABLE = "MICROTOME_CACHE"
STALL_S = 90.0  # a download that has not grown for this long is given up
WATCH_INTERVAL_S = 0.1


def cache_directory() -> Path:
    """Where fetched models are kept: `MICROTOME_CACHE`, or the user's cache directory on this system."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_cache_path("microtome")


def resolve_model(name_or_path: str) -> str:
    """A known model's path, fetching it when it is absent; anything else is returned as it is.

    A known name wins over a folder of that name: write `./smollm2-135m` for the folder.
    Raises `BadConfig` when the model cannot be fetched.
    """
    return str(fetch(name_or_path)) if name_or_path in KNOWN_MODELS else name_or_path


def fetch(
    name: str,
    cache_dir: Path | None = None,
    *,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
    console: Console | None = None,
) -> Path:
    """The path to serve for the model `name`: a Hugging Face directory or a GGUF file, complete and checked.

    `cache_dir` is the directory to keep it in, `cache_directory()` when absent. Progress goes to `console`, standard
    error when absent: a bar on a terminal, plain lines elsewhere. Raises `BadConfig`, one sentence, when the name is
    not known, the directory cannot be written, or no source can give the files as they are pinned.
    """
    model = known.get(name)
    if model is None:
        raise BadConfig(f"no model is called {name!r}; known: {', '.join(sorted(known))}")
    models = (cache_dir or cache_directory()) / "models"
    console = console or Console(stderr=True)

    present = _find(models, name, model)
    if present is not None:
        return present  # before the lock, which a read-only cache could not give
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models / f"{name}.lock", name, console):
            return _find(models, name, model) or _fetch_from_any(models, name, model, console)
    except OSError as error:
        raise BadConfig(f"{models} cannot keep the model {name!r}: {error.strerror or error}") from error


def _find(models: Path, name: str, model: KnownModel) -> Path | None:
    """The first source's files that are here, complete and unaltered."""
    for source in model.sources:
        folder = models / f"{name}-{source.key}"
        if folder.is_dir() and _first_flaw(folder, source.files) is None:
            return folder / source.entry
    return None


def _fetch_from_any(models: Path, name: str, model: KnownModel, console: Console) -> Path:
    for left_over in models.glob(f".{name}-*"):  # only the lock's holder makes these, so they are a dead one's
        shutil.rmtree(left_over, ignore_errors=True)
    failures = []
    for source in model.sources:
        try:
            source.check_reachable()
            console.print(f"fetching {model.title} from {source.place}", highlight=False)
            return _fetch_from(source, models, name, console)
        except SourceFailed as failure:
            failures.append(f"{source.place}: {failure}")
    raise BadConfig(f"the model {name!r} cannot be fetched; {'; '.join(failures)}")


def _fetch_from(source: Source, models: Path, name: str, console: Console) -> Path:
    needed = source.download_bytes + sum(file.size for file in source.files)
    free = shutil.disk_usage(models).free
    if free < needed:
        raise SourceFailed(f"needs {needed} bytes in {models}, {free} are free")
    staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models))
    try:
        work, keep = staging / "work", staging / "keep"
        work.mkdir()
        keep.mkdir()
        _download(source, work, console)
        source.unpack(work, keep)
        flaw = _first_flaw(keep, source.files)
        if flaw is not None:
            raise SourceFailed(flaw)
        _flush(keep)
        folder = models / f"{name}-{source.key}"
        if folder.exists():
            folder.rename(staging / "altered")
        keep.rename(folder)
        return folder / source.entry
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(source: Source, work: Path, console: Console) -> None:
    """Run the source's child process to its end, showing how `work` grows. Raises `SourceFailed`."""
    command, variables = source.command(work)
    with (work.parent / "output").open("w+b") as output:
        child = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            with _bar(console, source.download_bytes) as (progress, task):
                grown, grown_at = 0, time.monotonic()
                while child.poll() is None:
                    time.sleep(WATCH_INTERVAL_S)
                    size = _size(work)
                    if size != grown:
                        grown, grown_at = size, time.monotonic()
                        progress.update(task, completed=min(size, source.download_bytes))
                    elif time.monotonic() - grown_at > STALL_S:
                        raise SourceFailed(f"the download stood still for {STALL_S:g} s at {size} bytes")
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if child.returncode != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise SourceFailed(lines[-1].strip() if lines else f"the download ended with {child.returncode}")


@contextmanager
def _alone(lock_file: Path, name: str, console: Console) -> Iterator[None]:
    """Hold the model's lock; the system releases it when its holder dies."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"another process is fetching {name}; waiting for it", highlight=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _bar(console: Console, total_bytes: int) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("  "), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("", total=total_bytes)


def _first_flaw(folder: Path, files: Sequence[PinnedFile]) -> str | None:
    """What is wrong with the first file that is not as pinned; sizes are looked at before any content."""
    for file in files:
        try:
            size = (folder / file.name).stat().st_size
        except OSError:
            return f"{file.name} is missing"
        if size != file.size:
            return f"{file.name} has {size} bytes, expected {file.size}"
    for file in files:
        with (folder / file.name).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != file.sha256:
            return f"{file.name} has the SHA-256 {digest}, expected {file.sha256}"
    return None


def _size(folder: Path) -> int:
    """Bytes in files below `folder` that are still there when looked at."""
    total = 0
    # A download renames and deletes as it goes, folders too: `os.walk` leaves out what is gone, where `rglob` raises.
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _flush(folder: Path) -> None:
    """Bring the folder's files to the disk before their name says that they are complete."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
