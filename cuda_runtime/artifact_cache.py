"""The folder in which compiled models are kept: what is in it, what it takes, and how something leaves it.

An artifact lies in a folder named by its key (`ready_model.py`). Beside it: `KEY.lock`, held by whoever makes it, and
`.making-KEY-…`, what is not finished. A maker that was killed leaves the latter behind; the next maker of the same, who
holds the lock, takes it away, and so does `remove`. A process that runs an artifact keeps its files until it ends,
whatever happens to the folder.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from microtome.cuda_runtime import artifact
from microtome.planner.errors import BadConfig, WrongState

BEING_MADE = "it is being made"
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """One artifact, or what is left of making one."""

    key: str
    size: int  # bytes
    made_s: float  # when, since the epoch
    model: str  # empty: it cannot be read
    dtype: str
    unusable: str  # why nothing here can use it; empty: something can


def folder_of(artifact_folder: str | None) -> Path:
    """Where artifacts are kept: the folder named, or one in the user's cache directory."""
    return Path(artifact_folder) if artifact_folder else user_cache_path("microtome") / "artifacts"


def cached(folder: Path) -> list[Cached]:
    """What is kept, the newest first. Files are not read through: `artifact.read` does that at each start."""
    if not folder.is_dir():
        return []
    found = [_described(path) for path in folder.iterdir() if artifact.is_artifact(path)]
    found += [_unfinished(path) for path in folder.glob(".making-*-*")]
    return sorted(found, key=lambda item: (-item.made_s, item.key))


def remove(folder: Path, key: str) -> None:
    """Delete an artifact and what is left of making it. Raises `BadConfig` where there is none, `WrongState` while it
    is being made."""
    path = folder / key
    if key != Path(key).name or not (artifact.is_artifact(path) or any(folder.glob(f".making-{key}-*"))):
        raise BadConfig(f"no artifact {key!r} is in {folder}")
    lock = FileLock(f"{path}.lock")
    try:
        with lock.acquire(timeout=0):
            clear_unfinished(path)
            if path.is_dir():
                (path / artifact.MANIFEST).unlink()  # first: half of one is none
                shutil.rmtree(path)
            Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise WrongState(f"artifact {key} is being made") from None


def clear_unfinished(path: Path) -> None:
    """Take away what a killed maker of the artifact at `path` left. For the holder of its lock."""
    for left in path.parent.glob(f".making-{path.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _described(path: Path) -> Cached:
    key, size, made_s = path.name, _size(path), (path / artifact.MANIFEST).stat().st_mtime
    try:
        manifest = artifact.read_manifest(path)
    except BadConfig as error:
        return Cached(
            key=key,
            size=size,
            made_s=made_s,
            model="",
            dtype="",
            unusable=str(error).removeprefix(f"artifact {path}: "),
        )
    return Cached(
        key=key,
        size=size,
        made_s=made_s,
        model=manifest.model,
        dtype=manifest.dtype if manifest.quantize == "none" else f"{manifest.dtype}, {manifest.quantize}",
        unusable=_unusable(manifest),
    )


def _unusable(manifest: artifact.Manifest) -> str:
    if manifest.torch != torch.__version__:
        return f"made for torch {manifest.torch}, this is {torch.__version__}"
    here = [
        artifact.machine_kind(torch.device(kind)) for kind in _DEVICES if kind == "cpu" or torch.cuda.is_available()
    ]
    return "" if manifest.machine in here else f"made for {manifest.machine}"


def _unfinished(path: Path) -> Cached:
    key = path.name.removeprefix(".making-").rpartition("-")[0]
    why = BEING_MADE if _is_locked(path.parent, key) else "its maker was killed"
    return Cached(key=key, size=_size(path), made_s=path.stat().st_mtime, model="", dtype="", unusable=why)


def _is_locked(folder: Path, key: str) -> bool:
    lock = FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _size(path: Path) -> int:
    """Bytes in the files below it that are still there when looked at."""
    total = 0
    for place, _, names in os.walk(path):  # which leaves out what goes away meanwhile
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
