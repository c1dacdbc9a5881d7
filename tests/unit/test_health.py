"""Healthy means: a step, or an idle probe, finished within the time given."""

from microtome.actors.health import StepHealth


def test_it_is_healthy_until_nothing_has_finished_for_the_time_given() -> None:
    health = StepHealth(within_s=3.0, now_s=10.0)
    assert health.serving(13.0)
    assert not health.serving(13.1)
    health.finished(13.0)
    assert health.serving(16.0)


def test_a_step_that_finished_earlier_than_another_changes_nothing() -> None:
    health = StepHealth(within_s=3.0, now_s=10.0)
    health.finished(12.0)
    health.finished(11.0)
    assert health.serving(15.0)


def test_a_probe_is_wanted_once_after_a_third_of_the_time() -> None:
    health = StepHealth(within_s=3.0, now_s=10.0)
    assert not health.wants_probe(10.9)
    assert health.wants_probe(11.0)
    assert not health.wants_probe(12.0)  # the first has not finished
    health.probed(12.0)
    assert not health.wants_probe(12.5)
    assert health.wants_probe(13.0)


def test_a_step_that_finishes_does_not_stand_for_a_probe_that_hangs() -> None:
    health = StepHealth(within_s=3.0, now_s=10.0)
    assert health.wants_probe(11.0)
    health.finished(11.5)
    assert not health.wants_probe(14.0)
    assert health.serving(14.5)
    assert not health.serving(14.6)


def test_steps_alone_keep_it_healthy_and_ask_for_no_probe() -> None:
    health = StepHealth(within_s=3.0, now_s=0.0)
    for tenth in range(1, 100):
        health.finished(tenth / 10)
        assert health.serving(tenth / 10)
        assert not health.wants_probe(tenth / 10 + 0.5)
