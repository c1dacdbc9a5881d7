"""What an operator asks of a running service: take a worker out, change the settings of all.

Each is one call on a connection of its own, never repeated by itself; it waits for the end of what it began, and what
was begun goes on when nobody waits any more. Raises the errors of `microtome.errors`.
"""

from collections.abc import Mapping
from typing import Any

import grpc

from microtome.call import Call, channel_options
from microtome.retry import Retry
from microtome.sampling import seconds_or_none
from microtome.v1 import admin_pb2 as pb
from microtome.v1 import admin_pb2_grpc

__all__ = ["drain_worker", "update"]


def drain_worker(
    address: str, worker: str, *, timeout_s: float | None = None, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Take one worker out of service without breaking a stream; returns when its process is gone.

    `worker`: its name, as in the service's status. Raises NotFound when no such worker is ready.
    """
    _call(address, "DrainWorker", pb.DrainWorkerRequest(worker=worker), timeout_s, credentials)


def update(
    address: str,
    settings: Mapping[str, str],
    *,
    drain_first: bool = False,
    timeout_s: float | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> int:
    """Replace every worker by one with these settings, without dropping a stream; returns the settings' revision.

    `settings`: `model` and those of the section `runtime`, by their dotted keys; the others stay as they are.
    `drain_first`: for a cluster that has no place for one worker more. Raises WrongState for settings that cannot be
    and while another update is under way, and Unavailable when no worker starts with them: nothing has changed then.
    """
    request = pb.UpdateRequest(settings=settings, drain_first=drain_first)
    answer: pb.UpdateResponse = _call(address, "Update", request, timeout_s, credentials)
    return answer.revision


def _call(
    address: str, method: str, request: Any, timeout_s: float | None, credentials: grpc.ChannelCredentials | None
) -> Any:
    options = channel_options(address)
    call = Call(address, Retry(), seconds_or_none("timeout_s", timeout_s))
    channel = (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    )
    with channel:
        try:
            return getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=call.remaining_s())
        except grpc.RpcError as failure:
            raise call.error_of(failure) from failure
