"""The parts of docs/ that are made from the code: tables of settings and errors, and which test holds which rule.

A page marks such a part with `<!-- made: NAME -->` and `<!-- end -->`. `python -m tests.support.pages write` fills them
in; `check` ends with 1 and the pages' names when one is not what the code says today.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from microtome.actors.config import ServiceConfig
from microtome.actors.status import STATUS
from microtome.errors import BY_STATUS
from microtome.planner import errors
from tests.support.stubs import ROOT

PART = re.compile(r"(<!-- made: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
RULE = re.compile(r"\b[A-LX]\d{1,2}\b")
HOLDS = "# holds "  # above a test whose name carries no number: `# holds I2, I5`


def settings(section: str) -> str:
    """The settings of one section of the configuration, "service" for the one that stands alone included there."""
    kind = get_type_hints(ServiceConfig)[section]
    comments = _comments(kind)
    rows = [
        (f"{section}.{part.name}", _default(part), comments.get(part.name, "")) for part in fields(kind) if part.init
    ]
    if section == "service":
        rows.insert(0, ("model", "required", _comments(ServiceConfig)["model"]))
    lines = [f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in rows]
    return "| setting | default | meaning |\n|---|---|---|\n" + "".join(lines)


def sections() -> list[str]:
    return [name for name, kind in get_type_hints(ServiceConfig).items() if is_dataclass(kind)]


def service_errors() -> str:
    """Each error raised on purpose, what it means, and the gRPC status that a client gets."""
    rows = [
        f"| `{kind.__name__}` | {(kind.__doc__ or '').strip().splitlines()[0]} | `{code.name}` |\n"
        for kind, code in STATUS.items()
        if kind.__module__ == errors.__name__
    ]
    return "| error | meaning | gRPC status |\n|---|---|---|\n" + "".join(rows)


def client_errors() -> str:
    """Each class the client library raises, and the statuses that become it."""
    classes = dict.fromkeys(BY_STATUS.values())
    rows = [
        f"| `microtome.errors.{kind.__name__}` | {(kind.__doc__ or '').strip().splitlines()[0]} | "
        f"{', '.join(f'`{status}`' for status, own in BY_STATUS.items() if own is kind)} |\n"
        for kind in classes
    ]
    return "| class | meaning | gRPC status |\n|---|---|---|\n" + "".join(rows)


def rules() -> str:
    """For each rule of docs/contract.md, the tests that hold it."""
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    known = re.findall(r"^- \*\*([A-LX]\d+)\*\*", text, re.MULTILINE)
    held = rule_tests()
    return "| rule | tests |\n|---|---|\n" + "".join(
        f"| {rule} | {'<br>'.join(f'`{test}`' for test in held.get(rule, [])) or '—'} |\n" for rule in known
    )


def rule_tests() -> Mapping[str, list[str]]:
    """Rule → tests that say that they hold it, in their names or in a comment above them, as `file::test`."""
    held: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for test in _tests(ast.parse(source)):
            first = min(node.lineno for node in (test, *test.decorator_list))
            above = lines[first - 2].strip() if first > 1 else ""
            said = test.name.replace("_", " ") + (above if above.startswith(HOLDS) else "")
            for rule in dict.fromkeys(RULE.findall(said)):
                held.setdefault(rule, []).append(f"{path.relative_to(ROOT / 'tests')}::{test.name}")
    return held


MADE: Mapping[str, Callable[[], str]] = {
    **{f"settings-{section}": partial(settings, section) for section in sections()},
    "service-errors": service_errors,
    "client-errors": client_errors,
    "rules": rules,
}


def made(page: str) -> str:
    """`page` with its marked parts as the code has them now. Raises KeyError for a part that nothing makes."""
    return PART.sub(lambda part: f"{part[1]}{MADE[part['name']]()}{part[3]}", page)


def outdated() -> list[Path]:
    """Pages whose marked parts are not current."""
    return [path for path in pages() if made(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]


def pages() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def _default(part: "Field[Any]") -> str:
    if part.default is MISSING:
        return "required" if part.default_factory is MISSING else "—"
    value = part.default
    if isinstance(value, tuple):
        return f"`{', '.join(map(str, value))}`" if value else "none"
    return "none" if value is None or value == "" else f"`{value}`"


def _comments(kind: type[Any]) -> dict[str, str]:
    """Field name → the comment behind it."""
    path = Path(sys.modules[kind.__module__].__file__ or "")
    source = path.read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ").replace("|", "\\|")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = [
        node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    return {
        node.target.id: comments[node.lineno]
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.lineno in comments
    }


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def main(arguments: list[str]) -> int:
    if arguments == ["write"]:
        for path in outdated():
            path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if arguments == ["check"]:
        names = [str(path.relative_to(ROOT)) for path in outdated()]
        if names:
            print(f"these pages are out of date, run `make docs`: {', '.join(names)}", file=sys.stderr)
        return 1 if names else 0
    print("usage: python -m tests.support.pages write|check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
