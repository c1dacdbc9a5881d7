"""Times as a client sees them, from arrivals that are told."""

from microtome.timing import Timing


def timing(*arrivals: tuple[float, int]) -> Timing:
    measured = Timing(began_s=10.0)
    for at_s, tokens in arrivals:
        measured.note(at_s, tokens)
    return measured


def test_the_first_token_is_timed_from_the_call() -> None:
    assert timing((10.25, 1), (11.0, 1)).first_token_ms == 250.0


def test_tokens_that_came_together_share_their_gap() -> None:
    measured = timing((10.5, 3), (10.75, 1), (11.75, 4))
    assert measured.between_tokens_ms == [250.0, 250.0, 250.0, 250.0, 250.0]
    assert measured.output_tokens == 8
    assert measured.ended_s == 11.75


def test_a_message_without_tokens_is_no_arrival() -> None:
    measured = timing((10.1, 0), (10.5, 1), (10.6, 0), (11.0, 1))
    assert measured.first_token_ms == 500.0
    assert measured.between_tokens_ms == [500.0]


def test_mean_and_median_differ_when_one_gap_is_long() -> None:
    measured = timing((11.0, 1), (11.125, 1), (11.25, 1), (12.0, 1))
    assert measured.median_between_ms == 125.0
    assert measured.mean_between_ms == 1000 / 3


def test_without_enough_tokens_there_is_no_time() -> None:
    assert timing().first_token_ms is None
    assert timing().ended_s == 10.0
    assert timing((11.0, 5)).mean_between_ms is None
    assert timing((11.0, 5)).median_between_ms is None
