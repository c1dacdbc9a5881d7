"""Microtome: distributed continuous batching for language models, on Ray and gRPC.

    with microtome.Client("127.0.0.1:50051") as client:
        for update in client.generate("Once upon a time", max_new_tokens=32):
            print(update.text, end="", flush=True)

The names below are loaded when they are first used: importing a part, such as `microtome.planner`, loads that part
only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microtome import errors
    from microtome.aio import AsyncClient
    from microtome.answers import (
        Completion,
        FinishReason,
        Model,
        ServiceStatus,
        TokenLogprobs,
        Update,
        Usage,
        Whereabouts,
    )
    from microtome.client import Client
    from microtome.discovery import connect
    from microtome.errors import MicrotomeError
    from microtome.retry import Retry
    from microtome.sampling import GenerateOptions

    __version__: str

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "FinishReason",
    "GenerateOptions",
    "MicrotomeError",
    "Model",
    "Retry",
    "ServiceStatus",
    "TokenLogprobs",
    "Update",
    "Usage",
    "Whereabouts",
    "__version__",
    "connect",
    "errors",
]

_HOMES = {  # name → the module that defines it
    "AsyncClient": "microtome.aio",
    "Client": "microtome.client",
    "Completion": "microtome.answers",
    "FinishReason": "microtome.answers",
    "GenerateOptions": "microtome.sampling",
    "MicrotomeError": "microtome.errors",
    "Model": "microtome.answers",
    "Retry": "microtome.retry",
    "ServiceStatus": "microtome.answers",
    "TokenLogprobs": "microtome.answers",
    "Update": "microtome.answers",
    "Usage": "microtome.answers",
    "Whereabouts": "microtome.answers",
    "connect": "microtome.discovery",
}


def __getattr__(name: str) -> Any:
    value: Any
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "errors":
        value = importlib.import_module("microtome.errors")
    elif name == "__version__":
        value = importlib.import_module("importlib.metadata").version("microtome")
    else:
        raise AttributeError(f"module 'microtome' has no attribute {name!r}")
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
