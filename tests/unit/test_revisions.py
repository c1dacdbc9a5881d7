"""What a restarted driver is told of the changes that were made while the service ran."""

import json

from microtome.actors.revisions import Revisions
from tests.support.in_process import fake_config


def test_what_is_kept_gives_a_later_driver_the_settings_and_the_bounds() -> None:
    before = Revisions(fake_config("fake"))
    before.current = before.propose({"runtime.kv_tokens": "8192", "model": "other", "runtime.model": "fake:vocab=500"})
    before.bounds = 0, 3
    after = Revisions(fake_config("fake"))
    after.restore(before.encode(before.current))
    assert (after.current, after.bounds) == (1, (0, 3))
    assert after[1].runtime == before[1].runtime
    assert after[1].model == "other"
    assert after.propose({"runtime.kv_tokens": "1000"}) == 2, "a number was used twice"


def test_bounds_that_were_never_changed_are_those_of_the_start() -> None:
    before, after = Revisions(fake_config("fake")), Revisions(fake_config("fake"))
    after.restore(before.encode(0))
    assert (after.current, after.bounds) == (0, None)
    kept = json.loads(before.encode(0))
    del kept["bounds"]  # as it was before there were any
    after.restore(json.dumps(kept).encode())
    assert after.bounds is None
