"""Stops are found whatever the pieces, and nothing else is held back for long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.actors.stop_texts import StopTexts

LETTERS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def shown_of(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner, shown = StopTexts(stops), ""
    for piece in pieces:
        more, found = scanner.push(piece)
        shown += more
        if found:
            return shown, True
    return shown + scanner.finish(), False


def character_by_character(stops: list[str], text: str) -> tuple[str, bool]:
    """The oracle: at each character, is what has come up to it a stop's end?"""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(STOPS, st.lists(LETTERS, max_size=6))
def test_the_pieces_make_no_difference(stops: list[str], pieces: list[str]) -> None:
    assert shown_of(stops, pieces) == character_by_character(stops, "".join(pieces))


@given(STOPS, st.lists(LETTERS, max_size=6))
def test_what_is_held_back_may_still_become_a_stop_and_the_rest_is_shown(stops: list[str], pieces: list[str]) -> None:
    scanner, so_far, shown = StopTexts(stops), "", ""
    for piece in pieces:
        more, found = scanner.push(piece)
        shown, so_far = shown + more, so_far + piece
        assert so_far.startswith(shown)
        if found:
            return
        held = so_far[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one\n", "two\n", "\nthree"], "one\ntwo"),
        (["one", "\n", "\n"], "one"),
        (["\n\n"], ""),
        (["one EN", "D two"], "one "),
        (["one EN", "TRANCE", " END"], "one ENTRANCE "),
    ],
)
def test_the_text_ends_in_front_of_the_stop(pieces: list[str], shown: str) -> None:
    assert shown_of(["\n\n", "END"], pieces) == (shown, True)
