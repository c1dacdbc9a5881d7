"""Texts of several completions on one output: in order, whole, and each begun as soon as it is its turn."""

import random

import pytest

from microtome.answers import FinishReason, Update
from microtome.printing import TextPrinter


def update(index: int, text: str, *, last: bool = False) -> Update:
    finish = FinishReason.STOP if last else None
    return Update(text=text, token_ids=(), offset=0, generation_id="g", seed=0, finish_reason=finish, index=index)


def printed(n: int, *updates: Update) -> list[str]:
    out: list[str] = []
    printer = TextPrinter(n, out.append)
    for one in updates:
        printer.add(one)
    printer.end_line()
    return out


def test_a_single_text_is_written_as_it_comes_with_nothing_added_but_the_end_of_its_line() -> None:
    assert printed(1, update(0, "Hel"), update(0, "lo", last=True)) == ["Hel", "lo", "\n"]
    assert printed(1, update(0, "Hello\n", last=True)) == ["Hello\n"]
    assert printed(1, update(0, "", last=True)) == []


def test_what_comes_out_of_turn_is_kept_until_it_is_its_turn() -> None:
    out = printed(2, update(1, "b"), update(0, "a"), update(1, "B", last=True), update(0, "A", last=True))
    assert out == ["[1 of 2]\n", "a", "A", "\n", "[2 of 2]\n", "bB", "\n"]


def test_a_completion_without_text_has_its_heading_too() -> None:
    assert "".join(printed(2, update(0, "", last=True), update(1, "b", last=True))) == "[1 of 2]\n[2 of 2]\nb\n"


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_gives_the_same_output(seed: int) -> None:
    rng = random.Random(seed)
    pieces = {index: [f"{index}{place} " for place in range(rng.randrange(5))] for index in range(4)}
    left = {index: [*texts, None] for index, texts in pieces.items()}
    updates = []
    while left:
        index = rng.choice(list(left))
        piece = left[index].pop(0)
        updates.append(update(index, piece or "", last=piece is None))
        if piece is None:
            del left[index]
    whole = "".join(
        f"[{index + 1} of 4]\n" + "".join(texts) + ("\n" if texts else "") for index, texts in pieces.items()
    )
    assert "".join(printed(4, *updates)) == whole
