"""The repository is laid out as its package promises: one import name, three links, generated code that is current."""

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import microtome
from tests.support import stubs
from tests.support.stubs import ROOT

FOLDERS = ("planner", "cuda_runtime", "actors")  # at the top, and linked into the package
SOURCES = ("microtome", "planner", "cuda_runtime", "actors", "bench", "tests", "examples", "docs")


def python_files() -> Iterator[Path]:
    """Every Python file of ours once; the links would show the package's folders a second time."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                yield path


def face_modules() -> list[str]:
    return [
        f"microtome.{module.name}"
        for module in pkgutil.iter_modules(microtome.__path__)
        if not module.ispkg and module.name != "__main__"
    ]


def imported_roots(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    absolute = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in absolute | plain}


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_links_to_the_folder_at_the_top(folder: str) -> None:
    assert os.readlink(ROOT / "microtome" / folder) == f"../{folder}"
    assert (ROOT / "microtome" / folder / "__init__.py").samefile(ROOT / folder / "__init__.py")


def test_package_holds_no_other_link() -> None:
    assert {path.name for path in (ROOT / "microtome").iterdir() if path.is_symlink()} == set(FOLDERS)


def test_no_file_imports_our_folders_by_their_bare_names() -> None:
    files = list(python_files())
    assert len(files) > 50
    bare = {str(path.relative_to(ROOT)): imported_roots(path) & {*FOLDERS, "proto"} for path in files}
    assert {name: roots for name, roots in bare.items() if roots} == {}


def test_proto_holds_no_python() -> None:
    # ray[default] installs an import package of that name
    assert [path for path in (ROOT / "proto").rglob("*") if path.is_file() and path.suffix != ".proto"] == []


def test_generated_code_is_what_protoc_makes_of_the_protos() -> None:
    assert stubs.outdated() == []


def test_stale_generated_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = stubs._contents(ROOT / stubs.PACKAGE)
    changed = {**committed, "worker_pb2.py": b"older", "left_over_pb2.py": b""}
    monkeypatch.setattr(stubs, "_contents", lambda folder: changed if ROOT in folder.parents else committed)
    assert stubs.outdated() == ["left_over_pb2.py", "worker_pb2.py"]


@pytest.mark.parametrize("name", face_modules())
def test_every_public_name_that_a_module_lists_exists(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert [public for public in listed if not hasattr(module, public)] == []
    assert len(set(listed)) == len(listed)


def test_the_packages_public_names_are_offered_by_dir() -> None:
    assert set(microtome.__all__) <= set(dir(microtome))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'microtome' has no attribute 'Cleint'"):
        _ = microtome.Cleint


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import microtome.planner.types", {"grpc", "google", "torch", "ray", "rich", "typer"}),
        ("import microtome; microtome.Client", {"torch", "ray", "transformers", "numpy", "typer"}),
        ("import microtome", {"grpc", "google", "torch", "ray", "rich", "typer"}),
    ],
)
def test_import_loads_no_more_than_it_needs(statement: str, unwanted: set[str]) -> None:
    script = f"{statement}; import sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert unwanted & set(loaded.split()) == set()
