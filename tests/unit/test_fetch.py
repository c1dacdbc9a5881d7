"""Fetching a known model: what is returned is whole and pinned, whatever dies in between."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from microtome.fetch import CACHE_VARIABLE, KNOWN_MODELS, _size, cache_directory, fetch, resolve_model
from microtome.known_models import KnownModel
from microtome.planner.errors import BadConfig
from tests.support.fake_source import CONTENT, FakeSource, only

QUIET = Console(quiet=True)
PATIENCE_S = 30.0

FETCH_ELSEWHERE = """
import sys
from pathlib import Path
from microtome.fetch import fetch
from tests.support.fake_source import FakeSource, only
cache, runs, gate = map(Path, sys.argv[1:])
print(fetch("toy", cache, known=only(FakeSource(runs=runs, gate=gate))))
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def downloads(runs: Path) -> int:
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def contents(cache: Path) -> set[str]:
    """Names in the cache, without the lock that stays."""
    return {path.name for path in (cache / "models").glob("*") if path.suffix != ".lock"}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never saw {what}"
        time.sleep(0.01)


def start_fetch(cache: Path, runs: Path, gate: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH_ELSEWHERE, str(cache), str(runs), str(gate)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_fetched_file_holds_the_pinned_bytes_and_nothing_else_is_left(cache: Path, runs: Path) -> None:
    path = fetch("toy", cache, known=only(FakeSource(runs=runs)), console=QUIET)
    assert path == cache / "models" / "toy-fake" / "weights.bin"
    assert path.read_bytes() == CONTENT
    assert contents(cache) == {"toy-fake"}


def test_second_fetch_downloads_nothing(cache: Path, runs: Path) -> None:
    known = only(FakeSource(runs=runs))
    assert fetch("toy", cache, known=known, console=QUIET) == fetch("toy", cache, known=known, console=QUIET)
    assert downloads(runs) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(b"W" + CONTENT[1:]),  # same size: only the digest can tell
        lambda path: path.unlink(),
    ],
    ids=["short", "one byte off", "gone"],
)
def test_damaged_file_in_the_cache_is_fetched_anew(cache: Path, runs: Path, damage: Callable[[Path], object]) -> None:
    known = only(FakeSource(runs=runs))
    damage(fetch("toy", cache, known=known, console=QUIET))
    assert fetch("toy", cache, known=known, console=QUIET).read_bytes() == CONTENT
    assert downloads(runs) == 2
    assert contents(cache) == {"toy-fake"}


