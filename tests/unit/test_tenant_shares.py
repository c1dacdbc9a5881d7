"""Levels rise with what is served; coming new, pausing and leaving earn nothing."""

import pytest

from microtome.planner.tenant_shares import UNIT, TenantShares


def step(shares: TenantShares, *served: tuple[str, int]) -> None:
    """One batch: each tenant has one input of so many tokens queued and served."""
    for tenant, _ in served:
        shares.queued(tenant)
    shares.next_step()
    for tenant, tokens in served:
        shares.served(tenant, 1, tokens)


def first_of(shares: TenantShares, *tenants: str) -> str:
    for tenant in tenants:
        shares.queued(tenant)
    return min(tenants, key=shares.key)


def test_the_tenant_served_less_by_weight_goes_first() -> None:
    shares = TenantShares({"heavy": 4}, credit_tokens=1000)
    step(shares, ("heavy", 30), ("light", 10))
    assert first_of(shares, "light", "heavy") == "heavy"
    step(shares, ("heavy", 11))
    assert first_of(shares, "heavy", "light") == "light"


def test_of_equal_levels_the_one_that_came_first_goes_first() -> None:
    shares = TenantShares({}, credit_tokens=1000)
    assert first_of(shares, "b", "a") == "b"


def level_tokens(shares: TenantShares, tenant: str) -> float:
    """How much has been served at weight 1; the tenant is left with one more input waiting."""
    shares.queued(tenant)
    return shares.key(tenant)[0] / UNIT


def test_who_comes_new_starts_where_one_stands_that_always_had_its_share() -> None:
    shares = TenantShares({"b": 2}, credit_tokens=1000)
    for _ in range(10):
        step(shares, ("a", 50), ("b", 40))
    shares.next_step()
    assert level_tokens(shares, "new") == pytest.approx(300)
    assert level_tokens(shares, "a") == pytest.approx(500)
    assert level_tokens(shares, "b") == pytest.approx(200)


def test_a_pause_costs_nothing() -> None:
    shares = TenantShares({}, credit_tokens=100)
    step(shares, ("steady", 20), ("away", 10))
    for _ in range(3):
        step(shares, ("steady", 20))
    assert level_tokens(shares, "away") == 10


def test_a_long_absence_earns_the_credit_and_no_more() -> None:
    shares = TenantShares({}, credit_tokens=100)
    step(shares, ("steady", 20), ("away", 10))
    for _ in range(400):
        step(shares, ("steady", 20))
    shares.next_step()
    assert level_tokens(shares, "steady") - level_tokens(shares, "away") == pytest.approx(100, abs=20)


def test_using_what_nobody_wants_costs_the_credit_and_no_more() -> None:
    shares = TenantShares({}, credit_tokens=100)
    for _ in range(400):
        step(shares, ("greedy", 90), ("modest", 10))
    shares.next_step()
    mark = level_tokens(shares, "new")
    assert level_tokens(shares, "greedy") == pytest.approx(mark + 100, abs=60)
    assert level_tokens(shares, "modest") == pytest.approx(mark - 100, abs=60)


def test_new_tenants_without_end_keep_nobody_out() -> None:
    shares = TenantShares({}, credit_tokens=100)
    step(shares, ("old", 100), ("b", 1), ("c", 1), ("d", 1))
    shares.queued("old")
    for visitor in range(100):
        name = f"visitor {visitor}"
        shares.queued(name)
        shares.next_step()
        if shares.key("old") < shares.key(name):
            break
        shares.served(name, 1, 10)
    # The first starts at 0, the second at 103 / 4, each further one 10 / 2 above the one before.
    assert visitor == 16


def test_what_was_given_back_is_taken_off_the_level_again() -> None:
    shares = TenantShares({}, credit_tokens=1000)
    step(shares, ("a", 30), ("b", 20))
    shares.given_back("a", 30)
    shares.queued("b")
    assert shares.key("a") < shares.key("b")


def test_the_mark_does_not_rise_for_what_was_given_back() -> None:
    shares = TenantShares({}, credit_tokens=1000)
    step(shares, ("a", 30), ("b", 20))
    shares.given_back("a", 30)
    shares.next_step()
    assert level_tokens(shares, "new") == 10


def test_giving_back_never_earns_more_than_the_credit() -> None:
    shares = TenantShares({}, credit_tokens=100)
    step(shares, ("a", 10))
    for _ in range(50):
        shares.given_back("a", 50)
    shares.served("a", 1, 120)
    shares.queued("b")
    assert shares.key("b") < shares.key("a")


def test_tenants_that_are_gone_are_forgotten_and_those_that_owe_or_wait_are_not() -> None:
    shares = TenantShares({}, credit_tokens=10**6)
    shares.queued("waits")
    step(shares, ("owes", 10**9))
    for visitor in range(5000):
        step(shares, (f"visitor {visitor}", 5), ("steady", 5))
    assert len(shares) < 200
    shares.queued("owes")
    shares.queued("steady")
    assert shares.key("waits") < shares.key("steady") < shares.key("owes")
