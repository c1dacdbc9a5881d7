"""Rounds of engines in processes of their own: turns, refusals, ends, and what is written of them."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.peer_engines.engine_process import EngineFailed, EngineProcess
from bench.peer_engines.limits import Demand
from bench.peer_engines.report import Agreement, as_value, markdown, part_of
from bench.peer_engines.roster import DTYPES, ENGINES, OURS, SETS, Engine, chosen
from bench.peer_engines.rounds import WARM_UP, Bench, Entrant, Measured, Plan
from bench.peer_engines.workload import WORKS

DEMAND = Demand(layer_weights=90, head_weights=10, layers=1, attention_width=1)
SCRIPT = (sys.executable, "-m", "tests.support.scripted_engine")


@dataclass(frozen=True)
class ScriptedEngine(Engine):
    """Takes its settings from here: the bench has none for peers."""

    script: Mapping[str, object] = field(default_factory=dict)

    def command(self, home: Path) -> list[str]:
        return list(SCRIPT)

    def asked(self, home: Path, dtype: str, cores: tuple[int, ...], settings: Mapping[str, object]) -> dict[str, str]:
        return {"BENCH_MODEL": "none", "BENCH_DTYPE": dtype, "BENCH_SETTINGS": json.dumps(dict(self.script))}


def engine(name: str, stays: bool = True, **script: object) -> ScriptedEngine:
    return ScriptedEngine(name, f"the engine {name}", "none", lambda dtype: "", stays=stays, script=script)


def measured(tmp_path: Path, *engines: Engine, rounds: int = 2, minutes: float = 5) -> tuple[Measured, list[str]]:
    plan = Plan(
        engines=engines,
        dtype="bfloat16",
        works=("W2", "W4p"),
        rounds=rounds,
        minutes=minutes,
        home=tmp_path,
        cores=(0,),
        settings={},
        look_s=0,
        limits=engine("limits"),
    )
    told: list[str] = []
    with Bench(plan, tmp_path, told.append) as bench:
        return bench.run(), told


def test_each_engine_has_its_turn_in_every_round_and_another_begins_each(tmp_path: Path) -> None:
    found, told = measured(tmp_path, engine("one"), engine("two"), engine("three", stays=False), rounds=3)
    turns = [line.split(": ")[1].split()[0] for line in told if ": " in line]
    assert turns == ["one", "two", "three", "two", "three", "one", "three", "one", "two"]
    assert {len(one.rounds) for one in found.entrants} == {3}
    assert [len(one.start_s) for one in found.entrants] == [1, 1, 3]
    assert len(found.limits) == 3


def test_figures_of_a_turn_are_those_of_its_records(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, engine("one"), rounds=1)
    (only,) = found.entrants
    assert only.rounds == [{"W2": {"decode": 1.0}, "W4p": {"time": 16.0}}]
    assert only.tokens["W2"] == [[64] * 128]
    assert only.facts["scripted"] == "1"


def test_an_engine_whose_lengths_differ_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    wrong = engine("wrong", short_after=len(WARM_UP) + 1)
    found, told = measured(tmp_path, wrong, engine("right"))
    out, right = found.entrants
    assert not out.rounds
    assert "tokens of output" in out.out
    assert any("wrong bfloat16 is out" in line for line in told)
    assert len(right.rounds) == 2
    assert not right.out


def test_an_engine_that_ends_is_out_and_its_log_is_named(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, engine("dies", dies_after=1), engine("right"), rounds=1)
    log = tmp_path / "dies-bfloat16.log"
    assert found.entrants[0].out == f"it has ended; see {log}"
    assert "as scripted" in log.read_text()
    assert found.entrants[1].rounds


def test_an_engine_that_is_not_installed_is_out_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    absent = Engine("absent", "absent", "none", lambda dtype: "its/model")
    found, _ = measured(tmp_path, absent, engine("right"), rounds=1)
    assert found.entrants[0].out == f"it is not installed: there is no {tmp_path / 'its/model'}"


def test_no_round_begins_that_would_end_beyond_the_minutes(tmp_path: Path) -> None:
    found, told = measured(tmp_path, engine("one"), rounds=50, minutes=0)
    assert len(found.entrants[0].rounds) == 1
    assert told[-1] == "the next would end beyond 0 min: no more"


def test_processes_are_gone_when_the_bench_is_left(tmp_path: Path) -> None:
    environment = engine("one").asked(tmp_path, "bfloat16", (0,), {})
    process = EngineProcess(SCRIPT, environment, tmp_path / "log")
    pid = process._process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_is_held_stands_still_and_can_still_be_ended(tmp_path: Path) -> None:
    process = EngineProcess(SCRIPT, engine("one").asked(tmp_path, "bfloat16", (0,), {}), tmp_path / "log")
    question = {"requests": [], "first": [], "in_flight": 1}
    process.hold()
    with pytest.raises(EngineFailed, match="no answer"):
        process.ask(question, 0.2)
    process.go_on()
    assert process.ask({}, 60)["records"] == []  # to the question before
    process.hold()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process._process.pid, 0)


def test_an_engine_that_is_silent_fails_after_its_time(tmp_path: Path) -> None:
    environment = engine("one").asked(tmp_path, "bfloat16", (0,), {})
    process = EngineProcess(SCRIPT, environment, tmp_path / "log")
    try:
        question = {"requests": [], "first": [], "in_flight": 1}
        with pytest.raises(EngineFailed, match="no answer after 0 s"):
            process.ask(question, 0)
    finally:
        process.close()


def entrant(name: str, decode: float, prefill: float) -> Entrant:
    one = Entrant(engine(name))
    one.rounds = [{"W2": {"decode": decode}, "W3": {"prefill": prefill}}]
    one.cores = [{"busy": 2.0, "stolen": 0.0, "before": 0.0}]
    return one


def test_tables_hold_figures_ratios_and_shares_of_the_limits() -> None:
    limit = {"read_bytes_per_s": 200 * 80.0, "operations_per_s": DEMAND.prefill_operations(1024) * 1.0}
    both = Measured("bfloat16", [entrant(OURS, 40.0, 512.0), entrant("peer", 20.0, 1024.0)], [limit])
    part = part_of(both, DEMAND, [Agreement("peer", 8, 7, 3, 0.001)])
    text = markdown("Title", ["facts"], [part])
    assert "| the engine peer | – | – | – | 20.0 | 1024 | – | – | 2.00 |" in text
    assert "| the engine peer | – | – | – | 2.00 | 0.50 | – | – |" in text
    assert "W2 at 0.50 of the 80 tok/s" in text
    assert "W3 at 0.50 of the 1024 tok/s" in text
    assert "| peer | 7 of 8 | 3 | 1.0e-03 |" in text
    value = as_value({}, [part])["dtypes"]["bfloat16"]
    assert value["times_as_fast"]["microtome"]["peer"]["W2 decode"]["median"] == 2.0
    json.dumps(value)


def test_a_set_names_engines_and_ours_is_in_each() -> None:
    for name, names in SETS.items():
        assert tuple(one.name for one in chosen(name)) == names
        assert OURS in names
    assert {one.name for one in ENGINES} == set(SETS["main"]) | set(SETS["rest"]) | set(SETS["all"])
    assert [one.name for one in chosen("vllm,openvino")] == ["vllm", "openvino"]
    with pytest.raises(ValueError, match="engine 'sglang' is none of main, rest, all, microtome"):
        chosen("vllm,sglang")


def test_every_engine_has_its_module_in_the_repository() -> None:
    folder = Path(__file__).parents[2] / "bench" / "peer_engines"
    assert [one.name for one in ENGINES if not (folder / f"{one.module}.py").is_file()] == []
    assert {dtype for one in ENGINES for dtype in one.dtypes} == set(DTYPES)
    assert set(WARM_UP) <= set(WORKS)
