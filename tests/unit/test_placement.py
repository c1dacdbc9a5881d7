"""Where a generation starts."""

from microtome.planner.config import PlannerConfig
from tests.support.small_cluster import SmallCluster, expected


def home(cluster: SmallCluster, before: dict[str, int]) -> str:
    """The worker that got a plan since `before`."""
    (grown,) = [name for name, plans in cluster.plans.items() if len(plans) > before.get(name, 0)]
    return grown


def plans(cluster: SmallCluster) -> dict[str, int]:
    return {name: len(queue) for name, queue in cluster.plans.items()}


def test_equal_workers_are_taken_in_the_order_they_joined() -> None:
    cluster = SmallCluster(workers=3)
    order = []
    for n in range(3):
        before = plans(cluster)
        cluster.submit(range(100 * n, 100 * n + 10), 50)
        order.append(home(cluster, before))
    assert order == ["w0", "w1", "w2"]


def test_a_cached_prefix_draws_a_prompt_to_its_worker() -> None:
    cluster = SmallCluster(workers=2)
    cluster.submit(range(7), 1)  # on w0
    cluster.submit(range(200, 300), 1)  # on w1
    cluster.run()
    name = cluster.submit([*range(200, 300), 5], 3)
    assert not cluster.plans["w0"]
    cluster.run()
    assert cluster.usage(name).cached_tokens == 100
    assert cluster.tokens[name] == expected([*range(200, 300), 5], 3)


def test_load_outweighs_a_short_cached_prefix() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=16), workers=2)
    cluster.submit(range(8), 1)
    cluster.run()
    cluster.submit(range(300, 700), 5)  # w0 again: equal scores
    assert plans(cluster) == {"w0": 2, "w1": 0}
    before = plans(cluster)
    cluster.submit([*range(8), 9], 3)
    assert home(cluster, before) == "w1"


def test_a_prompt_goes_to_the_worker_with_fewer_tokens_before_it() -> None:
    cluster = SmallCluster(PlannerConfig(max_batch_tokens=16), workers=2)
    cluster.submit(range(300), 5)  # w0
    cluster.submit(range(400, 420), 5)  # w1
    before = plans(cluster)
    for n in range(4):
        cluster.submit((500 + n,), 5)
    cluster.answer("w1")
    assert plans(cluster)["w0"] == before["w0"]
    assert cluster.control.status().workers[1].running == 5


def test_a_generation_too_long_for_one_worker_goes_to_another() -> None:
    cluster = SmallCluster(usable_cells=32)
    cluster.join("large", usable_cells=64)
    before = plans(cluster)
    name = cluster.submit(range(40), 8)
    assert home(cluster, before) == "large"
    cluster.run()
    assert cluster.tokens[name] == expected(range(40), 8)


def test_a_generation_goes_on_where_there_is_room() -> None:
    cluster = SmallCluster(workers=2, usable_cells=40)
    for n in range(4):
        cluster.submit(range(100 * n, 100 * n + 17), 9)
    assert [w.running for w in cluster.control.status().workers] == [2, 2]
