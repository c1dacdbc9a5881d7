"""Packed log-probabilities against a plain list, whatever is put in, cut off and forgotten."""

import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from microtome.planner.packed_logprobs import PackedLogprobs
from microtome.planner.types import TokenLogprobs
from tests.support.messages import known_logprobs

ENTRIES = st.lists(st.none() | known_logprobs, max_size=12)


@given(
    ENTRIES, st.lists(st.tuples(st.sampled_from(["cut", "forget", "extend"]), st.integers(0, 14), ENTRIES), max_size=6)
)
def test_it_holds_what_a_list_would(
    first: list[TokenLogprobs | None], changes: list[tuple[str, int, list[TokenLogprobs | None]]]
) -> None:
    packed, model = PackedLogprobs(), list(first)
    packed.extend(first)
    for change, at, more in changes:
        if change == "cut":
            packed.cut(at)
            del model[at:]
        elif change == "forget":
            packed.forget(min(at, len(model)))
            del model[: min(at, len(model))]
        else:
            packed.extend(more)
            model += more
        assert len(packed) == len(model)
        assert list(packed.entries(0, len(model))) == model
        assert packed.numbers == 2 * sum(1 if one is None else 1 + len(one.top) for one in model)


@given(ENTRIES, st.integers(0, 12), st.integers(0, 12))
def test_columns_are_those_of_the_entries(entries: list[TokenLogprobs | None], begin: int, end: int) -> None:
    packed = PackedLogprobs()
    packed.extend(entries)
    begin, end = min(begin, len(entries)), min(end, len(entries))
    end = max(begin, end)
    counts, own, tokens, values = packed.columns(begin, end)
    known = [one for one in entries[begin:end] if one is not None]
    assert list(counts) == [0 if one is None else 1 + len(one.top) for one in entries[begin:end]]
    assert list(own) == [one.logprob for one in known]
    assert list(zip(tokens, values, strict=True)) == [pair for one in known for pair in one.top]


def test_a_number_takes_four_bytes_or_little_more() -> None:
    packed = PackedLogprobs()
    packed.extend([TokenLogprobs(-math.pi, tuple((token, -1.0) for token in range(20)))] * 1000)
    held = sum(sys.getsizeof(getattr(packed, name)) for name in PackedLogprobs.__slots__)
    assert held < 6 * packed.numbers
