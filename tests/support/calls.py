"""Calls of the `Generation` service as tests make them: raw stubs, and answers put together by offset."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from microtome.planner.types import SamplingParams
from microtome.v1 import generation_pb2 as pb
from tests.support.fake_model import generate

POLL_S = 0.005
VOCABULARY = 1000  # the fake executor's, unless it is told another


def request(prompt: list[int], **settings: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **settings)


def undisturbed(prompt: list[int], max_new_tokens: int, seed: int = 0, temperature: float = 0.0) -> list[int]:
    """What the fake executor delivers when nothing goes wrong."""
    sampling = SamplingParams(seed=seed, temperature=temperature, prompt_tokens=len(prompt))
    return generate(prompt, sampling, max_new_tokens, (), VOCABULARY)


async def collect(stub: Any, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of one call. Raises the status it ends with."""
    return await rest_of(stub.Generate(asked))


async def rest_of(call: Any) -> list[pb.GenerateResponse]:
    """What is still to come on a call that may have been read from. Raises the status it ends with."""
    responses: list[pb.GenerateResponse] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def read_until_broken(call: Any, tokens: list[int]) -> grpc.StatusCode:
    """Add what comes to `tokens`, by offset, until the call breaks; the status it broke with. OK: it did not."""
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            assert response.offset == len(tokens)
            tokens += response.token_ids
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def resume_to_end(stub: Any, generation: str, tokens: list[int]) -> None:
    """Go on with a broken generation, adding to `tokens`, as often as its driver is away."""
    code = grpc.StatusCode.UNAVAILABLE
    while code is grpc.StatusCode.UNAVAILABLE:
        call = stub.Resume(pb.ResumeRequest(generation_id=generation, offset=len(tokens)), wait_for_ready=True)
        code = await read_until_broken(call, tokens)
    assert code is grpc.StatusCode.OK, code


def tokens_of(responses: list[pb.GenerateResponse]) -> list[int]:
    """Put together by offset, which must fit without gap or overlap."""
    tokens: list[int] = []
    for response in responses:
        assert response.offset == len(tokens)
        tokens += response.token_ids
    return tokens


async def status_when(stub: Any, true: Callable[[pb.StatusResponse], bool]) -> pb.StatusResponse:
    """The first status of which it is true."""
    while True:
        status: pb.StatusResponse = await stub.Status(pb.StatusRequest())
        if true(status):
            return status
        await asyncio.sleep(POLL_S)


async def until_idle(stub: Any) -> pb.StatusResponse:
    """The status once nothing runs and no cell is used by a session."""
    return await status_when(
        stub, lambda s: not s.running and not s.waiting and not any(w.cells_used for w in s.workers)
    )
