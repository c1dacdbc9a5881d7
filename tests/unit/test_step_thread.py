"""One thread runs jobs in order; nobody who hands one over waits, unless they ask for its outcome."""

import asyncio
import threading

import pytest

from microtome.actors.step_thread import StepThread


# holds H1, X2
async def test_jobs_run_in_order_on_one_thread_that_is_not_the_callers() -> None:
    steps, seen = StepThread("steps"), []
    for number in range(50):
        steps.submit(lambda number=number: seen.append((number, threading.get_ident())))
    steps.start()
    own = await steps.call(threading.get_ident)
    assert [number for number, _ in seen] == list(range(50))
    assert {ident for _, ident in seen} == {own} != {threading.get_ident()}
    steps.stop()
    assert await asyncio.to_thread(steps.join, 10)


async def test_the_outcome_of_a_call_is_its_value_or_its_error() -> None:
    steps = StepThread("steps")
    steps.start()
    assert await steps.call(lambda: 7) == 7
    assert await steps.call(lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        await steps.call(lambda: 1 // 0)
    steps.stop()


async def test_a_job_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    steps = StepThread("steps")
    steps.start()
    steps.submit(lambda: [][0])
    assert await steps.call(lambda: 7) == 7
    assert "job failed thread=steps" in caplog.text
    steps.stop()


async def test_a_call_that_was_given_up_still_runs_and_hurts_nobody() -> None:
    steps, gate, ran = StepThread("steps"), threading.Event(), threading.Event()
    steps.start()
    steps.submit(lambda: gate.wait(10) and None)
    waiting = asyncio.create_task(steps.call(ran.set))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert await steps.call(ran.is_set)
    steps.stop()


async def test_after_stop_the_jobs_already_there_are_run_and_no_others() -> None:
    steps, seen = StepThread("steps"), []
    steps.submit(lambda: seen.append(1))
    steps.stop()
    steps.submit(lambda: seen.append(2))
    steps.start()
    assert await asyncio.to_thread(steps.join, 10)
    assert seen == [1]


async def test_join_says_when_a_job_does_not_end() -> None:
    steps, gate = StepThread("steps"), threading.Event()
    steps.start()
    steps.submit(lambda: gate.wait(10) and None)
    steps.stop()
    assert not steps.join(0.01)
    gate.set()
    assert await asyncio.to_thread(steps.join, 10)
