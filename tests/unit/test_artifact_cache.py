"""The folder of compiled models: what it says of itself, and how things leave it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner

from microtome.cli import app
from microtome.cuda_runtime import artifact
from microtome.cuda_runtime.artifact_cache import BEING_MADE, cached, clear_unfinished, remove
from microtome.planner.errors import BadConfig, WrongState

HERE = artifact.machine_kind(torch.device("cpu"))


def put(folder: Path, key: str, **differing: Any) -> Path:
    """An artifact as far as a listing looks: a signed manifest and 1000 bytes beside it."""
    path = folder / key
    path.mkdir(parents=True)
    fields: dict[str, Any] = {
        "format": artifact.FORMAT,
        "torch": torch.__version__,
        "machine": HERE,
        "model": "toy",
        "fingerprint": "f",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 8,
        "context_length": 16,
        "session_tokens": 16,
        "dtype": "float32",
        "kv_dtype": "float32",
        "quantize": "none",
        "attention": "cpu",
        "layers": [{"kv_heads": 1, "head_size": 8, "window": 0}],
        "max_step_tokens": 8,
        "aliases": {},
        "files": {name: [1, ""] for name in ("decode.pt2", "prefill.pt2", artifact.WEIGHTS)},
    } | differing
    text = json.dumps(fields | {"digest": artifact._digest_of(fields)})
    (path / artifact.MANIFEST).write_text(text)
    (path / artifact.WEIGHTS).write_bytes(bytes(1000))
    return path


def leave_unfinished(folder: Path, key: str) -> Path:
    path = folder / f".making-{key}-x1y2"
    (path / "artifact").mkdir(parents=True)
    (path / "artifact" / artifact.WEIGHTS).write_bytes(bytes(500))
    return path


def test_a_listing_says_what_each_is_what_it_takes_and_whether_anything_here_can_use_it(tmp_path: Path) -> None:
    put(tmp_path, "a")
    put(tmp_path, "b", torch="1.0", quantize="int8")
    put(tmp_path, "c", machine="cpu toaster")
    put(tmp_path, "d", format=0)
    leave_unfinished(tmp_path, "e")
    found = {item.key: item for item in cached(tmp_path)}
    assert {key: item.unusable for key, item in found.items()} == {
        "a": "",
        "b": f"made for torch 1.0, this is {torch.__version__}",
        "c": "made for cpu toaster",
        "d": f"check 'format': it is of format 0, this reads {artifact.FORMAT}",
        "e": "its maker was killed",
    }
    assert (found["a"].model, found["a"].dtype, found["b"].dtype) == ("toy", "float32", "float32, int8")
    assert found["a"].size == 1000 + (tmp_path / "a" / artifact.MANIFEST).stat().st_size
    assert found["e"].size == 500


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert cached(tmp_path / "none") == []


def test_removing_takes_the_artifact_and_what_a_killed_maker_left_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "a")
    put(tmp_path, "b")
    leave_unfinished(tmp_path, "a")
    remove(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("key", ["nobody", "..", "../a", ""])
def test_what_is_no_artifact_is_not_removed(tmp_path: Path, key: str) -> None:
    put(tmp_path, "a")
    (tmp_path / "inner").mkdir()
    with pytest.raises(BadConfig, match="no artifact"):
        remove(tmp_path / "inner", key)
    assert artifact.is_artifact(tmp_path / "a")


def test_what_is_being_made_is_said_to_be_and_stays(tmp_path: Path) -> None:
    left = leave_unfinished(tmp_path, "a")
    with FileLock(tmp_path / "a.lock"):
        assert [item.unusable for item in cached(tmp_path)] == [BEING_MADE]
        with pytest.raises(WrongState, match="artifact a is being made"):
            remove(tmp_path, "a")
    assert left.is_dir()


def test_the_next_maker_clears_what_a_killed_one_of_the_same_left(tmp_path: Path) -> None:
    left, other = leave_unfinished(tmp_path, "a"), leave_unfinished(tmp_path, "b")
    clear_unfinished(tmp_path / "a")
    assert not left.exists()
    assert other.exists()


def test_the_command_lists_and_deletes_what_is_of_no_use_here(tmp_path: Path) -> None:
    put(tmp_path, "a")
    put(tmp_path, "b", torch="1.0")
    leave_unfinished(tmp_path, "c")
    folder = ["--set", f"runtime.artifact_folder={tmp_path}"]
    listed = CliRunner().invoke(app, ["artifacts", *folder])
    assert listed.exit_code == 0
    assert {line.split()[0] for line in listed.stdout.splitlines() if line.startswith((" a ", " b ", " c "))} == set(
        "abc"
    )
    CliRunner().invoke(app, ["artifacts", "--remove-unusable", *folder])
    assert [item.key for item in cached(tmp_path)] == ["a"]
    refused = CliRunner().invoke(app, ["artifacts", "--remove", "zz", *folder])
    assert refused.exit_code == 1
    CliRunner().invoke(app, ["artifacts", "--remove", "a", *folder])
    assert cached(tmp_path) == []
