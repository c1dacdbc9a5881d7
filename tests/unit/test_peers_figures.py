"""The arithmetic of comparing engines: from times to figures, from rounds to medians, ratios and shares."""

import pytest

from bench.peer_engines.agreement import Parting, partings
from bench.peer_engines.figures import (
    MEASURES,
    Figures,
    Spread,
    WrongLengths,
    figures_of,
    median_figures,
    percentile,
    speed_ratios,
    spread,
    spreads,
)
from bench.peer_engines.limits import demand_of
from bench.peer_engines.records import Record, step_through
from bench.peer_engines.workload import Asked, Load

SMOLLM2 = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def load_of(*lengths: tuple[int, int], in_flight: int = 1) -> Load:
    return Load(tuple(Asked(tuple(range(prompt)), new) for prompt, new in lengths), in_flight)


def record(submitted_s: float, *handed: tuple[float, int]) -> Record:
    return Record(submitted_s, [at for at, _ in handed], [count for _, count in handed])


def test_output_rate_spans_from_the_first_request_to_the_last_token() -> None:
    records = [record(10.0, (10.5, 1), (11.0, 1)), record(10.2, (10.6, 1), (12.0, 1))]
    figures = figures_of("W1", load_of((4, 2), (4, 2)), records)
    assert figures["output"] == pytest.approx(4 / 2.0)


def test_first_tokens_count_from_each_ones_own_request() -> None:
    records = [record(0.0, (0.1, 1), (0.2, 1)), record(5.0, (5.3, 1), (5.4, 1))]
    figures = figures_of("W1", load_of((4, 2), (4, 2)), records)
    assert figures["TTFT p50"] == pytest.approx(200)
    assert figures["TTFT p99"] == pytest.approx(298)


def test_tokens_handed_out_together_follow_each_other_at_once() -> None:
    """Else an engine that hands out four at a time would seem to have long gaps only, or none."""
    together = figures_of("W1", load_of((4, 5)), [record(0.0, (1.0, 1), (1.4, 4))])
    assert together["ITL p50"] == pytest.approx(0)
    assert together["ITL p99"] == pytest.approx(400 * 0.97)
    first_together = figures_of("W1", load_of((4, 3)), [record(0.0, (1.0, 2), (1.4, 1))])
    assert first_together["ITL p50"] == pytest.approx(200)  # of 0 and 400


def test_decode_rate_leaves_out_the_first_token_and_its_prompt() -> None:
    figures = figures_of("W2", load_of((64, 3)), [record(0.0, (7.0, 1), (7.5, 1), (8.0, 1))])
    assert figures == {"decode": pytest.approx(2.0)}


def test_decode_rate_counts_what_came_behind_the_first_hand_out() -> None:
    figures = figures_of("W2", load_of((64, 5)), [record(0.0, (7.0, 2), (8.0, 3))])
    assert figures == {"decode": pytest.approx(3.0)}


def test_prefill_rate_is_the_prompt_by_the_time_to_its_token() -> None:
    assert figures_of("W3", load_of((1024, 1)), [record(1.0, (1.5, 1))]) == {"prefill": pytest.approx(2048)}


def test_a_shared_prefix_takes_seconds_from_the_first_request_to_the_last_token() -> None:
    records = [record(1.0, (1.5, 1)), record(1.1, (3.25, 1))]
    assert figures_of("W4", load_of((8, 1), (8, 1)), records) == {"time": pytest.approx(2.25)}


def test_every_measure_is_among_the_figures_of_its_work() -> None:
    load, records = load_of((4, 3)), [record(0.0, (0.5, 1), (1.0, 1), (1.5, 1))]
    for measure in MEASURES:
        assert measure.name in figures_of(measure.work, load, records)


@pytest.mark.parametrize("came", [2, 4])
def test_a_run_of_other_lengths_is_refused(came: int) -> None:
    records = [record(0.0, (1.0, 1), (2.0, 2)), record(0.0, (1.0, came))]
    with pytest.raises(WrongLengths, match=f"W1: request 1 has {came} tokens of output, 3 were asked for"):
        figures_of("W1", load_of((4, 3), (4, 3)), records)


def test_a_run_with_an_answer_missing_is_refused() -> None:
    with pytest.raises(WrongLengths, match="W1: 1 answers to 2 requests"):
        figures_of("W1", load_of((4, 1), (4, 1)), [record(0.0, (1.0, 1))])


