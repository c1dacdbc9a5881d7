"""What can change while a service runs: the workers' settings, by revision, and how many workers there may be.

Revision 0 is what the service was started with; each update is one more. What a restarted driver has to know is kept
with a `RevisionStore`. On the driver's event loop.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from microtome.actors.config import ServiceConfig, updated
from microtome.cuda_runtime.options import RuntimeOptions


class RevisionStore(Protocol):
    """Keeps a few hundred bytes beyond the driver's life, and no longer than the service's."""

    async def save(self, data: bytes) -> None: ...

    async def load(self) -> bytes:
        """Empty: nothing was saved."""


class Revisions:
    def __init__(self, config: ServiceConfig) -> None:
        self._configs = {0: config}
        self.current = 0  # what new workers are started with
        self.bounds: tuple[int, int] | None = None  # fewest and most workers; None: as the service was started
        self._last = 0

    def __getitem__(self, revision: int) -> ServiceConfig:
        """Raises `KeyError` for one of an earlier driver's life that was not kept."""
        return self._configs[revision]

    def __contains__(self, revision: int) -> bool:
        return revision in self._configs

    def propose(self, settings: Mapping[str, object]) -> int:
        """A new revision: the current one with these settings changed. Not current yet. Raises `BadConfig`."""
        config = updated(self[self.current], settings)
        self._last += 1
        self._configs[self._last] = config
        return self._last

    def encode(self, revision: int) -> bytes:
        """What a later driver has to know of it."""
        config = self[revision]
        kept = {"revision": revision, "bounds": self.bounds, "model": config.model, "runtime": asdict(config.runtime)}
        return json.dumps(kept).encode()

    def restore(self, data: bytes) -> None:
        """Go on with the revision that an earlier driver encoded."""
        kept = json.loads(data)
        runtime: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in kept["runtime"].items()
        }
        self.current = self._last = int(kept["revision"])
        self.bounds = tuple(kept["bounds"]) if kept.get("bounds") else None
        self._configs[self.current] = replace(self[0], model=kept["model"], runtime=RuntimeOptions(**runtime))
