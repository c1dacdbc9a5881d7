"""Foreign text cannot act on a terminal, and fits where it is put."""

import pytest
from rich.cells import cell_len

from microtome.terminal import head, one_line, printable, tail


def test_control_characters_are_dropped_and_line_ends_kept() -> None:
    assert printable("a\x1b[31mb\r\n\tc\x07\x9b\udcff") == "a[31mb\n\tc"


def test_one_line_has_single_blanks() -> None:
    assert one_line("  a\n\n b\t c \x00") == "a b c"


@pytest.mark.parametrize("line", ["hello world", "漢字漢字漢字", "a漢b字c", ""])
@pytest.mark.parametrize("width", range(14))
def test_what_is_cut_fits_and_is_marked(line: str, width: int) -> None:
    for cut, kept in ((tail(line, width), line.endswith), (head(line, width), line.startswith)):
        assert cell_len(cut) <= width
        if cell_len(line) <= width:
            assert cut == line
        elif width:
            assert "…" in (cut[0], cut[-1])
            assert kept(cut.strip("…"))


def test_the_tail_is_the_end_and_the_head_the_beginning() -> None:
    assert tail("hello world", 6) == "…world"
    assert head("hello world", 6) == "hello…"
    assert head("hello world", 8, "...") == "hello..."
