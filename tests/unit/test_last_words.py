"""What is known of a process that has ended: real ones, ended in each way there is."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from microtome.actors import remains
from microtome.actors.last_words import LastWords, read_words
from microtome.actors.remains import ProcessWatch, Remains, Trace, examine
from microtome.actors.step_runner import StepRunner
from microtome.actors.step_thread import StepThread
from microtome.actors.wire import StepFault
from microtome.planner.types import StepPlan, StepResult
from tests.support.ending_executor import EndingExecutor
from tests.support.fake_executor import FakeExecutor
from tests.support.plan_script import PlanScript

ROOT = Path(__file__).resolve().parents[2]

# It writes words, does one whole step and begins another, says that it has, and does as it is told.
CHILD = """
import sys
from pathlib import Path
from microtome.actors.last_words import LastWords
from tests.support.ending_executor import end
words = LastWords(Path(sys.argv[1]))
words.heed_crashes()
words.began(6); words.ended(6); words.began(7)
print("READY", flush=True)
how = sys.stdin.readline().strip()
if how == "knows":
    words.say("the device\\n  is gone")
    words.say("and so am I")
    how = "_exit"
if how == "fork":
    import os
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    how = "_exit"
end(how)
"""


@contextmanager
def child(words: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(words)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]", how: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{how}\n")
    process.stdin.close()
    process.wait(20)


def trace_of(process: "subprocess.Popen[str]", words: Path) -> Trace:
    return Trace(node="n", pid=process.pid, words=str(words))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "segv",
            r"its process was killed by SIGSEGV in step 7, at __init__\.py:\d+ in string_at from "
            r"ending_executor\.py:\d+ in end from <string>:\d+ in <module>",
        ),
        ("exit", "its process ended with exit code 3 in step 7"),
        ("_exit", "its process ended without a word, as after SIGKILL in step 7"),
        ("knows", "its process ended without a word, as after SIGKILL in step 7; its last words: the device is gone"),
    ],
)
def test_words_alone_tell_how_it_ended_on_any_kernel(tmp_path: Path, how: str, told: str) -> None:
    words = tmp_path / "words"
    with child(words) as process:
        tell(process, how)
        found = examine(trace_of(process, words))
    assert found is not None
    assert not found.lives
    assert re.fullmatch(told, str(found)), found


@pytest.mark.parametrize(("how", "expected"), [("_exit", "exit 3"), ("segv", "SIGSEGV")])
def test_kernel_that_tells_exit_statuses_is_believed(tmp_path: Path, how: str, expected: str) -> None:
    words = tmp_path / "words"
    with child(words) as process:
        watch = ProcessWatch(process.pid)
        assert (watch.ended(), watch.wait_status()) == (False, None)
        tell(process, how)
        assert watch.ended()
        found = examine(trace_of(process, words), watch)
        told = watch.wait_status()
        watch.close()
    assert found is not None
    # A kernel before 6.15 tells nothing: what the process wrote is all there is then.
    assert told is None or found.how == expected


def test_a_process_that_runs_is_told_from_one_that_is_stopped_and_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remains, "DEATH_WAIT_S", 0.05)
    words = tmp_path / "words"
    with child(words) as process:
        trace = trace_of(process, words)
        found = str(examine(trace))
        assert re.fullmatch(r"its process still ran in step 7, at <string>:\d+ in <module>", found), found
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert str(examine(trace)).endswith(", stopped by a signal")
        process.kill()
        process.wait(20)
        assert str(examine(trace)) == "its process ended without a word, as after SIGKILL in step 7"


def test_a_forked_child_that_ends_is_not_taken_for_the_process(tmp_path: Path) -> None:
    words = tmp_path / "words"
    with child(words) as process:
        tell(process, "fork")
        found = examine(trace_of(process, words))
    assert found is not None
    assert found.exit_code is None


def test_want_of_memory_is_named_only_where_it_can_be_the_cause() -> None:
    assert "out of memory its node killed 1 process(es)" in str(Remains(lives=False, signal="SIGKILL", oom_kills=1))
    assert "out of memory its node killed 2 process(es)" in str(Remains(lives=False, oom_kills=2))
    assert "memory" not in str(Remains(lives=False, signal="SIGSEGV", oom_kills=1))
    assert "memory" not in str(Remains(lives=False, exit_code=1, oom_kills=1))
    assert "memory" not in str(Remains(lives=True, oom_kills=1))


def test_a_file_that_is_not_there_or_not_ours_tells_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("something else, and long enough to hold a header: " + "." * 80)
    assert read_words(other) is None
    assert examine(Trace(node="n", pid=os.getpid(), words=str(tmp_path / "none"))) is None
    assert examine(Trace(node="n", pid=os.getpid(), words="")) is None


def test_words_are_of_one_process(tmp_path: Path) -> None:
    LastWords(tmp_path / "words")
    with pytest.raises(FileExistsError):
        LastWords(tmp_path / "words")


def test_step_under_way_is_the_one_that_was_run_last_whatever_was_refused(tmp_path: Path) -> None:
    executor = FakeExecutor(refuse_at=3)
    words = LastWords(tmp_path / "words")
    runner, script = StepRunner(executor, 2, words=words), PlanScript(executor.describe())

    def seen() -> tuple[int, bool]:
        found = read_words(words.path)
        assert found is not None
        return found.step, found.in_step

    assert seen() == (0, False)
    plans = [script.next() for _ in range(3)]
    runner.run(plans[0])
    runner.run(plans[1])
    assert seen() == (2, False)
    runner.run(plans[2])
    assert seen() == (2, False), "a step that was refused counts as run"


def test_library_that_calls_exit_in_a_step_fails_the_step() -> None:
    executor = EndingExecutor(FakeExecutor(), 2, "sys_exit")
    runner, script = StepRunner(executor, 2), PlanScript(executor.describe())
    assert isinstance(runner.run(script.next()), StepResult)
    plan: StepPlan = script.next()
    fault = runner.run(plan)
    assert isinstance(fault, StepFault)
    assert fault.message == "SystemExit: 3"
    assert runner.failure == "step 2 failed: SystemExit: 3"


async def test_library_that_calls_exit_on_the_step_thread_ends_neither_thread_nor_loop() -> None:
    steps = StepThread("steps")
    steps.start()
    steps.submit(lambda: sys.exit(3))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await asyncio.wait_for(steps.call(lambda: sys.exit(3)), 10)
    assert await asyncio.wait_for(steps.call(lambda: 5), 10) == 5
    steps.stop()
