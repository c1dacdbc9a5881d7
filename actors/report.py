"""How the service is, in one message: what `Control` counts, put together with what the crew knows of its workers."""

from collections.abc import Iterable

from microtome.actors.crew import Member
from microtome.planner.status import ControlStatus
from microtome.v1 import generation_pb2 as pb

# What clients are told of the counters; the names are the same on both sides.
_COUNTERS = tuple(field.name for field in pb.Counters.DESCRIPTOR.fields)


def status_response(
    control: ControlStatus, members: Iterable[Member], *, service: str, version: str, uptime_ms: int, ray_address: str
) -> pb.StatusResponse:
    planned = {worker.worker: worker for worker in control.workers}
    workers: list[pb.WorkerStatus] = []
    for member in members:
        shown = pb.WorkerStatus(name=member.worker, state=member.state.value, cause=member.cause)
        if member.loss is not None:
            shown.loss = member.loss.value
        if member.endpoint is not None:
            shown.device = member.endpoint.device
            shown.incarnation = member.endpoint.incarnation
            shown.pid = member.endpoint.pid
            shown.address = member.endpoint.address
        if member.capability is not None:
            shown.cells_usable = member.capability.usable_cells
        own = planned.get(member.worker)
        if own is not None and member.endpoint is not None and own.incarnation == member.endpoint.incarnation:
            shown.cells_used = own.cells_used
            shown.cells_cached = own.cells_cached
            shown.sessions = own.sessions
            shown.steps = own.steps
        workers.append(shown)
    return pb.StatusResponse(
        service=service,
        version=version,
        uptime_ms=uptime_ms,
        workers=workers,
        running=control.running,
        waiting=control.waiting,
        counters=pb.Counters(**{name: getattr(control.counters, name) for name in _COUNTERS}),
        ray_address=ray_address,
    )
