"""A stream is a transcript that only grows; a listener is an offset into it."""

import asyncio

import pytest

from microtome.actors.streams import Stream, Streams
from microtome.planner.errors import BadInput, StepError
from microtome.planner.types import FinishReason, GenerationId, Usage
from microtome.v1 import generation_pb2 as pb


def stream(name: str = "g", *, resumable: bool = False) -> Stream:
    return Stream(GenerationId(name), seed=7, prompt_tokens=3, context=(), resumable=resumable, created_us=0)


# holds J16
async def test_slow_listener_finds_everything_since_its_last_message_in_one() -> None:
    s = stream()
    listener = s.listen(0)
    s.append([1], ["a"])
    assert await listener.next() == pb.GenerateResponse(generation_id="g", token_ids=[1], text="a", seed=7)
    s.append([2], ["b"])
    s.append([3, 4], ["", "c"])
    s.end(FinishReason.LENGTH, "!", Usage(prompt_tokens=3, output_tokens=4, cached_tokens=1), None)
    assert await listener.next() == pb.GenerateResponse(
        generation_id="g",
        offset=1,
        token_ids=[2, 3, 4],
        text="bc!",
        seed=7,
        finish_reason=pb.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=3, output_tokens=4, cached_tokens=1),
    )


async def test_listener_waits_until_there_is_something() -> None:
    s = stream()
    waiting = asyncio.create_task(s.listen(0).next())
    await asyncio.sleep(0)
    assert not waiting.done()
    s.append([5], ["x"])
    message = await waiting
    assert message is not None
    assert message.token_ids == [5]


async def test_end_without_tokens_is_a_message_of_its_own() -> None:
    s = stream()
    listener = s.listen(0)
    s.append([1], ["a"])
    await listener.next()
    s.end(FinishReason.CANCELLED, "", None, None)
    message = await listener.next()
    assert message is not None
    assert (message.offset, list(message.token_ids), message.finish_reason) == (1, [], pb.FINISH_REASON_CANCELLED)


async def test_failure_is_raised_after_the_tokens_before_it() -> None:
    s = stream()
    listener = s.listen(0)
    s.append([1, 2], ["a", "b"])
    s.end(FinishReason.FAILED, "", None, StepError("it broke"))
    message = await listener.next()
    assert message is not None
    assert list(message.token_ids) == [1, 2]
    assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    with pytest.raises(StepError, match="it broke"):
        await listener.next()


async def test_later_listener_takes_over_at_its_offset() -> None:
    s = stream()
    first = s.listen(0)
    s.append([1, 2, 3], ["a", "b", "c"])
    waiting = asyncio.create_task(first.next())
    await waiting
    waiting = asyncio.create_task(first.next())
    await asyncio.sleep(0)
    second = s.listen(1)
    assert await waiting is None
    message = await second.next()
    assert message is not None
    assert (message.offset, list(message.token_ids), message.text) == (1, [2, 3], "bc")
    assert (first.newest, second.newest) == (False, True)


def test_offset_not_reached_yet_is_refused() -> None:
    s = stream()
    s.append([1], ["a"])
    with pytest.raises(BadInput) as refused:
        s.listen(2)
    assert str(refused.value) == "offset 2 is above the 1 tokens generated so far"


def test_ended_stream_is_kept_only_if_resumable_and_only_for_its_time() -> None:
    streams = Streams(retain_us=100, retain_tokens=1000)
    plain, kept = stream("plain"), stream("kept", resumable=True)
    for s in (plain, kept):
        streams.add(s)
        s.end(FinishReason.STOP, "", None, None)
        streams.ended(s, at_us=1000)
    assert "plain" not in streams
    assert "kept" in streams
    assert streams.running == 0
    streams.prune(1099)
    assert "kept" in streams
    streams.prune(1100)
    assert "kept" not in streams


def test_oldest_ended_streams_go_beyond_the_bound_on_tokens() -> None:
    streams = Streams(retain_us=10**9, retain_tokens=5)
    for at, name in enumerate(["a", "b", "c"]):
        s = stream(name, resumable=True)
        streams.add(s)
        s.append([1, 2], ["", ""])
        s.end(FinishReason.STOP, "", None, None)
        streams.ended(s, at_us=at)
    assert [name in streams for name in "abc"] == [False, True, True]
