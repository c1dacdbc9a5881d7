"""A journal runs again to the same instructions; a difference is found and shown; what-if answers in figures."""

import json

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig, BadInput
from microtome.planner.events import Tick
from microtome.planner.journal import Entry, encode_entry, encode_header, encode_instructions, read_journal
from microtome.planner.replay import replay
from microtome.planner.what_if import Percentiles, what_if
from tests.simulation.world import World
from tests.support.small_cluster import SmallCluster, method_table


class Recorded(SmallCluster):
    """A cluster whose life is written down."""

    journal = b""

    def handle(self, event):  # type: ignore[no-untyped-def]
        instructions = super().handle(event)
        self.journal = (self.journal or encode_header(self.config)) + encode_entry(event, instructions)
        return instructions


def busy_day(config: PlannerConfig | None = None) -> Recorded:
    """Forty prompts in 20 ms on one worker with steps of up to 16 tokens."""
    cluster = Recorded(config or PlannerConfig(), table=method_table((1, 2, 4, 8), 16), usable_cells=2000)
    for n in range(40):
        cluster.now_us += 500
        cluster.submit(range(n, n + 5 + n % 30), 3 + n % 9, priority=n % 3)
        if cluster.plans["w0"] and n % 2:
            cluster.answer()
    while cluster.plans["w0"]:
        cluster.now_us += 1300
        cluster.answer()
    return cluster


@pytest.mark.parametrize("seed", range(12))
def test_a_simulated_life_replays_without_a_difference(seed: int) -> None:
    world = World(seed)
    entries: list[Entry] = []
    handle = world.control.handle  # of the first driver, if it is restarted

    def written(event):  # type: ignore[no-untyped-def]
        instructions = handle(event)
        data = encode_header(world.plot.config) + encode_entry(event, instructions)
        entries.extend(read_journal(data).entries)
        return instructions

    world.control.handle = written  # type: ignore[method-assign]
    world.live()
    report = replay(entries, world.plot.config)
    assert report.difference is None, str(report)
    assert report.entries == len(entries) > 10


def test_a_replay_finds_the_first_difference_and_shows_both_sides() -> None:
    cluster = busy_day()
    journal = read_journal(cluster.journal)
    assert replay(journal.entries, journal.config).difference is None
    other = PlannerConfig(max_decodes=2, max_prefill_tokens=8)
    report = replay(journal.entries, other)
    assert report.difference is not None
    number = report.difference.number
    assert replay(journal.entries[:number], other).difference is None
    recorded, replayed = report.difference.recorded, report.difference.replayed
    assert encode_instructions([recorded] if recorded else []) != encode_instructions([replayed] if replayed else [])
    assert f"entry {number}" in str(report)
    assert "recorded:" in str(report)


def test_a_replay_sees_an_instruction_that_is_missing() -> None:
    cluster = busy_day()
    journal = read_journal(cluster.journal)
    forged = [Entry(e.event, e.answers if n != 1 else b"") for n, e in enumerate(journal.entries)]
    difference = replay(forged, journal.config).difference
    assert difference is not None
    assert (difference.number, difference.at, difference.recorded) == (1, 0, None)


def test_what_if_of_the_same_policy_and_workers_equals_the_simulation_of_the_journal() -> None:
    journal = read_journal(busy_day().journal)
    report = what_if(journal.entries, journal.config)
    assert report.own == report.other
    assert report.own.output_tokens == report.recorded.output_tokens
    assert report.own.generations == report.recorded.generations == 40


def test_more_workers_shorten_the_simulated_waits() -> None:
    journal = read_journal(busy_day().journal)
    report = what_if(journal.entries, journal.config, workers=3)
    assert report.other.ttft.p90_ms < report.own.ttft.p90_ms / 1.5
    assert report.other.span_ms < report.own.span_ms
    assert report.other.output_tokens == report.own.output_tokens


def test_another_policy_changes_who_waits_and_not_what_is_delivered() -> None:
    journal = read_journal(busy_day().journal)
    report = what_if(journal.entries, journal.config, policy="fair-priority")
    assert report.other.output_tokens == report.own.output_tokens
    assert report.other.ttft != report.own.ttft


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
    journal = read_journal(cluster.journal)
    report = what_if(journal.entries, journal.config, workers=2)
    assert report.other.output_tokens == report.recorded.output_tokens == 3 * 3 + 2 + 4
    assert report.other.refused == 0


def test_a_report_is_a_table_and_plain_data() -> None:
    journal = read_journal(busy_day().journal)
    report = what_if(journal.entries, journal.config, policy="fair", workers=2)
    data = json.loads(json.dumps(report.as_dict()))
    assert (data["policy"], data["workers"]) == ("fair", 2)
    assert set(data["what_if"]) == set(data["recorded"]) == set(data["simulated"])
    assert data["what_if"]["tokens_per_s"] == report.other.tokens_per_s
    lines = str(report).splitlines()
    assert "fair, 2 workers" in lines[0]
    assert len(lines) == 1 + len(data["what_if"])


def test_what_cannot_be_simulated_is_refused() -> None:
    journal = read_journal(busy_day().journal)
    with pytest.raises(BadConfig, match="policy 'nonsense' is none of"):
        what_if(journal.entries, journal.config, policy="nonsense")
    with pytest.raises(BadConfig, match="workers 0"):
        what_if(journal.entries, journal.config, workers=0)
    with pytest.raises(BadInput, match="no worker joined"):
        what_if([Entry(Tick(at_us=1), b"")], journal.config)
    with pytest.raises(BadInput, match="nothing was submitted"):
        what_if(journal.entries[:1], journal.config)


def test_percentiles_are_samples_and_zero_without_any() -> None:
    assert Percentiles.of([]) == Percentiles(0, 0.0, 0.0, 0.0)
    p = Percentiles.of(range(0, 100_000, 1000))
    assert (p.count, p.p50_ms, p.p90_ms, p.p99_ms) == (100, 50.0, 90.0, 99.0)
