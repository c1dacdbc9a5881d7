"""The documentation says what the code says: its made parts are current, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.stubs import ROOT

TEXTS = [*pages.pages(), *sorted(ROOT.glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"^\s*make ([a-z-]+)", re.MULTILINE)


def test_made_parts_are_what_the_code_says() -> None:
    assert [str(path.relative_to(ROOT)) for path in pages.outdated()] == []


def test_a_stale_made_part_is_noticed() -> None:
    page = "before\n<!-- made: service-errors -->\n| older |\n<!-- end -->\nafter\n"
    fresh = pages.made(page)
    assert "older" not in fresh
    assert "| `AtCapacity` |" in fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("after\n")
    assert pages.made(fresh) == fresh


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(COMMAND.findall(text))
    assert named - targets == set()


def test_every_setting_has_a_meaning() -> None:
    tables = "".join(pages.settings(section) for section in pages.sections())
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]* \| (.*) \|$", tables, re.MULTILINE)
    assert len(rows) > 30
    assert [key for key, meaning in rows if len(meaning) < 3] == []


def test_every_section_of_the_configuration_is_on_its_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- made: settings-(\w+) -->", page)) == set(pages.sections())


def test_every_decision_is_listed_once_and_numbered_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    files = sorted(path.name for path in folder.glob("0*.md"))
    assert [name[:4] for name in files] == [f"{number:04d}" for number in range(1, len(files) + 1)]
    assert re.findall(r"\]\((0[^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")) == files
