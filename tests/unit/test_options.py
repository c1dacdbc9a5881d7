"""A runtime option out of range is refused with the value and the limit."""

import pytest

from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "device 'tpu' is none of cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device 'cuda:x'"),
        ({"dtype": "int4"}, "dtype 'int4' is none of auto"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is none of auto"),
        ({"quantize": "int4"}, "quantize 'int4' is none of auto, none, int8"),
        ({"methods": "fast"}, "methods 'fast' is none of auto, compiled, eager"),
        ({"kv_tokens": 0}, "kv_tokens 0 is below 1"),
        ({"kv_tokens": 511}, "kv_tokens 511 is below the widest step 512"),
        ({"kv_tokens": 63, "widths": (64,), "max_step_tokens": 8}, "kv_tokens 63 is below the widest step 64"),
        ({"memory_fraction": 0.0}, "memory_fraction 0.0 is not in"),
        ({"memory_fraction": 1.01}, "memory_fraction 1.01 is not in"),
        ({"memory_fraction": float("nan")}, "memory_fraction nan is not in"),
        ({"max_step_tokens": 0}, "max_step_tokens 0 is below 1"),
        ({"max_sequences": 0}, "max_sequences 0 is below 1"),
        ({"max_session_tokens": 0}, "max_session_tokens 0 is below 1"),
        ({"threads": 0}, "threads 0 is below 1"),
        ({"widths": ()}, "widths"),
        ({"widths": (1, 4, 4)}, "widths"),
        ({"widths": (4, 1)}, "widths"),
        ({"widths": (0, 1)}, "widths"),
        ({"min_prefill_tokens": 1}, "min_prefill_tokens 1 is below 2"),
        ({"min_prefill_tokens": 34}, "min_prefill_tokens 34 leaves a gap .* it may be 33 at most"),
    ],
)
def test_an_option_out_of_range_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        RuntimeOptions(model="m", **changes)  # type: ignore[arg-type]


def test_options_at_the_limits_are_accepted() -> None:
    RuntimeOptions(model="m", min_prefill_tokens=33, kv_tokens=512, memory_fraction=1.0, device="cuda:3")
    RuntimeOptions(model="m", max_step_tokens=1, widths=(1,), kv_tokens=1)