def test_bytes_other_than_the_pinned_ones_are_refused_and_not_kept(cache: Path, runs: Path) -> None:
    known = only(FakeSource(runs=runs, delivered=b"Weights " * 4096))
    with pytest.raises(BadConfig, match=r"weights\.bin has the SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        fetch("toy", cache, known=known, console=QUIET)
    assert contents(cache) == set()


def test_short_download_is_refused_with_both_sizes(cache: Path, runs: Path) -> None:
    known = only(FakeSource(runs=runs, delivered=CONTENT[:1024]))
    with pytest.raises(BadConfig, match="has 1024 bytes, expected 32768"):
        fetch("toy", cache, known=known, console=QUIET)
    assert contents(cache) == set()


def test_next_source_is_tried_when_one_is_out_of_reach_or_breaks_off(cache: Path, runs: Path) -> None:
    known = only(
        FakeSource(runs=runs, key="far", unreachable="no route"),
        FakeSource(runs=runs, key="broken", ending=3),
        FakeSource(runs=runs, key="near"),
    )
    assert fetch("toy", cache, known=known, console=QUIET).parent.name == "toy-near"
    assert contents(cache) == {"toy-near"}
    assert downloads(runs) == 2


def test_message_names_every_source_that_failed_and_why(cache: Path, runs: Path) -> None:
    known = only(
        FakeSource(runs=runs, key="far", unreachable="no route"), FakeSource(runs=runs, key="broken", ending=3)
    )
    with pytest.raises(BadConfig) as raised:
        fetch("toy", cache, known=known, console=QUIET)
    assert str(raised.value) == (
        "the model 'toy' cannot be fetched; a fake (far): no route; a fake (broken): the far end hung up"
    )


def test_killed_fetch_leaves_nothing_half_and_the_next_one_completes(cache: Path, runs: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fetching = start_fetch(cache, runs, gate)
    try:
        wait_for(lambda: any(path.stat().st_size for path in cache.rglob("weights.bin")), "the half-written file")
    finally:
        fetching.send_signal(signal.SIGKILL)
        fetching.communicate()
    assert not (cache / "models" / "toy-fake").exists()

    path = fetch("toy", cache, known=only(FakeSource(runs=runs)), console=QUIET)
    assert path.read_bytes() == CONTENT
    assert contents(cache) == {"toy-fake"}
    writer = int(runs.read_text().splitlines()[0])
    wait_for(lambda: not Path(f"/proc/{writer}").exists(), "the dead fetch's download end")


def test_interrupted_fetch_ends_its_download_and_sweeps_up(cache: Path, runs: Path, tmp_path: Path) -> None:
    fetching = start_fetch(cache, runs, tmp_path / "gate")
    try:
        wait_for(lambda: downloads(runs) == 1, "a download")
    finally:
        fetching.send_signal(signal.SIGINT)
        fetching.communicate()
    assert contents(cache) == set()
    with pytest.raises(ProcessLookupError):
        os.kill(int(runs.read_text()), 0)


def test_two_fetches_at_once_download_once(cache: Path, runs: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first, second = start_fetch(cache, runs, gate), start_fetch(cache, runs, gate)
    try:
        wait_for(lambda: downloads(runs) == 1, "a download")
        for fetching in (first, second):
            assert fetching.poll() is None
        gate.touch()
        (out, err), (other_out, other_err) = (
            first.communicate(timeout=PATIENCE_S),
            second.communicate(timeout=PATIENCE_S),
        )
    finally:
        for fetching in (first, second):
            fetching.kill()
            fetching.wait()
    assert out == other_out == f"{cache / 'models' / 'toy-fake' / 'weights.bin'}\n"
    assert downloads(runs) == 1
    assert err.count("fetching Toy") + other_err.count("fetching Toy") == 1


def test_threads_of_one_process_fetch_once(cache: Path, runs: Path) -> None:
    known = only(FakeSource(runs=runs))
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch("toy", cache, known=known, console=QUIET))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert downloads(runs) == 1


def test_stalled_download_is_given_up(cache: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microtome.fetch.STALL_S", 0.3)
    known = only(FakeSource(runs=runs, gate=tmp_path / "never"))
    with pytest.raises(BadConfig, match=r"stood still for 0\.3 s at \d+ bytes"):
        fetch("toy", cache, known=known, console=QUIET)
    assert contents(cache) == set()
    with pytest.raises(ProcessLookupError):
        os.kill(int(runs.read_text()), 0)


def test_full_disk_is_refused_before_the_download_with_both_numbers(cache: Path, runs: Path) -> None:
    known = only(FakeSource(runs=runs, download_bytes=1 << 60))
    with pytest.raises(BadConfig, match=rf"needs {(1 << 60) + len(CONTENT)} bytes in .*, \d+ are free"):
        fetch("toy", cache, known=known, console=QUIET)
    assert downloads(runs) == 0


def test_complete_model_in_a_directory_that_cannot_be_written_is_served(
    cache: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = only(FakeSource(runs=runs))
    path = fetch("toy", cache, known=known, console=QUIET)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("microtome.fetch.FileLock", refuse)  # a root user writes whatever the mode says
    assert fetch("toy", cache, known=known, console=QUIET) == path


def test_cache_that_is_a_file_is_refused_in_one_sentence(cache: Path, runs: Path) -> None:
    cache.write_text("not a directory")
    with pytest.raises(BadConfig, match=r"cache/models cannot keep the model 'toy': Not a directory"):
        fetch("toy", cache, known=only(FakeSource(runs=runs)), console=QUIET)


def test_unknown_name_is_refused_with_the_names_that_are_known(cache: Path) -> None:
    with pytest.raises(BadConfig, match="no model is called 'smol'; known: smollm2-135m"):
        fetch("smol", cache)


def test_progress_without_a_terminal_is_one_plain_line(
    cache: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch("toy", cache, known=only(FakeSource(runs=runs)))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "fetching Toy from a fake (fake)\n"


def test_environment_names_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv(CACHE_VARIABLE, "~/weights")
    assert cache_directory() == Path.home() / "weights"
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_directory().name == "microtome"


def test_a_path_is_no_known_name_and_stays_as_it_is() -> None:
    assert resolve_model("./smollm2-135m") == "./smollm2-135m"
    assert resolve_model("/weights/other.gguf") == "/weights/other.gguf"


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_are_pinned_and_their_folders_distinct(name: str) -> None:
    model: KnownModel = KNOWN_MODELS[name]
    assert len({source.key for source in model.sources}) == len(model.sources) > 0
    for source in model.sources:
        assert len({file.name for file in source.files}) == len(source.files) > 0
        for file in source.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.size > 0
        assert source.entry in {"", *(file.name for file in source.files)}


@pytest.mark.model
def test_default_model_is_fetched_from_wherever_it_can_be_had() -> None:
    path = Path(resolve_model("smollm2-135m"))  # into the user's cache: other tests need it there
    assert path.is_dir() or path.suffix == ".gguf"
    assert fetch("smollm2-135m") == path


def test_a_folder_that_goes_away_while_a_download_is_watched_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "part").write_bytes(b"678")
    scandir = os.scandir

    def gone(path: Any = ".") -> Any:
        if str(path).endswith("gone"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert _size(tmp_path) == 5
