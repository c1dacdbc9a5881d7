"""Answers a request that is no message of its kind with INVALID_ARGUMENT: gRPC itself would say UNKNOWN.

gRPC reads a request before any code of ours sees the call, so what could not be read is put in its place, and the call
ends before the service is asked. Costs one wrapping per method, and nothing per message.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # a generic class to type checkers only
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor


class _Unreadable:
    """In place of a request."""

    def __init__(self, size: int) -> None:
        self.size = size


class UnreadableRequests(Interceptor):
    """For methods that take one request: all that are served to clients."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        wrapped = _wrapped(handler, method.rpartition("/")[2])
        self._wrapped[method] = wrapped
        return wrapped


def _wrapped(handler: "Handler", name: str) -> "Handler":
    read = handler.request_deserializer
    assert read is not None

    def read_or_mark(data: bytes) -> Any:
        try:
            return read(data)
        except Exception:  # protobuf's implementations raise classes of their own
            return _Unreadable(len(data))

    async def refuse(request: _Unreadable, context: "Context") -> None:
        message = f"the {request.size} bytes of this request are no message that {name} takes"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)

    unary: Any = handler.unary_unary
    stream: Any = handler.unary_stream
    if inspect.isasyncgenfunction(stream):

        async def iterated(request: Any, context: "Context") -> AsyncIterator[Any]:
            if isinstance(request, _Unreadable):
                await refuse(request, context)
            async for message in stream(request, context):
                yield message

        return grpc.unary_stream_rpc_method_handler(iterated, read_or_mark, handler.response_serializer)
    if stream is not None:

        async def streamed(request: Any, context: "Context") -> None:
            await (refuse(request, context) if isinstance(request, _Unreadable) else stream(request, context))

        return grpc.unary_stream_rpc_method_handler(streamed, read_or_mark, handler.response_serializer)

    async def answered(request: Any, context: "Context") -> Any:
        if isinstance(request, _Unreadable):
            return await refuse(request, context)
        return await unary(request, context)

    return grpc.unary_unary_rpc_method_handler(answered, read_or_mark, handler.response_serializer)
