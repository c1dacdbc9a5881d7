"""Notes and snapshots: what a restarted driver reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.planner.errors import BadInput
from microtome.planner.notes import Note, decode_note, encode_note
from microtome.planner.restore import read_snapshot
from microtome.planner.types import FinishReason, GenerationId, SamplingParams, SequenceId, SequenceSnapshot, SessionId

TEXT = st.text(max_size=20)
COUNT = st.integers(0, 2**40)


@given(
    st.builds(
        Note,
        session=st.integers(1, 2**63).map(SessionId),
        opened=st.booleans(),
        tenant=TEXT,
        cache_salt=TEXT,
        length=st.none() | COUNT,
        pending=st.none() | COUNT,
    )
)
def test_an_idle_sessions_note_comes_back_as_it_was(note: Note) -> None:
    assert decode_note(encode_note(note)) == note


@given(
    st.builds(
        Note,
        session=st.integers(1, 2**63).map(SessionId),
        opened=st.booleans(),
        tenant=TEXT,
        cache_salt=TEXT,
        generation=TEXT.map(GenerationId),
        prompt_tokens=COUNT,
        generated_from=COUNT,
        base=COUNT,
        submitted_us=COUNT,
        priority=st.integers(-1000, 1000),
        max_new_tokens=COUNT,
        stop_token_ids=st.lists(COUNT, max_size=4).map(tuple),
    )
)
def test_a_generations_note_comes_back_as_it_was(note: Note) -> None:
    assert decode_note(encode_note(note)) == note


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b"[2,[],null]", b"[1,[1,2],null]", b"7"])
def test_bytes_that_are_no_note_are_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        decode_note(data)


def test_a_note_is_compact() -> None:
    note = Note(
        session=SessionId(123456),
        opened=False,
        tenant="",
        cache_salt="",
        generation=GenerationId("0123456789abcdef"),
        prompt_tokens=1000,
        generated_from=1000,
        max_new_tokens=256,
        stop_token_ids=(2, 32000),
    )
    assert len(encode_note(note)) < 120


def snapshot(tokens: list[int], last: int | None, *, note: bytes | None = None, **fields: object) -> SequenceSnapshot:
    own = Note(
        session=SessionId(4),
        opened=False,
        tenant="",
        cache_salt="",
        generation=GenerationId("g"),
        prompt_tokens=3,
        generated_from=3,
        max_new_tokens=5,
        stop_token_ids=(99,),
        **fields,  # type: ignore[arg-type]
    )
    return SequenceSnapshot(
        sequence=SequenceId(0),
        cells=tuple(range(len(tokens))),  # type: ignore[arg-type]
        tokens=tuple(tokens),
        last_sampled=last,
        sampling=SamplingParams(),
        note=encode_note(own) if note is None else note,
    )


def test_a_generation_under_way_has_its_newest_token_on_the_device() -> None:
    found = read_snapshot(snapshot([1, 2, 3, 4], 5))
    assert found is not None
    assert (found.transcript, found.finish, found.sampled) == ([1, 2, 3, 4, 5], None, True)


def test_what_was_sampled_after_a_stop_is_cut() -> None:
    found = read_snapshot(snapshot([1, 2, 3, 99, 6], 7))
    assert found is not None
    assert (found.transcript, found.finish, found.sampled) == ([1, 2, 3, 99], FinishReason.STOP, False)


def test_what_was_sampled_beyond_the_limit_is_cut() -> None:
    found = read_snapshot(snapshot([1, 2, 3, 4, 5, 6, 7], 8))
    assert found is not None
    assert (found.transcript, found.finish) == ([1, 2, 3, 4, 5, 6, 7, 8], FinishReason.LENGTH)


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    found = read_snapshot(snapshot([99, 99, 99], 4))
    assert found is not None
    assert found.finish is None


def test_a_generation_whose_prompt_is_not_run_cannot_be_restored() -> None:
    assert read_snapshot(snapshot([1, 2], None)) is None


def test_a_sequence_without_a_note_of_ours_cannot_be_restored() -> None:
    assert read_snapshot(snapshot([1, 2, 3], 4, note=b"somebody else's")) is None
