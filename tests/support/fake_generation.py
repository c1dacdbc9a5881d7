"""A Generation service on loopback that says what a test has scripted, and remembers what it was asked.

A script is a function of (request, context) that yields responses; it may wait at a gate, abort, or look whether the
client is still there. The service runs on gRPC's threads in the test's own process.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from microtome.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from microtome.v1 import generation_pb2 as pb

Script = Callable[[Any, grpc.ServicerContext], Iterator[pb.GenerateResponse]]

WAIT_S = 20.0  # a bound on every wait; reached only by a test that fails


def response(text: str, *token_ids: int, offset: int = 0, last: bool = False, **fields: Any) -> pb.GenerateResponse:
    """One message of a stream. `last`: finished by length, after 3 prompt tokens."""
    if last:
        fields.setdefault("finish_reason", pb.FINISH_REASON_LENGTH)
        fields.setdefault("usage", pb.Usage(prompt_tokens=3, output_tokens=offset + len(token_ids), cached_tokens=1))
    fields.setdefault("generation_id", "g-1")
    fields.setdefault("seed", 7)
    return pb.GenerateResponse(text=text, token_ids=token_ids, offset=offset, **fields)


def says(*responses: pb.GenerateResponse) -> Script:
    """A script that sends these and ends."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from responses

    return script


HELLO = says(
    response("Hel", 10, 11),
    response("lo", 12, offset=2),
    response(" world", 13, 14, offset=3, last=True),
)


def refuses(
    code: grpc.StatusCode, message: str, after: tuple[pb.GenerateResponse, ...] = (), **trailing: str
) -> Script:
    """A script that sends `after`, then ends with a status. `trailing`: metadata, with dashes for underscores."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from after
        context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in trailing.items()))
        context.abort(code, message)

    return script


class Endless:
    """A script that sends one token after another until the client is gone, and notes that it saw it go."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.sent = 0

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(self.cancelled.set)
        while context.is_active():
            yield response("x", 1, offset=self.sent)
            self.sent += 1
            self.cancelled.wait(0.005)


class Held:
    """A script that sends the first message of HELLO, then waits at a gate before it sends the rest."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.gate = threading.Event()
        self.cancelled = threading.Event()

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(self._over)
        first, *rest = HELLO(request, context)
        yield first
        self.waiting.set()
        self.gate.wait(WAIT_S)
        if context.is_active():
            yield from rest

    def _over(self) -> None:
        self.cancelled.set()
        self.gate.set()


class FakeGeneration(generation_pb2_grpc.GenerationServicer, admin_pb2_grpc.AdminServicer):
    """The scripted service. `scripts` are used up one per call of Generate, `resumes` one per call of Resume; the last
    of either stays. Without `resumes` no generation is known.

    `failures`: statuses with which the next calls of any other method end, one per call.
    """

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts) or [HELLO]
        self.resumes: list[Script] = []
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.seen: list[Any] = []  # requests of every kind, in order
        self.model = pb.GetModelResponse(
            name="toy",
            fingerprint="ab12",
            vocab_size=32,
            context_tokens=64,
            end_token_ids=[2],
            has_chat_template=True,
            architecture="ToyForCausalLM",
        )
        self.status = pb.StatusResponse(
            service="microtome",
            version="0.1.0",
            uptime_ms=61_500,
            workers=[
                pb.WorkerStatus(
                    name="worker-0",
                    state="ready",
                    device="cpu",
                    incarnation="00ff",
                    pid=4242,
                    address="127.0.0.1:40001",
                    cells_used=12,
                    cells_usable=4096,
                    sessions=2,
                    steps=99,
                )
            ],
            running=2,
            waiting=1,
            counters=pb.Counters(generations_started=5, output_tokens=321),
            ray_address="127.0.0.1:6379",
        )
        self.places = [
            pb.Whereabouts(
                index=0,
                state=pb.GENERATION_STATE_RUNNING,
                waits_for=pb.WAITING_REASON_NOTHING,
                prompt_tokens=5,
                output_tokens=17,
                worker="worker-0",
                parked=1,
                moved=2,
                age_ms=2500,
            ),
            pb.Whereabouts(
                index=1,
                state=pb.GENERATION_STATE_WAITING,
                waits_for=pb.WAITING_REASON_TENANT_SHARE,
                position=3,
                predicted_ttft_ms=1250,
                prompt_tokens=5,
            ),
        ]
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.seen.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return script(request, context)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.seen.append(request)
        if not self.resumes:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no generation {request.generation_id!r} is running or kept")
        script = self.resumes.pop(0) if len(self.resumes) > 1 else self.resumes[0]
        return script(request, context)

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        self._note(request, context)
        if request.generation_id == "g-none":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no generation {request.generation_id!r} is running")
        return pb.CancelResponse()

    def Where(self, request: pb.WhereRequest, context: grpc.ServicerContext) -> pb.WhereResponse:
        self._note(request, context)
        return pb.WhereResponse(generation_id=request.generation_id, completions=self.places)

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        self._note(request, context)
        return self.model

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        self._note(request, context)
        return self.status

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.Session:
        self._note(request, context)
        return pb.Session(session_id="s-1")

    def CloneSession(self, request: pb.CloneSessionRequest, context: grpc.ServicerContext) -> pb.Session:
        self._note(request, context)
        return pb.Session(session_id="s-2", length=request.upto)

    def RewindSession(self, request: pb.RewindSessionRequest, context: grpc.ServicerContext) -> pb.Session:
        self._note(request, context)
        return pb.Session(session_id=request.session_id, length=request.position)

    def GetSession(self, request: pb.GetSessionRequest, context: grpc.ServicerContext) -> pb.Session:
        self._note(request, context)
        return pb.Session(session_id=request.session_id, length=17)

    def CloseSession(self, request: pb.CloseSessionRequest, context: grpc.ServicerContext) -> pb.CloseSessionResponse:
        self._note(request, context)
        return pb.CloseSessionResponse()

    def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainWorkerResponse:
        self._note(request, context)
        return admin_pb2.DrainWorkerResponse()

    def Update(self, request: admin_pb2.UpdateRequest, context: grpc.ServicerContext) -> admin_pb2.UpdateResponse:
        self._note(request, context)
        return admin_pb2.UpdateResponse(revision=3)

    def ListGenerations(
        self, request: admin_pb2.ListGenerationsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListGenerationsResponse:
        self._note(request, context)
        listed = [
            admin_pb2.ListedGeneration(generation_id=f"g-{n}", tenant="acme", priority=n, whereabouts=place)
            for n, place in enumerate(self.places)
        ]
        return admin_pb2.ListGenerationsResponse(generations=listed, total=len(listed) + 5)

    def asked(self, kind: type[Any]) -> list[Any]:
        """The requests of one kind, in order."""
        return [request for request in self.seen if isinstance(request, kind)]

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.seen.append(request)
        if self.failures:
            context.abort(*self.failures.pop(0))
        return


class Served:
    """A fake service at an address; may be stopped and started again at the same one."""

    def __init__(self, service: FakeGeneration) -> None:
        self.service = service
        self._server: grpc.Server | None = None
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        options = (("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 50))
        server = grpc.server(ThreadPoolExecutor(max_workers=16), options=options)
        generation_pb2_grpc.add_GenerationServicer_to_server(self.service, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.service.health, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """End it, and the connections of its clients, at once."""
        if self._server is not None:
            self._server.stop(grace=None).wait(WAIT_S)
            self._server = None


@contextmanager
def serving(*scripts: Script) -> Iterator[Served]:
    served = Served(FakeGeneration(*scripts))
    try:
        yield served
    finally:
        served.stop()
