"""A stream is a transcript that only grows; a listener is an offset into it."""

import asyncio

import pytest

from microtome.actors.streams import Call, Stream, Streams, call_of, completion_id
from microtome.planner.errors import BadInput, StepError, UnknownId
from microtome.planner.types import FinishReason, GenerationId, Usage
from microtome.v1 import generation_pb2 as pb


def stream(name: str = "g", *, resumable: bool = False) -> Stream:
    return one_of(Call(name, resumable=resumable), 0)


def one_of(call: Call, index: int) -> Stream:
    return Stream(call, index, seed=7 + index, prompt_tokens=3, context=(), created_us=0)


# holds J16
async def test_slow_listener_finds_everything_since_its_last_message_in_one() -> None:
    s = stream()
    listener = s.call.listen(0)
    s.append([1], ["a"])
    assert await listener.next() == pb.GenerateResponse(generation_id="g", n=1, token_ids=[1], text="a", seed=7)
    s.append([2], ["b"])
    s.append([3, 4], ["", "c"])
    s.end(FinishReason.LENGTH, "!", Usage(prompt_tokens=3, output_tokens=4, cached_tokens=1), None)
    assert await listener.next() == pb.GenerateResponse(
        generation_id="g",
        n=1,
        offset=1,
        token_ids=[2, 3, 4],
        text="bc!",
        seed=7,
        finish_reason=pb.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=3, output_tokens=4, cached_tokens=1),
    )


async def test_listener_waits_until_there_is_something() -> None:
    s = stream()
    waiting = asyncio.create_task(s.call.listen(0).next())
    await asyncio.sleep(0)
    assert not waiting.done()
    s.append([5], ["x"])
    message = await waiting
    assert message is not None
    assert message.token_ids == [5]


async def test_end_without_tokens_is_a_message_of_its_own() -> None:
    s = stream()
    listener = s.call.listen(0)
    s.append([1], ["a"])
    await listener.next()
    s.end(FinishReason.CANCELLED, "", None, None)
    message = await listener.next()
    assert message is not None
    assert (message.offset, list(message.token_ids), message.finish_reason) == (1, [], pb.FINISH_REASON_CANCELLED)


async def test_failure_is_raised_after_the_tokens_before_it() -> None:
    s = stream()
    listener = s.call.listen(0)
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
    first = s.call.listen(0)
    s.append([1, 2, 3], ["a", "b", "c"])
    waiting = asyncio.create_task(first.next())
    await waiting
    waiting = asyncio.create_task(first.next())
    await asyncio.sleep(0)
    second = s.call.listen(1)
    assert await waiting is None
    message = await second.next()
    assert message is not None
    assert (message.offset, list(message.token_ids), message.text) == (1, [2, 3], "bc")
    assert (first.newest, second.newest) == (False, True)


def test_offset_not_reached_yet_is_refused() -> None:
    s = stream()
    s.append([1], ["a"])
    with pytest.raises(BadInput) as refused:
        s.call.listen(2)
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


# --- several completions ---


async def test_listener_of_several_completions_takes_them_in_turns_and_is_done_when_all_have_ended() -> None:
    call = Call("g", 2, resumable=False)
    first, second = one_of(call, 0), one_of(call, 1)
    listener = call.listen()
    first.append([1], ["a"])
    second.append([5, 6], ["x", "y"])
    got = []
    for more in ([2], [3]):  # the first has something new each time: it must not keep the second from its turn
        message = await listener.next()
        assert message is not None
        got.append((message.index, message.n, message.seed, message.offset, list(message.token_ids)))
        first.append(more, ["b"])
    assert got == [(0, 2, 7, 0, [1]), (1, 2, 8, 0, [5, 6])]
    first.end(FinishReason.STOP, "", None, None)
    assert (await listener.next()).finish_reason == pb.FINISH_REASON_STOP  # type: ignore[union-attr]
    assert not listener.done
    second.end(FinishReason.LENGTH, "!", None, None)
    message = await listener.next()
    assert message is not None
    assert (message.index, message.offset, message.text, listener.done) == (1, 2, "!", True)


