"""A journal runs again to the same instructions; a difference is found and shown; what-if answers in figures."""

import json
from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.errors import BadConfig, BadInput
from microtome.planner.events import Event, Instruction, Scale, Tick, WorkerJoined
from microtome.planner.journal import Encoder, Entry, Life, read_journal
from microtome.planner.records import to_json
from microtome.planner.replay import replay
from microtome.planner.scaling import ScalingConfig
from microtome.planner.what_if import Percentiles, what_if
from tests.simulation.world import World
from tests.support.recorded import Recorded, RecordedFleet, Written, busy_day

S = 1_000_000


@pytest.mark.parametrize("seed", range(12))
def test_a_simulated_life_replays_without_a_difference(seed: int) -> None:
    world = World(seed)
    encoder = Encoder()
    journal = [encoder.header(world.plot.config)]
    handle = world.control.handle  # of the first driver, if it is restarted

    def written(event: Event) -> list[Instruction]:
        instructions = handle(event)
        journal.append(encoder.entry(event, instructions))
        return instructions

    world.control.handle = written  # type: ignore[method-assign]
    world.live()
    (life,) = read_journal(b"".join([*journal, encoder.waiting()])).lives
    report = replay(life, life.config)
    assert report.difference is None, str(report)
    assert report.entries == len(life) == len(journal) - 1 > 10


def life_of(cluster: Written) -> Life:
    (life,) = read_journal(cluster.journal).lives
    return life


def test_a_replay_finds_the_first_difference_and_shows_both_sides() -> None:
    life = life_of(busy_day())
    assert replay(life, life.config).difference is None
    other = PlannerConfig(max_decodes=2, max_prefill_tokens=8)
    report = replay(life, other)
    difference = report.difference
    assert difference is not None
    before = [entry for entry in life if entry.record < difference.record]
    assert replay(before, other).difference is None
    assert to_json(difference.recorded) != to_json(difference.replayed)
    assert f"record {difference.record}" in str(report)
    assert "recorded: RunStep" in str(report)


def test_a_replay_sees_an_instruction_that_is_missing_and_one_too_many() -> None:
    entries = list(life_of(busy_day()))
    emptied = [replace(e, instructions=[], body=b"") if n == 1 else e for n, e in enumerate(entries)]
    difference = replay(emptied, PlannerConfig()).difference
    assert difference is not None
    assert (difference.record, difference.at, difference.recorded) == (2, 0, None)
    assert "recorded: nothing more" in str(difference)
    more = [replace(e, instructions=[*e.instructions, *e.instructions], body=b"") for e in entries]
    difference = replay(more, PlannerConfig()).difference
    assert difference is not None
    assert difference.replayed is None


def test_bytes_that_another_encoder_chose_are_no_difference() -> None:
    entries = [replace(entry, body=b"other bytes") for entry in life_of(busy_day())]
    assert replay(entries, PlannerConfig()).difference is None


def test_an_event_that_broke_the_planner_breaks_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = list(life_of(busy_day()))[:5]
    last = Entry(Tick(at_us=10**9), [], raised="KeyError: 'a defect'", record=6)
    handle = Control.handle

    def break_on_tick(control: Control, event: Event) -> list[Instruction]:
        if isinstance(event, Tick):
            raise KeyError("a defect")
        return handle(control, event)

    mended = replay([*entries, last], PlannerConfig())
    assert mended.difference is not None
    assert "the planner raised KeyError" in str(mended)
    monkeypatch.setattr(Control, "handle", break_on_tick)
    report = replay([*entries, last], PlannerConfig())
    assert report.difference is None
    assert "broke on the last one, as recorded: KeyError" in str(report)


def test_what_if_of_the_same_policy_and_workers_equals_the_simulation_of_the_journal() -> None:
    life = life_of(busy_day())
    report = what_if(life, life.config)
    assert report.own == report.other
    assert report.own.output_tokens == report.recorded.output_tokens
    assert report.own.generations == report.recorded.generations == 40


def test_more_workers_shorten_the_simulated_waits() -> None:
    life = life_of(busy_day())
    report = what_if(life, life.config, workers=3)
    assert report.other.ttft.p90_ms < report.own.ttft.p90_ms / 1.5
    assert report.other.span_ms < report.own.span_ms
    assert report.other.output_tokens == report.own.output_tokens


def test_another_policy_changes_who_waits_and_not_what_is_delivered() -> None:
    life = life_of(busy_day())
    report = what_if(life, life.config, policy="fair-priority")
    assert report.other.output_tokens == report.own.output_tokens
    assert report.other.ttft != report.own.ttft


