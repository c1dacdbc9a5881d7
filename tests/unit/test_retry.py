"""Waits grow, are bounded, and never come together."""

import pytest

from microtome.retry import Retry


def test_the_wait_doubles_up_to_its_bound() -> None:
    retry = Retry(first_s=0.1, most_s=0.5)
    assert [retry.wait_s(failed, 0.999999) for failed in (1, 2, 3, 4, 99)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.5, 0.5], rel=1e-5
    )


def test_the_draw_is_from_the_upper_half() -> None:
    retry = Retry(first_s=0.1, most_s=0.5)
    assert retry.wait_s(1, 0.0) == pytest.approx(0.05)
    assert retry.wait_s(1, 0.5) == pytest.approx(0.075)


def test_a_wait_after_very_many_failures_is_still_a_number() -> None:
    assert Retry().wait_s(10**9, 0.5) <= 2.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"attempts": 0}, "attempts must be 1 or more, not 0"),
        ({"resume_attempts": 0}, "resume_attempts must be 1 or more, not 0"),
        ({"first_s": 0.0}, r"first_s must be above 0 and at most most_s \(2\), not 0"),
        ({"first_s": 3.0}, r"first_s must be above 0 and at most most_s \(2\), not 3"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Retry(**options)  # type: ignore[arg-type]
