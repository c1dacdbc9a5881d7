"""Bytes that are no message of the method's kind are the caller's mistake, said with the status for those."""

from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, tokens_of, undisturbed
from tests.support.in_process import Service, fake_config, in_process

TORN = b"\x0a\xff"  # a field whose length says more than there is
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Generation"].methods]


async def refusal(service: Service, path: str, data: bytes, *, streams: bool) -> tuple[grpc.StatusCode, str | None]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        same: Any = bytes
        make = channel.unary_stream if streams else channel.unary_unary
        call: Any = make(path, request_serializer=same, response_deserializer=same)(data)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call.read() if streams else call)
    return refused.value.code(), refused.value.details()


async def test_every_method_refuses_what_it_cannot_read_and_the_service_goes_on() -> None:
    async with in_process(fake_config()) as service:
        for name in METHODS:
            path = f"/microtome.v1.Generation/{name}"
            code, sentence = await refusal(service, path, TORN, streams=name in ("Generate", "Resume"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert sentence == f"the 2 bytes of this request are no message that {name} takes"
        for path in ("/microtome.v1.Admin/Update", "/grpc.health.v1.Health/Check"):
            code, _ = await refusal(service, path, TORN, streams=False)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert tokens_of(await collect(service.stub, request([1], max_new_tokens=3))) == undisturbed([1], 3)
        status = await service.stub.Status(pb.StatusRequest())
        assert status.counters.generations_started == 1


async def test_text_that_is_not_utf8_is_refused_like_it() -> None:
    async with in_process(fake_config()) as service:
        code, _ = await refusal(service, "/microtome.v1.Generation/Generate", b"\x0a\x02\xc3\x28", streams=True)
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_methods_and_health_are_as_before() -> None:
    async with in_process(fake_config()) as service, grpc.aio.insecure_channel(service.address) as channel:
        code, _ = await refusal(service, "/microtome.v1.Generation/Nothing", b"", streams=False)
        assert code is grpc.StatusCode.UNIMPLEMENTED
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
