"""A worker process: builds the executor on its one step thread, serves `Worker` to the driver, ends when it must.

`WorkerProcess` needs no Ray; `WorkerActor` is the same thing as a Ray actor and adds nothing but its address.
"""

from collections.abc import Callable

from microtome.actors.link import WorkerEndpoint, WorkerSpec


class WorkerActor:
    """The Ray actor: `ray.remote(WorkerActor).options(lifetime="detached", max_restarts=0, …).remote(spec)`.

    An async actor whose constructor is cheap. `max_restarts=0`: the driver supervises; a new life is a new actor.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        raise NotImplementedError

    async def start(self) -> WorkerEndpoint:
        """Load, capture, bind, serve. Takes as long as the model does. A second call returns the same endpoint.

        Raises `BadConfig` with nothing left behind but this actor, which can only be killed.
        An empty `spec.host` binds to the node's address.
        """
        raise NotImplementedError

    async def endpoint(self) -> WorkerEndpoint | None:
        """None while it is not ready: for a driver that has restarted and looks for its workers by name."""
        raise NotImplementedError


class WorkerProcess:
    """The same without Ray, on the running event loop. `end` is called once, with the cause, to end the process."""

    def __init__(self, spec: WorkerSpec, end: Callable[[str], None]) -> None:
        raise NotImplementedError

    async def start(self) -> WorkerEndpoint:
        raise NotImplementedError

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port and the step thread. Idempotent."""
        raise NotImplementedError
