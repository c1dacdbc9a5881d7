"""The work that other engines are measured on: the same for all, new in every turn, of the lengths that are told."""

import math
from dataclasses import asdict

import pytest

from bench.peer_engines.workload import IN_FLIGHT, PREFIX_TOKENS, TOKEN_IDS, WORKS, load, mixed_lengths


def lengths(work: str, turn: str) -> list[tuple[int, int]]:
    return [(len(asked.prompt), asked.new_tokens) for asked in load(work, turn).requests]


@pytest.mark.parametrize("work", WORKS)
def test_the_same_turn_has_the_same_token_ids(work: str) -> None:
    assert asdict(load(work, "round 3, run 1")) == asdict(load(work, "round 3, run 1"))


@pytest.mark.parametrize("work", WORKS)
def test_another_turn_has_the_same_lengths_and_no_equal_beginning(work: str) -> None:
    one, other = load(work, "round 1, run 0"), load(work, "round 1, run 1")
    assert lengths(work, "round 1, run 0") == lengths(work, "round 1, run 1")
    heads = [{asked.prompt[:4] for asked in (*turn.first, *turn.requests)} for turn in (one, other)]
    assert not heads[0] & heads[1]


def test_one_turn_of_w1_is_what_it_was_when_figures_were_taken() -> None:
    """A change of seed, order or distribution makes figures that lie in the repository incomparable."""
    asked = lengths("W1", "any")
    assert len(asked) == 48
    assert sum(prompt for prompt, _ in asked) == 7938
    assert sum(new for _, new in asked) == 3593
    assert asked[0] == mixed_lengths()[0]


def test_prompts_of_w1_are_uniform_in_the_logarithm_and_within_bounds() -> None:
    asked = mixed_lengths(4000)
    assert {min(p for p, _ in asked), max(p for p, _ in asked)} == {32, 512}
    assert {min(n for _, n in asked), max(n for _, n in asked)} == {32, 128}
    halfway = math.exp((math.log(32) + math.log(512)) / 2)
    below = sum(prompt < halfway for prompt, _ in asked) / len(asked)
    assert 0.47 < below < 0.53


def test_single_requests_have_the_lengths_that_are_told() -> None:
    assert lengths("W2", "any") == [(64, 128)]
    assert lengths("W3", "any") == [(1024, 1)]
    assert lengths("W4", "any") == lengths("W4p", "any") == [(PREFIX_TOKENS + 32, 16)] * 16


@pytest.mark.parametrize("work", ["W4", "W4p"])
def test_requests_of_w4_share_the_prefix_and_nothing_behind_it(work: str) -> None:
    requests = load(work, "any").requests
    assert len({asked.prompt[:PREFIX_TOKENS] for asked in requests}) == 1
    assert len({asked.prompt[: PREFIX_TOKENS + 2] for asked in requests}) == len(requests)


def test_w4p_alone_puts_the_prefix_in_front_and_gives_nothing_else_away() -> None:
    for work in WORKS:
        turn = load(work, "any")
        if work != "W4p":
            assert turn.first == ()
            continue
        (first,) = turn.first
        assert first.prompt[:PREFIX_TOKENS] == turn.requests[0].prompt[:PREFIX_TOKENS]
        assert len(first.prompt) == PREFIX_TOKENS + 1
        assert first.new_tokens == 1


def test_no_prompt_holds_a_special_token_or_one_beyond_the_vocabulary() -> None:
    for work in WORKS:
        assert {token in TOKEN_IDS for asked in load(work, "any").requests for token in asked.prompt} == {True}


def test_a_load_tells_how_many_are_in_flight() -> None:
    assert {work: load(work, "any").in_flight for work in WORKS} == IN_FLIGHT


def test_an_unknown_work_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="work 'W5' is none of W1, W2, W3, W4, W4p"):
        load("W5", "any")
