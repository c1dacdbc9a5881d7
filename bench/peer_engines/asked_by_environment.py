"""What `bench.peers` tells an engine's process by its environment. Standard library only."""

import json
import os
from typing import Any

THREADS = 2
IN_FLIGHT = 16  # of any load, at most
CACHE_GIB = 2  # of keys and values, where an engine is told a size
LONGEST = 2048  # tokens of a request, prompt and output, with room to spare


def model() -> str:
    """The engine's own form of the model: a directory or a file."""
    return os.environ["BENCH_MODEL"]


def dtype() -> str:
    """ "bfloat16" or "float32"."""
    return os.environ["BENCH_DTYPE"]


def settings() -> dict[str, Any]:
    """What else is to be set, in the engine's own names."""
    return dict(json.loads(os.environ.get("BENCH_SETTINGS", "{}")))