async def test_one_completions_failure_is_raised_behind_what_the_others_brought() -> None:
    call = Call("g", 2, resumable=False)
    failed, sound = one_of(call, 0), one_of(call, 1)
    listener = call.listen()
    failed.end(FinishReason.FAILED, "", None, StepError("it broke"))
    sound.append([4], ["d"])
    message = await listener.next()
    assert message is not None
    assert (message.index, list(message.token_ids)) == (1, [4])
    with pytest.raises(StepError, match="it broke"):
        await listener.next()


async def test_each_completion_is_gone_on_with_from_its_own_offset_and_the_others_are_left_out() -> None:
    call = Call("g", 3, resumable=True)
    for index in range(3):
        s = one_of(call, index)
        s.append([10 * index, 10 * index + 1], ["", ""])
        s.end(FinishReason.LENGTH, "", None, None)
    listener = call.listen({2: 1, 0: 2})
    messages = [await listener.next(), await listener.next()]
    assert [(m.index, m.offset, list(m.token_ids)) for m in messages if m] == [(2, 1, [21]), (0, 2, [])]
    assert listener.done


def test_offsets_of_completions_that_are_not_there_are_refused_and_take_nothing_over() -> None:
    call = Call("g", 3, resumable=True)
    one_of(call, 0).append([1], ["a"])
    listener = call.listen({0: 0})
    with pytest.raises(BadInput, match="completion 3 is not below the 3 of generation 'g'"):
        call.listen({3: 0})
    with pytest.raises(UnknownId, match="completion 1 of generation 'g' is not known any more"):
        call.listen(0)
    with pytest.raises(BadInput, match="offset 2 is above the 1 tokens of completion 0 generated so far"):
        call.listen({0: 2})
    assert listener.newest


def test_call_is_kept_until_its_last_completion_has_ended_and_counted_with_all_its_tokens() -> None:
    streams = Streams(retain_us=10**9, retain_tokens=3)
    call = Call("g", 2, resumable=True)
    ended = [one_of(call, 0), one_of(call, 1)]
    for s in ended:
        streams.add(s)
        s.append([1, 2], ["", ""])
    ended[0].end(FinishReason.STOP, "", None, None)
    streams.ended(ended[0], at_us=0)
    assert streams.find_running("g") is call
    assert (streams.stream(ended[0].generation), streams.stream(ended[1].generation)) == (None, ended[1])
    ended[1].end(FinishReason.STOP, "", None, None)
    streams.ended(ended[1], at_us=1)
    assert (streams.running, "g" in streams) == (0, False)  # its 4 tokens are above the 3 that are kept


def test_call_of_which_another_completion_is_found_runs_again() -> None:
    """After a restart of the driver, when its completions lie on workers that join one after the other."""
    streams = Streams(retain_us=100, retain_tokens=100)
    call = Call("g", 2, resumable=True)
    first = one_of(call, 1)
    streams.add(first)
    first.append([1], [""])
    first.end(FinishReason.STOP, "", None, None)
    streams.ended(first, at_us=0)
    second = one_of(call, 0)
    streams.add(second)
    streams.prune(1000)
    assert streams.find_running("g") is call
    second.end(FinishReason.STOP, "", None, None)
    streams.ended(second, at_us=1000)
    streams.prune(1099)
    assert streams.find("g") is call


def test_a_completions_id_tells_its_call_and_no_callers_id_can_look_like_one() -> None:
    assert completion_id("mine", 0, 1) == "mine"
    assert call_of(GenerationId("mine")) == ("mine", 0, 1)
    name = completion_id("a/1", 2, 12)
    assert call_of(name) == ("a/1", 2, 12)
    assert not name.isprintable()
