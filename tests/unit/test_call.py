"""What a gRPC failure means, and when a call is made again: pure, told how each attempt went."""

from typing import Any

import grpc
import pytest

from microtome import errors
from microtome.call import Call, Contact, Readiness, channel_options
from microtome.generation_call import GenerationCall
from microtome.retry import Retry
from microtome.v1 import generation_pb2 as pb
from tests.support.fake_generation import response

ADDRESS = "10.0.0.7:50051"
ONCE = Retry(attempts=1, resume_attempts=1)
Code = grpc.StatusCode


class Failure:
    """A call that ended with a status, as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, details: str | None, trailing: Any = ()) -> None:
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


def told(code: grpc.StatusCode, details: str | None, timeout_s: float | None = None) -> str:
    return str(Call(ADDRESS, ONCE, timeout_s).error_of(Failure(code, details)))


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            f"no service answers at {ADDRESS} (connection refused (111))",
        ),
        ("failed to connect to all addresses", f"no service answers at {ADDRESS} (failed to connect to all addresses)"),
        (
            "errors resolving nowhere:1: [field:hostname lookup error:address lookup failed]",
            f"no service answers at {ADDRESS} (there is no such host)",
        ),
        ("DNS resolution failed for nowhere:1", f"no service answers at {ADDRESS} (there is no such host)"),
        ("Socket closed", f"the connection to the service at {ADDRESS} was lost"),
        ("GOAWAY received", f"the connection to the service at {ADDRESS} was lost"),
        ("Stream removed (Socket closed)", f"the connection to the service at {ADDRESS} was lost"),
        ("ping timeout", f"the connection to the service at {ADDRESS} was lost"),
        ("recvmsg:Connection reset by peer", f"the connection to the service at {ADDRESS} was lost"),
        ("", f"the connection to the service at {ADDRESS} was lost"),
        (None, f"the connection to the service at {ADDRESS} was lost"),
        ("the service is stopping", "the service is stopping"),
    ],
)
def test_gRPCs_remarks_on_sockets_become_a_sentence_and_the_services_own_stay(
    details: str | None, sentence: str
) -> None:
    assert told(Code.UNAVAILABLE, details) == sentence


@pytest.mark.parametrize(
    ("code", "details", "sentence"),
    [
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", f"no answer from {ADDRESS} within 3 s"),
        (Code.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", f"no answer from {ADDRESS} within 3 s"),
        (Code.DEADLINE_EXCEEDED, "waited 3 s for cells", "waited 3 s for cells"),
        (Code.UNIMPLEMENTED, "Method not found!", f"what answers at {ADDRESS} does not offer microtome.v1.Generation"),
        (Code.CANCELLED, "Channel closed!", "the client was closed while the call ran"),
        (Code.INTERNAL, "", f"INTERNAL from {ADDRESS}"),
    ],
)
def test_other_remarks_of_gRPC_become_sentences_too(code: grpc.StatusCode, details: str, sentence: str) -> None:
    assert told(code, details, timeout_s=3) == sentence


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("SERVER", "the request has 8000042 bytes, and 4194304 is the service's limit"),
        ("CLIENT", "the answer has 8000042 bytes, and 4194304 is the client's limit"),
    ],
)
def test_a_message_that_is_too_large_is_refused_and_not_to_be_tried_later(end: str, sentence: str) -> None:
    details = f"{end}: Received message larger than max (8000042 vs. 4194304)"
    error = Call(ADDRESS, ONCE, None).error_of(Failure(Code.RESOURCE_EXHAUSTED, details))
    assert (type(error), str(error), error.status) == (errors.InvalidRequest, sentence, "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("value", ["soon", "-5", "1.5", b"\xff"])
def test_a_retry_after_that_is_no_number_is_left_out(value: str | bytes) -> None:
    failure = Failure(Code.RESOURCE_EXHAUSTED, "full", [("other", "1"), ("retry-after-ms", value)])
    assert Call(ADDRESS, ONCE, None).error_of(failure).retry_after_ms is None


def test_only_unavailable_is_tried_again() -> None:
    again = []
    for code in Code:
        call = Call(ADDRESS, Retry(attempts=2), None)
        try:
            call.failed(Failure(code, "no"))
        except errors.MicrotomeError:
            continue
        again.append(code)
    assert again == [Code.UNAVAILABLE]


def test_no_attempt_is_made_whose_wait_outlasts_the_deadline() -> None:
    call = Call(ADDRESS, Retry(attempts=9, first_s=50.0, most_s=60.0), timeout_s=20.0)
    with pytest.raises(errors.Unavailable, match="the service is stopping"):
        call.failed(Failure(Code.UNAVAILABLE, "the service is stopping"))


def test_the_time_left_never_goes_below_zero_and_is_none_without_a_limit() -> None:
    assert Call(ADDRESS, ONCE, 1e-9).remaining_s() == 0.0
    assert Call(ADDRESS, ONCE, None).remaining_s() is None


def test_a_generation_counts_its_failures_anew_after_each_message() -> None:
    call = GenerationCall(pb.GenerateRequest(text="hi"), ADDRESS, Retry(attempts=2, resume_attempts=3), None)
    lost = Failure(Code.UNAVAILABLE, "Socket closed")
    assert call.next_attempt()[0] == "Generate"
    call.failed(lost)
    call.received(response("a", 1, 2))
    for _ in range(2):
        call.failed(lost)
        assert call.next_attempt() == ("Resume", pb.ResumeRequest(generation_id=call.generation_id, offset=2))
    call.received(response("b", 3, offset=2))
    for _ in range(2):
        call.failed(lost)
        assert call.next_attempt() == ("Resume", pb.ResumeRequest(generation_id=call.generation_id, offset=3))
    with pytest.raises(errors.Unavailable, match="was lost after 3 tokens"):
        call.failed(lost)


def test_a_call_that_a_service_had_is_given_as_long_as_a_stream_to_come_back() -> None:
    """It waited in line there, and the service restarts: what a call that nobody has answered is given is too short."""
    retry = Retry(attempts=2, resume_attempts=5)
    refused = Failure(Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")

    def attempts(request: pb.GenerateRequest, *failures: Failure) -> int:
        call = GenerationCall(request, ADDRESS, retry, None)
        for number, failure in enumerate(failures, start=1):
            try:
                call.failed(failure)
            except errors.Unavailable:
                return number
            assert call.next_attempt()[0] == "Generate"
        return len(failures) + 1

    broken = Failure(Code.UNAVAILABLE, "Socket closed")
    own = Failure(Code.UNAVAILABLE, "the model is gone")
    assert attempts(pb.GenerateRequest(), *[refused] * 9) == 2
    assert attempts(pb.GenerateRequest(), *[own] * 9) == 2
    assert attempts(pb.GenerateRequest(), broken, *[refused] * 9) == 5
    assert attempts(pb.GenerateRequest(), Failure(Code.UNAVAILABLE, "Stream removed (Socket closed)"), *[own] * 9) == 5
    assert attempts(pb.GenerateRequest(session_id="1"), broken, *[refused] * 9) == 1, "a session's prompt may be there"


def test_a_service_that_has_answered_before_is_waited_for_as_long_as_a_stream_while_nobody_answers() -> None:
    retry, contact = Retry(attempts=2, resume_attempts=5), Contact()
    refused = Failure(Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")
    own = Failure(Code.UNAVAILABLE, "the model is gone")

    def attempts(call: Call, failure: Failure) -> int:
        for number in range(1, 9):
            try:
                call.failed(failure)
            except errors.Unavailable:
                return number
        raise AssertionError("it never gives up")

    def calls() -> list[Call]:
        return [
            Call(ADDRESS, retry, None, contact),
            GenerationCall(pb.GenerateRequest(), ADDRESS, retry, None, contact),
        ]

    assert [attempts(call, refused) for call in calls()] == [2, 2]
    Call(ADDRESS, retry, None, contact).answered()
    assert [attempts(call, refused) for call in calls()] == [5, 5]
    assert [attempts(call, own) for call in calls()] == [2, 2], "a service that says no is there"
    another = Contact()
    generation = GenerationCall(pb.GenerateRequest(), ADDRESS, retry, None, another)
    generation.received(response("a", 1))
    assert another.made


def test_what_broke_the_stream_is_told_and_not_why_it_could_not_be_resumed() -> None:
    call = GenerationCall(pb.GenerateRequest(text="hi"), ADDRESS, Retry(resume_attempts=2), None)
    call.received(response("a", 1))
    call.failed(Failure(Code.UNAVAILABLE, "Socket closed"))
    with pytest.raises(errors.Unavailable, match=r"was lost after 1 token$"):
        call.failed(Failure(Code.UNAVAILABLE, "failed to connect to all addresses"))


def test_a_resume_of_the_callers_own_that_is_not_known_is_not_found_whatever_was_lost_before() -> None:
    call = GenerationCall(pb.ResumeRequest(generation_id="g", offset=4), ADDRESS, Retry(), None)
    call.failed(Failure(Code.UNAVAILABLE, "Socket closed"))
    with pytest.raises(errors.NotFound, match="no generation 'g'"):
        call.failed(Failure(Code.NOT_FOUND, "no generation 'g'"))


def test_a_callers_own_id_is_kept_over_every_attempt() -> None:
    call = GenerationCall(pb.GenerateRequest(text="hi", generation_id="mine"), ADDRESS, Retry(), None)
    call.failed(Failure(Code.UNAVAILABLE, "Socket closed"))
    assert call.generation_id == "mine"


def test_a_message_past_the_callers_offset_is_refused() -> None:
    call = GenerationCall(pb.ResumeRequest(generation_id="g", offset=4), ADDRESS, Retry(), None)
    assert call.received(response("a", 1, offset=4)).offset == 4
    with pytest.raises(errors.ServiceFailed, match="went on at token 4, not at 5"):
        call.received(response("a", 1, offset=4))


def test_readiness_gives_up_at_once_where_waiting_cannot_help() -> None:
    with pytest.raises(errors.Unsupported):
        Readiness(ADDRESS, 10.0).failed(Failure(Code.UNIMPLEMENTED, "Method not found!"))
    with pytest.raises(errors.Denied):
        Readiness(ADDRESS, 10.0).failed(Failure(Code.UNAUTHENTICATED, "no token"))


def test_readiness_tells_the_last_real_reason() -> None:
    readiness = Readiness(ADDRESS, 1e-9)
    with pytest.raises(errors.DeadlineExceeded, match="the service is stopping; waited 1e-09 s"):
        readiness.failed(Failure(Code.UNAVAILABLE, "the service is stopping"))
    with pytest.raises(errors.DeadlineExceeded, match="the service is stopping; waited"):
        readiness.failed(Failure(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:50051", "unix:/tmp/socket"])
def test_no_proxy_is_asked_for_this_machines_own_ports(address: str) -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options(address)


def test_a_proxy_from_the_environment_is_used_for_other_machines() -> None:
    for address in ("10.0.0.7:1", "service.example:443", "dns:///service:1", "localhost.example:1"):
        assert "grpc.enable_http_proxy" not in dict(channel_options(address))


def test_a_silent_link_is_probed_and_given_up() -> None:
    options = dict(channel_options(ADDRESS))
    # keepalive_timeout_ms has no effect in this gRPC; the ping's own time-out has.
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 15_000
    assert options["grpc.http2.max_pings_without_data"] == 0