def test_a_percentile_lies_on_the_line_between_two_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == pytest.approx(2.5)
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0


def test_a_spread_tells_its_ends_unless_they_are_the_same() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([3.0, 1.0, 2.0]).told(1) == "2.0 (1.0–3.0)"
    assert spread([2.0]).told(0) == "2"


def test_runs_of_a_round_count_by_their_median() -> None:
    assert median_figures([{"decode": 1.0}, {"decode": 9.0}, {"decode": 3.0}]) == {"decode": 3.0}


def rounds(work: str, name: str, *values: float) -> list[dict[str, Figures]]:
    return [{work: {**dict.fromkeys(("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "output"), 1.0), name: value}}
            for value in values]  # fmt: skip


def test_a_ratio_of_rates_is_ours_by_the_peers() -> None:
    found = speed_ratios(rounds("W2", "decode", 30.0, 30.0, 60.0), rounds("W2", "decode", 10.0, 20.0, 30.0))
    assert found == {("W2", "decode"): Spread(2.0, 1.5, 3.0)}


def test_a_ratio_of_times_is_the_peers_by_ours() -> None:
    found = speed_ratios(rounds("W4", "time", 0.5), rounds("W4", "time", 1.0))
    assert found == {("W4", "time"): Spread(2.0, 2.0, 2.0)}


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that is half as fast in the second round changes both engines, and no ratio."""
    found = speed_ratios(rounds("W3", "prefill", 400.0, 200.0), rounds("W3", "prefill", 100.0, 50.0))
    assert found == {("W3", "prefill"): Spread(4.0, 4.0, 4.0)}


def test_a_time_of_zero_has_no_ratio() -> None:
    found = speed_ratios(rounds("W1", "ITL p50", 0.0), rounds("W1", "ITL p50", 1.0))
    assert ("W1", "ITL p50") not in found
    assert ("W1", "output") in found


def test_spreads_hold_the_measures_of_the_works_that_were_run() -> None:
    assert spreads(rounds("W1", "output", 1.0, 3.0))["W1", "output"] == Spread(2.0, 1.0, 3.0)
    assert not [work for work, _ in spreads(rounds("W1", "output", 1.0)) if work != "W1"]


def test_a_step_driven_engine_never_has_more_than_so_many_in_flight() -> None:
    unfinished: dict[int, int] = {}
    most = 0

    def submit(index: int, asked: Asked) -> None:
        nonlocal most
        unfinished[index] = asked.new_tokens
        most = max(most, len(unfinished))

    def step() -> list[tuple[int, list[int], bool]]:
        handed = []
        for index in list(unfinished):
            unfinished[index] -= 1
            handed.append((index, [100 + index], not unfinished[index]))
            if not unfinished[index]:
                del unfinished[index]
        return handed

    asked = load_of((4, 1), (4, 3), (4, 2), (4, 1))
    records = step_through(asked.requests, 2, submit, step)
    assert most == 2
    assert [record.tokens for record in records] == [[100], [101] * 3, [102] * 2, [103]]
    assert [sum(record.counts) for record in records] == [1, 3, 2, 1]


def test_engines_part_where_their_tokens_differ_first() -> None:
    ours, theirs = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 0], [4, 5, 6], [7, 0, 0]]
    assert partings(ours, theirs) == [Parting(2, 1, 8, 0), Parting(0, 2, 3, 0)]
    assert partings(ours, ours) == []


def test_the_default_models_weights_are_counted_from_its_configuration() -> None:
    demand = demand_of(SMOLLM2)
    # 134 515 008 parameters by the library's count, 35 136 of them in norms
    assert demand.layer_weights + demand.head_weights == 134_515_008 - 35_136
    assert demand.decode_bytes("bfloat16") * 2 == demand.decode_bytes("float32")


def test_operations_of_a_prompt_are_two_a_weight_and_token_and_causal_attention() -> None:
    demand = demand_of(SMOLLM2)
    one = demand.prefill_operations(1)
    assert one == 2 * (demand.layer_weights + demand.head_weights) + 4 * 30 * 576
    two = demand.prefill_operations(2)
    assert two - one == 2 * demand.layer_weights + 2 * 4 * 30 * 576  # the second attends to two tokens
