"""What an operator asks of a running service: the `Admin` service. Translates and waits; decides nothing."""

from collections.abc import Mapping
from typing import NoReturn, Protocol

import grpc.aio

from microtome.actors.status import status_of
from microtome.planner.errors import BadConfig, BadInput, BatchingError
from microtome.planner.types import WorkerId
from microtome.v1 import admin_pb2 as pb
from microtome.v1 import admin_pb2_grpc as rpc

LISTED, MOST_LISTED = 64, 256  # generations; the planner's time for a list grows with the square of it
ADMIN = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class Host(Protocol):
    """What is asked of the driver. See `DriverHost`."""

    async def drain(self, worker: WorkerId) -> None: ...

    async def update(self, settings: Mapping[str, str], surge: bool) -> int: ...

    async def scale(self, least: int | None, most: int | None) -> tuple[int, int]: ...

    async def generations(self, limit: int) -> pb.ListGenerationsResponse: ...


DrainContext = grpc.aio.ServicerContext[pb.DrainWorkerRequest, pb.DrainWorkerResponse]
UpdateContext = grpc.aio.ServicerContext[pb.UpdateRequest, pb.UpdateResponse]
ScaleContext = grpc.aio.ServicerContext[pb.ScaleRequest, pb.ScaleResponse]
ListContext = grpc.aio.ServicerContext[pb.ListGenerationsRequest, pb.ListGenerationsResponse]


class Admin(rpc.AdminServicer):
    """The `Admin` service, on the driver's event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: DrainContext) -> pb.DrainWorkerResponse:
        try:
            await self._host.drain(WorkerId(request.worker))
        except BatchingError as error:
            await _abort(context, error)
        return pb.DrainWorkerResponse()

    async def Update(self, request: pb.UpdateRequest, context: UpdateContext) -> pb.UpdateResponse:
        try:
            if not request.settings:
                raise BadConfig("no setting is given: an update changes one or more")
            revision = await self._host.update(dict(request.settings), surge=not request.drain_first)
        except BatchingError as error:
            await _abort(context, error)
        return pb.UpdateResponse(revision=revision)

    async def Scale(self, request: pb.ScaleRequest, context: ScaleContext) -> pb.ScaleResponse:
        least = request.min_workers if request.HasField("min_workers") else None
        most = request.max_workers if request.HasField("max_workers") else None
        try:
            if least is None and most is None:
                raise BadConfig("no bound is given: min_workers, max_workers or both")
            least, most = await self._host.scale(least, most)
        except BatchingError as error:
            await _abort(context, error)
        return pb.ScaleResponse(min_workers=least, max_workers=most)

    async def ListGenerations(
        self, request: pb.ListGenerationsRequest, context: ListContext
    ) -> pb.ListGenerationsResponse:
        if request.limit > MOST_LISTED:
            await _abort(context, BadInput(f"limit {request.limit} is above {MOST_LISTED}"))
        return await self._host.generations(request.limit or LISTED)


async def _abort(context: DrainContext | UpdateContext | ScaleContext | ListContext, error: BatchingError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing)
    raise AssertionError("abort has raised")
