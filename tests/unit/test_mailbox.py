"""Letters from a thread to the event loop: in order, none twice, none after the end, and the interpreter kept."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from microtome.actors.mailbox import Mailbox


@pytest.fixture
async def mailbox() -> Iterator[Mailbox]:
    box = Mailbox(asyncio.get_running_loop())
    yield box
    box.close()


async def test_letters_of_a_thread_arrive_in_order_on_the_loop(mailbox: Mailbox) -> None:
    seen: list[tuple[int, int]] = []
    done = asyncio.Event()

    def send() -> None:
        for number in range(1000):
            mailbox.post(lambda number: seen.append((number, threading.get_ident())), number)
        mailbox.post(done.set)

    threading.Thread(target=send).start()
    async with asyncio.timeout(10):
        await done.wait()
    assert seen == [(number, threading.get_ident()) for number in range(1000)]


async def test_a_letter_posted_by_a_letter_arrives_too(mailbox: Mailbox) -> None:
    done = asyncio.Event()
    mailbox.post(lambda: mailbox.post(done.set))
    async with asyncio.timeout(10):
        await done.wait()


async def test_a_letter_that_raises_keeps_no_other_back(mailbox: Mailbox) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception")))
    mailbox.post(lambda: [][0])
    mailbox.post(done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert isinstance(raised[0], IndexError)
    loop.set_exception_handler(None)


async def test_after_the_end_nothing_arrives_and_nothing_breaks() -> None:
    mailbox, seen = Mailbox(asyncio.get_running_loop()), []
    mailbox.post(seen.append, 1)
    mailbox.close()
    mailbox.close()
    mailbox.post(seen.append, 2)
    await asyncio.sleep(0.01)
    assert seen == []


async def test_posting_gives_no_other_thread_a_turn(mailbox: Mailbox) -> None:
    # a thread that lets go of the interpreter here would wait for the loop's work before its next step
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # gives its own turn away at once

    thread = threading.Thread(target=take_turns)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(60)  # no turn is taken from a thread any more
        time.sleep(0.05)  # noqa: ASYNC251 - gives a turn away, as nothing on a loop should
        before = turns[0]
        for _ in range(1000):
            mailbox.post(int)
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(10)
    assert before > 0
    assert after == before
