"""The whole of `python -m bench.peers`, over engines that make their answers up."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.peer_engines.rounds import Plan
from tests.unit.test_peers_figures import SMOLLM2
from tests.unit.test_peers_rounds import engine

ARGUMENTS = ("--works", "W2,W3", "--rounds", "2")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs it with more arguments; gives its status and what it wrote."""
    model = tmp_path / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(peers, "Plan", partial(Plan, look_s=0, limits=engine("limits")))

    def run(*arguments: str, **script: object) -> tuple[int, str, dict[str, Any]]:
        engines = (engine("microtome"), engine("peer", **script))
        monkeypatch.setattr(peers, "chosen", lambda names: engines)
        out = tmp_path / "found"
        where = ("--home", str(tmp_path), "--out", str(out), "--logs", str(tmp_path / "logs"))
        monkeypatch.setattr(sys, "argv", ["peers", "some", *where, *ARGUMENTS, *arguments])
        status = peers.main()
        return status, out.with_suffix(".md").read_text(), json.loads(out.with_suffix(".json").read_text())

    return run


def test_both_dtypes_are_measured_one_after_the_other_and_written(command: Any) -> None:
    status, text, value = command("--dtypes", "bfloat16,float32")
    assert status == 0
    assert list(value["dtypes"]) == ["bfloat16", "float32"]
    for part in value["dtypes"].values():
        assert len(part["engines"]["peer"]["rounds"]) == 2
        assert part["times_as_fast"]["microtome"]["peer"]["W2 decode"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert "## bfloat16, 2 rounds" in text
    assert "## float32, 2 rounds" in text


def test_tokens_are_compared_at_float32_and_a_parting_is_looked_at(command: Any) -> None:
    _, text, value = command("--dtypes", "bfloat16,float32", other_from=5)
    assert value["dtypes"]["bfloat16"]["tokens"] == []
    (found,) = value["dtypes"]["float32"]["tokens"]
    # W2's answer parts at its token 5, W3's one token is alike; the lead is asked for behind 64 tokens and 5 of output.
    assert found == {
        "peer": "the engine peer",
        "requests": 2,
        "equal": 1,
        "first_position": 5,
        "largest_lead": 69 / 1000,
    }
    assert "| the engine peer | 1 of 2 | 5 | 6.9e-02 |" in text


def test_an_engine_that_was_there_and_is_out_makes_the_status_1(command: Any) -> None:
    status, text, _ = command("--dtypes", "bfloat16", short_after=0)
    assert status == 1
    assert "Not measured:" in text


def test_an_unknown_dtype_or_work_is_refused_before_anything_starts(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (("--dtypes", "float16"), "dtype 'float16' is none of bfloat16, float32"),
        (("--works", "W9"), "work 'W9' is none of W1, W2, W3, W4, W4p"),
    ):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert said in capsys.readouterr().err


def test_without_the_model_the_command_that_installs_it_is_named(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command("--home", str(tmp_path / "elsewhere"))
    assert "`make bench-peers` installs it" in capsys.readouterr().err
