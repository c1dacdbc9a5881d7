"""How long a start may take, and what it tells meanwhile."""

import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from microtome import local
from microtome.actors.stages import Stage, StageListener, within
from microtome.cuda_runtime.ready_model import _sole_maker
from microtome.cuda_runtime.start_up import StartUp

LOADS, COMPILES = Stage("load"), Stage("compiling", compiles=True)


async def started(*stages: Stage, limit_s: float) -> tuple[str, list[Stage]]:
    """A start that is in each stage for as long as it takes to ask for it, and ready after the last one."""
    told: list[Stage] = []
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    left = list(stages)

    async def stage() -> Stage:
        now = left.pop(0)
        if not left:
            ready.set_result("ready")
        return now

    return await within(limit_s, ready, stage=stage, tell=told.append, period_s=0.01), told


async def test_compiling_is_limited_by_no_timeout_and_told() -> None:
    stages = [COMPILES] * 20
    assert await started(*stages, limit_s=0.05) == ("ready", stages)


async def test_any_other_stage_is_limited() -> None:
    with pytest.raises(TimeoutError):
        await started(*[LOADS] * 1000, limit_s=0.05)


async def test_a_start_that_says_nothing_is_limited() -> None:
    async def silent() -> None:
        return None

    with pytest.raises(TimeoutError):
        await within(0.02, asyncio.Event().wait(), stage=silent, tell=pytest.fail, period_s=0.01)


async def test_what_a_start_raises_is_raised() -> None:
    async def fails() -> str:
        raise ValueError("no model")

    async def stage() -> Stage:
        return LOADS

    with pytest.raises(ValueError, match="no model"):
        await within(60.0, fails(), stage=stage, tell=lambda _: None, period_s=60.0)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[StageListener]:
    logger, listener = logging.getLogger("microtome.runtime"), StageListener()
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(listener)
    yield listener
    logger.removeHandler(listener)


def test_a_stage_is_known_while_it_lasts(heard: StageListener) -> None:
    with StartUp().stage("load"):
        assert heard.newest == Stage("load")
    with StartUp().stage("make", "compiling, in minutes", compiles=True):
        assert heard.newest == Stage("compiling, in minutes", compiles=True)


def test_who_waits_for_another_to_compile_the_same_says_for_whom(heard: StageListener, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    (tmp_path / "artifact.maker").write_text("4242")
    lock = FileLock(f"{artifact}.lock")
    lock.acquire()

    class Waits(StartUp):
        """Lets the other go on once it is waited for."""

        def stage(self, name, says="", *, compiles=False):  # type: ignore[no-untyped-def]
            assert (name, compiles) == ("wait", True)
            assert "waiting for process 4242, which compiles the same" in says
            lock.release()
            return super().stage(name, says, compiles=compiles)

    start_up = Waits()
    with _sole_maker(artifact, start_up):
        assert (tmp_path / "artifact.maker").read_text() != "4242"
    assert list(start_up.seconds) == ["wait"]
    assert not (tmp_path / "artifact.maker").exists()


def test_who_waits_for_nobody_says_nothing(heard: StageListener, tmp_path: Path) -> None:
    with _sole_maker(tmp_path / "artifact", StartUp()):
        assert heard.newest is None


def test_what_takes_minutes_is_a_line_of_its_own_once() -> None:
    file, said = io.StringIO(), []
    tell = local._told(said.append, Console(file=file))
    compiles = Stage("worker-1: compiling, in minutes", compiles=True)
    for stages in ([LOADS], [LOADS, compiles], [compiles]):
        tell(stages)
    assert file.getvalue() == "worker-1: compiling, in minutes (--eager does without)\n"
    assert said == ["load", "load, worker-1 compiles", "worker-1 compiles"]