def scaled_day() -> RecordedFleet:
    """Some time without work, then a load for several workers, an update meanwhile, then nothing."""
    scaling = ScalingConfig(min_workers=1, max_workers=4, settle_s=2, idle_s=10)
    cluster = RecordedFleet(scaling, 1, start_us=S // 10, usable_cells=1000)
    cluster.advance(10 * S)
    for n in range(60):
        cluster.submit(range(n, n + 40), 100)
    cluster.advance(S)
    cluster.update(1)
    cluster.advance(60 * S)
    assert not cluster.control._generations
    return cluster


def test_a_fleet_that_grows_is_updated_and_shrinks_does_so_in_the_simulation() -> None:
    cluster = scaled_day()
    life = life_of(cluster)
    assert replay(life, life.config).difference is None
    report = what_if(life, life.config)
    assert report.own == report.other
    assert report.own.output_tokens == report.recorded.output_tokens == 60 * 100
    assert report.own.refused == 0
    assert 1 < report.own.workers < 4
    assert 1 < report.recorded.workers < 4
    fixed = what_if(life, life.config, workers=1).other
    assert fixed.workers == pytest.approx(1)
    assert fixed.output_tokens == report.own.output_tokens
    assert "workers as recorded" in str(report)


def test_an_update_whose_workers_never_came_is_taken_back_in_the_simulation_too() -> None:
    cluster = RecordedFleet(ScalingConfig(min_workers=2, max_workers=2), 2)
    cluster.advance(3 * S)
    cluster.fail.add(1)
    cluster.update(1)
    cluster.submit(range(30), 50)
    cluster.advance(10 * S)
    assert cluster.updates[-1].error is not None
    life = life_of(cluster)
    report = what_if(life, life.config)
    assert report.own.output_tokens == report.recorded.output_tokens == 50
    assert report.own.workers == pytest.approx(2)


def test_a_simulation_that_comes_to_no_end_says_so() -> None:
    cluster = RecordedFleet(ScalingConfig(min_workers=0, max_workers=1, idle_s=1), 0)
    cluster.submit(range(5), 5)
    cluster.advance(10 * S)
    life = life_of(cluster)
    # Nobody may start a worker in this one.
    entries = [e for e in life if not isinstance(e.event, Scale)]
    none = replace(entries[0], event=Scale(at_us=0, scaling=ScalingConfig(min_workers=0, max_workers=1), count=0))
    joined = [e if not isinstance(e.event, WorkerJoined) else _of_revision(e, 7) for e in entries]
    with pytest.raises(BadInput, match="the simulation comes to no end: 1 generations got no token for an hour"):
        what_if([replace(none, instructions=[]), *joined], life.config)


def _of_revision(entry: Entry, revision: int) -> Entry:
    assert isinstance(entry.event, WorkerJoined)
    return replace(entry, event=replace(entry.event, revision=revision))


def test_sessions_of_a_journal_take_their_turns_in_the_simulation() -> None:
    cluster = Recorded(PlannerConfig())
    session = cluster.open()
    for turn in range(3):
        cluster.submit(range(turn, turn + 4), 3, session=session)
        cluster.run()
    twin = cluster.clone(session).session
    cluster.submit((1, 2), 2, session=twin)
    cluster.run()
    cluster.rewind(session, 5)
    cluster.submit((7,), 4, session=session)
    cluster.run()
    cluster.close(session)
    life = life_of(cluster)
    report = what_if(life, life.config, workers=2)
    assert report.other.output_tokens == report.recorded.output_tokens == 3 * 3 + 2 + 4
    assert report.other.refused == 0


def test_a_report_is_a_table_and_plain_data() -> None:
    life = life_of(busy_day())
    report = what_if(life, life.config, policy="fair", workers=2)
    data = json.loads(json.dumps(report.as_dict()))
    assert (data["policy"], data["workers"]) == ("fair", 2)
    assert set(data["what_if"]) == set(data["recorded"]) == set(data["simulated"])
    assert data["what_if"]["tokens_per_s"] == report.other.tokens_per_s
    lines = str(report).splitlines()
    assert "fair, workers 2" in lines[0]
    assert len(lines) == 1 + len(data["what_if"])


def test_what_cannot_be_simulated_is_refused() -> None:
    life = life_of(busy_day())
    with pytest.raises(BadConfig, match="policy 'nonsense' is none of"):
        what_if(life, life.config, policy="nonsense")
    with pytest.raises(BadConfig, match="workers 0"):
        what_if(life, life.config, workers=0)
    with pytest.raises(BadInput, match="no worker joined"):
        what_if([Entry(Tick(at_us=1), [])], life.config)
    with pytest.raises(BadInput, match="nothing was submitted"):
        what_if(list(life)[:1], life.config)


def test_percentiles_are_samples_and_zero_without_any() -> None:
    assert Percentiles.of([]) == Percentiles(0, 0.0, 0.0, 0.0)
    p = Percentiles.of(range(0, 100_000, 1000))
    assert (p.count, p.p50_ms, p.p90_ms, p.p99_ms) == (100, 50.0, 90.0, 99.0)
