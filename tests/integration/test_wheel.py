"""The built package: one ordinary import name with real files, and a bare install that is the client.

Builds without isolation, so that nothing is downloaded for it; the bare install takes its few dependencies from the
package index that pip is configured for, in the versions of constraints.txt.
"""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.stubs import ROOT

HEAVY = ("torch", "ray", "transformers", "numpy", "tokenizers", "gguf", "huggingface_hub", "jinja2", "psutil")


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


def run(command: Sequence[str], **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**environment, **variables})
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python into which the wheel was installed without extras."""
    folder = tmp_path_factory.mktemp("bare")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt"), str(built.wheel)])
    return python


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename for info in archive.infolist()}


def test_wheel_holds_one_import_name_at_its_top(built: Built) -> None:
    tops = {name.split("/")[0] for name in names(built.wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"microtome"}


def test_every_source_file_is_in_the_wheel_as_a_real_file(built: Built) -> None:
    sources = {
        f"{prefix}{path.relative_to(ROOT).as_posix()}"
        for folder, prefix in (("planner", "microtome/"), ("cuda_runtime", "microtome/"), ("actors", "microtome/"))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    face = {path.relative_to(ROOT).as_posix() for path in (ROOT / "microtome").glob("*.py")}
    stubs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "microtome" / "v1").glob("*.py*")}
    assert sources | face | stubs | {"microtome/py.typed"} <= names(built.wheel)
    with zipfile.ZipFile(built.wheel) as archive:
        links = [info.filename for info in archive.infolist() if (info.external_attr >> 28) == 0o12]
    assert links == []


def test_wheel_of_the_tree_equals_the_wheel_of_the_sdist(built: Built, tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)])
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(direct) as ours, zipfile.ZipFile(built.wheel) as theirs:
        assert {i.filename: i.CRC for i in ours.infolist()} == {i.filename: i.CRC for i in theirs.infolist()}


def test_sdist_brings_what_it_takes_to_build_and_to_read(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        tops = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "constraints.txt", "cluster.yaml"}
    assert wanted <= tops
    assert "proto/microtome/v1/worker.proto" in tops


def test_bare_install_requires_nothing_heavy(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = email.message_from_bytes(archive.read(metadata))
    always = [line for line in message.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert always
    assert [line for line in always if line.lower().startswith(HEAVY)] == []
    assert set(message.get_all("Provides-Extra") or []) >= {"server", "dev"}


def test_bare_install_is_the_client(bare: Path) -> None:
    script = f"""
import importlib.util, sys
assert [name for name in {HEAVY!r} if importlib.util.find_spec(name)] == []
import microtome
for name in microtome.__all__:
    getattr(microtome, name)
with microtome.Client("127.0.0.1:1") as client:
    pass
import microtome.planner.slicing, microtome.v1.worker_pb2_grpc
print(microtome.__version__, microtome.__file__)
"""
    version, path = run([str(bare), "-I", "-c", script]).split()
    assert version == "0.1.0"
    assert Path(path).is_relative_to(bare.parent.parent)


def test_bare_installs_command_explains_itself(bare: Path) -> None:
    text = run([str(bare.parent / "microtome"), "--help"], NO_COLOR="1", COLUMNS="120")
    assert "Usage: microtome" in text
    for command in ("serve", "generate", "status", "down", "fetch"):
        assert command in text
