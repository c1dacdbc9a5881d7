"""When a first token can be expected."""

from dataclasses import replace

from microtome.planner.config import PlannerConfig
from microtome.planner.forecast import step_us, ttft_us
from microtome.planner.types import MethodTable, WorkerId
from microtome.planner.worker_plan import WorkerPlan
from tests.support.fake_executor import method_table
from tests.support.small_cluster import SmallCluster

UNMEASURED = MethodTable(tuple(replace(m, cost_us=0, cost_ns_per_token=0) for m in method_table((1, 8), 8).methods))


def worker(cluster: SmallCluster) -> WorkerPlan:
    w = cluster.control._roster.get(WorkerId("w0"))
    assert w is not None
    return w


def test_a_prompt_takes_the_steps_that_it_and_what_is_before_it_fill() -> None:
    cluster = SmallCluster(table=method_table((1, 2, 4, 8), 8))
    w = worker(cluster)
    full, four = 1000 + 20 * 8, 1000 + 20 * 4
    assert ttft_us(w, 0, 8) == full
    assert ttft_us(w, 0, 4) == four
    assert ttft_us(w, 16, 4) == 2 * full + four


def test_running_decodes_take_their_part_of_each_step() -> None:
    cluster = SmallCluster(table=method_table((1, 2, 4, 8), 8))
    for n in range(4):
        cluster.submit((n,), 50)
    for _ in range(4):
        cluster.answer()
    w = worker(cluster)
    idle = worker(SmallCluster(table=method_table((1, 2, 4, 8), 8)))
    assert ttft_us(idle, 0, 24) == 3 * 1160
    assert ttft_us(w, 0, 24) == (6 + len(w.in_flight)) * 1160


def test_without_measured_costs_the_mean_of_the_steps_seen_counts_and_without_any_nothing_is_said() -> None:
    cluster = SmallCluster(table=UNMEASURED)
    w = worker(cluster)
    assert step_us(w, 8) is None
    assert ttft_us(w, 0, 8) is None
    w.steps, w.step_us = 4, 8000
    assert step_us(w, 8) == 2000
    assert ttft_us(w, 8, 8) == 4000


def test_a_target_is_not_refused_while_nothing_is_known() -> None:
    cluster = SmallCluster(PlannerConfig(), table=UNMEASURED)
    assert cluster.submit(range(30), ttft_target_us=1) not in cluster.ends
