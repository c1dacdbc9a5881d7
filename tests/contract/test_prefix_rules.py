"""The prefix cache as a caller meets it: the rules of the contract's (k) that stand, on fake workers."""

from microtome.planner.config import PlannerConfig
from microtome.planner.events import RunStep
from tests.support.small_cluster import SmallCluster, expected

PROMPT = tuple(range(100, 140))


def after_one(config: PlannerConfig | None = None, **options: object) -> SmallCluster:
    cluster = SmallCluster(config)
    cluster.submit(PROMPT, 3, **options)  # type: ignore[arg-type]
    cluster.run()
    cluster.told.clear()
    return cluster


def prefilled(cluster: SmallCluster) -> int:
    return sum(len(i.plan.tokens) for i in cluster.told if isinstance(i, RunStep))


def test_K4_the_last_prompt_token_is_always_forwarded() -> None:
    cluster = after_one()
    name = cluster.submit(PROMPT, 3)
    cluster.run()
    assert prefilled(cluster) == 1
    assert cluster.usage(name).cached_tokens == len(PROMPT) - 1
    assert cluster.tokens[name] == expected(PROMPT, 3)


def test_K6_generated_tokens_are_found_too() -> None:
    cluster = after_one()
    said = [*PROMPT, *expected(PROMPT, 3)]
    name = cluster.submit([*said, 7], 3)
    cluster.run()
    assert prefilled(cluster) == 2  # the token that was delivered last had not been run
    assert cluster.tokens[name] == expected([*said, 7], 3)


def test_K6_a_prompt_is_found_while_the_first_generation_after_it_runs() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 30)
    cluster.answer()
    cluster.told.clear()
    name = cluster.submit([*PROMPT, 5], 2)
    cluster.run()
    assert cluster.usage(name).cached_tokens == len(PROMPT)
    assert cluster.tokens[name] == expected([*PROMPT, 5], 2)


def test_K12_another_salt_finds_nothing() -> None:
    cluster = after_one(cache_salt="mine")
    cluster.submit(PROMPT, 3, cache_salt="yours")
    cluster.run()
    assert prefilled(cluster) == len(PROMPT)
    cluster.told.clear()
    cluster.submit(PROMPT, 3, cache_salt="mine")
    cluster.run()
    assert prefilled(cluster) == 1


def test_K14_a_hit_gives_the_tokens_of_a_cold_run() -> None:
    cluster = after_one()
    for cut in (1, 7, 39, 40):
        prompt = [*PROMPT[:cut], 3, 4]
        name = cluster.submit(prompt, 5, seed=cut)
        cluster.run()
        assert cluster.tokens[name] == expected(prompt, 5, seed=cut)
        assert cluster.usage(name).cached_tokens == cut


def test_the_cache_can_be_turned_off() -> None:
    cluster = after_one(PlannerConfig(prefix_cache=False))
    name = cluster.submit(PROMPT, 3)
    cluster.run()
    assert prefilled(cluster) == len(PROMPT)
    assert cluster.usage(name).cached_tokens == 0
    assert cluster.control.status().workers[0].cells_cached == 0


def test_cached_tokens_are_counted() -> None:
    cluster = after_one()
    cluster.submit(PROMPT, 3)
    cluster.run()
    assert cluster.control.status().counters.cached_tokens == len(PROMPT) - 1
