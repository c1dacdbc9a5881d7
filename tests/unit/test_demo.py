"""What the demo shows of its chats: one line each on a terminal, plain lines elsewhere, a table of times."""

import io

import pytest
from rich.console import Console

from microtome.answers import FinishReason, Update, Usage
from microtome.chats import CHATS, Chat
from microtome.demo import Lines, Row, times_table, whole_run
from microtome.timing import Timing


def console(width: int, *, terminal: bool = True, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)


def row(topic: str = "tale", text: str = "", *, over: bool = False, error: str = "") -> Row:
    made = Row(Chat(topic, "Why?", 8), Timing(10.0), text=text, error=error)
    if over:
        made.usage = Usage(prompt_tokens=3, output_tokens=2, cached_tokens=0)
    return made


def shown(view: Lines, on: Console) -> list[str]:
    with on.capture() as captured:
        on.print(view.lines())
    return captured.get().splitlines()


def printed(on: Console) -> list[str]:
    on.file.flush()
    return on.file.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [24, 40, 63, 64, 80, 200])
def test_every_chat_has_one_line_that_fits(width: int) -> None:
    on = console(width)
    long = "many words and 漢字 of it\n" * 30
    rows = [row(), row(text=long), row(text=long, over=True), row(error="needs 1200 cells, 800 available " * 9)]
    lines = shown(Lines(rows, on), on)
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines)


def test_a_line_shows_the_end_while_it_grows_and_the_beginning_afterwards() -> None:
    on = console(60)
    text = "In the beginning " + "and so on " * 30 + "at the end"
    growing, over = shown(Lines([row(text=text), row(text=text, over=True)], on), on)
    assert growing.startswith("▸ tale ")
    assert growing.rstrip().endswith("at the end")
    assert over.startswith("✓ tale ")
    assert "In the beginning" in over


def test_a_terminal_without_unicode_gets_plain_marks() -> None:
    on = console(60, encoding="ascii")
    lines = shown(Lines([row(text="x " * 90), row(text="x", over=True), row(error="no")], on), on)
    assert [line[0] for line in lines] == ["-", "*", "x"]
    assert all(line.isascii() for line in lines)


def test_plain_lines_lose_no_word_whatever_the_pieces() -> None:
    text = "one two three\nfour " + "five six seven " * 12 + "eight" + "x" * 200 + " end"
    for size in (1, 3, 7, 500):
        on = console(80, terminal=False)
        said = row()
        view = Lines([said], on)
        for start in range(0, len(text), size):
            said.text += text[start : start + size]
            view.changed(said)
        said.usage = Usage(prompt_tokens=1, output_tokens=1, cached_tokens=0)
        view.changed(said)
        lines = printed(on)
        assert all(line.startswith("tale ") for line in lines)
        bodies = [line.removeprefix("tale").strip() for line in lines]
        assert bodies[0] == "one two three"
        assert "".join(bodies).replace(" ", "") == text.replace(" ", "").replace("\n", "")
        assert max(map(len, bodies)) <= 88


def test_a_plain_chat_that_fails_says_so_on_its_own_line() -> None:
    on = console(80, terminal=False)
    view = Lines([said := row(text="so far", error="step 12\nfailed")], on)
    view.changed(said)
    assert printed(on)[-1] == "tale          failed: step 12 failed"


def test_an_update_adds_text_tokens_and_in_the_end_the_usage() -> None:
    said = row()
    update = {"generation_id": "g", "seed": 7}
    said.add(Update(text="a", token_ids=(1, 2), offset=0, **update), 10.5)  # type: ignore[arg-type]
    assert not said.over
    usage = Usage(prompt_tokens=3, output_tokens=3, cached_tokens=0)
    finish = FinishReason.STOP
    said.add(Update(text="b", token_ids=(3,), offset=2, finish_reason=finish, usage=usage, **update), 11.0)  # type: ignore[arg-type]
    assert (said.text, said.over, said.timing.output_tokens) == ("ab", True, 3)


def test_the_table_has_the_times_of_each_chat_and_none_where_it_failed() -> None:
    good = row("capital", "Paris.", over=True)
    good.timing.note(10.25, 1)
    good.timing.note(10.5, 1)
    on = console(80)
    with on.capture() as captured:
        on.print(times_table([good, row("haiku", error="no")]))
    lines = captured.get().splitlines()
    assert [line.split() for line in lines if line.split() and line.split()[0] in ("capital", "haiku")] == [
        ["capital", "3", "2", "250", "250.0", "250.0"],
        ["haiku", "–", "–", "–", "–", "–"],
    ]


def test_the_whole_run_is_timed_from_the_first_call_to_the_last_token() -> None:
    first, second = row(over=True), row(over=True)
    second.timing = Timing(9.0)
    first.timing.note(11.0, 5)
    second.timing.note(13.0, 15)
    assert whole_run([first, second]) == "2 chats at once: 20 output tokens in 4.0 s, 5.0 tokens/s; median TTFT 2500 ms"
    assert whole_run([first, second, row(error="no")]).startswith("3 chats at once (1 failed): 20 output tokens")
    assert whole_run([row(error="no")]) == "no chat was answered"


def test_the_chats_are_eight_of_different_lengths() -> None:
    assert len(CHATS) == len({chat.topic for chat in CHATS}) == 8
    assert len({chat.max_new_tokens for chat in CHATS}) >= 5
    assert any(chat.messages[0]["role"] == "system" for chat in CHATS)
    assert all(chat.messages[-1] == {"role": "user", "content": chat.question} for chat in CHATS)
