"""The planner's configuration checks itself, and works out a worker's limits."""

from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.types import Capability
from tests.support.fake_executor import FakeExecutor, method_table


def worker(**executor: object) -> Capability:
    return FakeExecutor(**executor).describe()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"plan_ahead": 0}, "plan_ahead 0 is below 1"),
        ({"max_batch_tokens": 1}, "max_batch_tokens 1 is below 2"),
        ({"max_decodes": 0}, "max_decodes 0 is below 1"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens 0 is below 1"),
        ({"max_session_tokens": 1}, "max_session_tokens 1 is below 2"),
        ({"max_sessions": 0}, "max_sessions 0"),
        ({"session_idle_ms": -1}, "session_idle_ms -1 is below 0"),
        ({"max_waiting": 0}, "max_waiting 0"),
        ({"max_waiting_tokens": 0}, "max_waiting_tokens 0"),
        ({"headroom_tokens": -1}, "headroom_tokens -1"),
        ({"step_attempts": 0}, "step_attempts 0"),
        ({"step_timeout_ms": 0}, "step_timeout_ms 0"),
        ({"priority_ageing_ms": 0}, "priority_ageing_ms 0"),
        ({"target_step_ms": 0}, "target_step_ms 0"),
        ({"target_step_ms": float("nan")}, "target_step_ms nan"),
        ({"tenant_weights": ("a",)}, "tenant weight 'a'"),
        ({"tenant_weights": ("a=0",)}, "tenant weight 'a=0'"),
        ({"tenant_weights": ("=2",)}, "tenant weight '=2'"),
        ({"tenant_weights": ("a=1048577",)}, "tenant weight 'a=1048577' is above 1048576"),
        ({"tenant_weights": ("a=1", "b=1", "a=2")}, "tenant weight 'a=2' is the second one of 'a'"),
        ({"policy": "nonsense"}, "policy 'nonsense' is none of decode-first"),
    ],
)
def test_a_value_out_of_range_is_named(setting: dict[str, object], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        PlannerConfig(**setting)  # type: ignore[arg-type]


def test_weights_are_read_once_and_a_tenant_may_hold_an_equals_sign() -> None:
    assert PlannerConfig(tenant_weights=("a=2", "b=c=3")).weights() == {"a": 2, "b=c": 3}


def test_a_step_is_as_wide_as_the_worker_likes_and_half_of_it_may_be_decodes() -> None:
    limits = PlannerConfig().limits_for(worker(max_sequences=1024))
    assert (limits.max_batch_tokens, limits.max_decodes, limits.max_prefill_tokens) == (512, 256, 256)


def test_decodes_stay_within_sequences_and_output_rows() -> None:
    few = worker(max_sequences=8)
    assert PlannerConfig().limits_for(few).max_decodes == 8
    assert PlannerConfig().limits_for(replace(few, max_output_rows=3)).max_decodes == 3


def test_a_worker_that_runs_one_token_at_a_time_still_makes_both_kinds_of_step() -> None:
    limits = PlannerConfig().limits_for(worker(table=method_table((1,), 1)))
    assert (limits.max_batch_tokens, limits.max_decodes, limits.max_prefill_tokens) == (2, 1, 1)


def test_limits_that_contradict_each_other_name_both_numbers() -> None:
    with pytest.raises(BadConfig, match="max_decodes 600 >= max_batch_tokens 512"):
        PlannerConfig(max_decodes=600).limits_for(worker())
    with pytest.raises(BadConfig, match="max_prefill_tokens 500 > max_batch_tokens 512 - max_decodes 64"):
        PlannerConfig(max_decodes=64, max_prefill_tokens=500).limits_for(worker())
