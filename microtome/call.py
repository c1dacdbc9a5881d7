"""What the two clients share: one call's life, whoever does the waiting. Starts no thread, opens no connection.

A client owns the channel and waits; it tells a `Call` what came and does as it says: wait so many seconds and try
again, or raise. One thread at a time uses a `Call`. Here is also, and only here, what a gRPC failure means.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from microtome.errors import DeadlineExceeded, InvalidRequest, MicrotomeError, Unavailable, error_for
from microtome.retry import Retry

SERVICE = "microtome.v1.Generation"
CLOSED = "the client is closed"
CLOSED_MEANWHILE = "the client was closed while the call ran"
CANCEL_S = 1.0  # how long a `Cancel` that nobody waits for may take
RETRY_AFTER_KEY = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED

# A link that is silent for 10 s is probed, and given up 5 s later; an idle client sends no probes. What ends a silent
# link is http2.ping_timeout_ms: keepalive_timeout_ms has no effect in this gRPC.
_KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
)
# A service that restarts is back within a second: gRPC's own wait before it dials again must not be the longer one.
_RECONNECT: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the least time a single dialling may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # one client's failed dialling delays no other's
    ("grpc.enable_retries", 0),  # what is tried again is decided here
)
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
_TOO_LARGE = re.compile(r"(?P<end>SERVER|CLIENT): Received message larger than max \((?P<bytes>\d+) vs\. (?P<most>\d+)")
_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:", "xds:")


class RpcFailure(Protocol):
    """What a failed call tells, in either of gRPC's two Python interfaces."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...


def channel_options(address: str) -> list[tuple[str, Any]]:
    """How a client's channel to `address` behaves. Raises InvalidRequest when it is no address."""
    host, _, port = address.rpartition(":")
    if not address.startswith(_SCHEMES) and not (
        host and (":" not in host or host.startswith("[")) and port.isdecimal() and 0 < int(port) < 2**16
    ):
        raise InvalidRequest(f'an address is "host:port" with a port from 1 to 65535, not {address!r}')
    options: list[tuple[str, Any]] = [*_KEEPALIVE, *_RECONNECT]
    if address.startswith(_LOOPBACK):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy from the environment cannot reach this machine's ports
    return options


class Contact:
    """What a client knows of its service beyond one call: whether it has ever had an answer from it.

    If so the address is right, and a service that nobody answers for restarts, rather than being none.
    """

    def __init__(self) -> None:
        self.made = False


class Call:
    """One call, its retries included. `timeout_s` is for all of it together; None: no limit."""

    def __init__(self, address: str, retry: Retry, timeout_s: float | None, contact: Contact | None = None) -> None:
        self._address = address
        self._retry = retry
        self._contact = contact or Contact()
        self._restarts = False  # a service was there, and is away
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._failures = 0  # since something last arrived

    def remaining_s(self) -> float | None:
        """What an attempt that starts now may take: gRPC's `timeout`."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def failed(self, failure: RpcFailure) -> float:
        """Seconds to wait before the next attempt. Raises what the caller is told, when there is to be none.

        Every call that goes through here may be made twice: it only asks, or it cancels.
        """
        error = self.error_of(failure)
        wait_s = self._wait_s(self._patience(failure))
        if not isinstance(error, Unavailable) or wait_s is None:
            raise error
        return wait_s

    def answered(self) -> None:
        """Something came from the service."""
        self._contact.made = True

    def _patience(self, failure: RpcFailure) -> int:
        """The attempts that a call is given after this failure: while a service restarts, those of a broken stream."""
        self._restarts = self._restarts or _is_broken_link(failure) or (self._contact.made and _is_unanswered(failure))
        return self._retry.resume_attempts if self._restarts else self._retry.attempts

    def _wait_s(self, attempts: int) -> float | None:
        """The wait after one more failure; None: that was the last attempt, or the time is over before the next."""
        self._failures += 1
        wait_s = self._retry.wait_s(self._failures, random.random())
        remaining_s = self.remaining_s()
        return wait_s if self._failures < attempts and (remaining_s is None or wait_s < remaining_s) else None

    def _so_far(self) -> str:
        """What had come before the failure, in words; empty: nothing."""
        return ""

    def error_of(self, failure: RpcFailure) -> MicrotomeError:
        code, details = failure.code(), (failure.details() or "").strip()
        if details.startswith("Stream removed (") and details.endswith(")"):  # gRPC, around its own words
            details = details[len("Stream removed (") : -1]
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(self._unavailable(details), code.name)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and (
            not details or "Deadline Exceeded" in details
        ):  # gRPC's words
            details = f"no answer from {self._address} within {self._timeout_s or 0:g} s"
            if self._so_far():
                details = f"the generation took longer than {self._timeout_s or 0:g} s; {self._so_far()} had come"
        if code is grpc.StatusCode.CANCELLED and details == "Channel closed!":
            details = CLOSED_MEANWHILE
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.match(details)):
            # No lack of room that passes: the same message is too large tomorrow, too.
            whose, limit = ("request", "service") if sizes["end"] == "SERVER" else ("answer", "client")
            return InvalidRequest(
                f"the {whose} has {sizes['bytes']} bytes, and {sizes['most']} is the {limit}'s limit", code.name
            )
        if code is grpc.StatusCode.UNIMPLEMENTED and details in ("", "Method not found!"):
            details = f"what answers at {self._address} does not offer {SERVICE}"
        return error_for(code.name, details or f"{code.name} from {self._address}", _retry_after_ms(failure))

    def _unavailable(self, details: str) -> str:
        """The service's own sentence, or ours in place of gRPC's remarks on sockets."""
        where, lowered = self._address, details.lower()
        if lowered.startswith(_NO_ANSWER):
            reason = details.rpartition(": ")[2] or "connection failed"
            return f"no service answers at {where} ({reason[0].lower()}{reason[1:]})"
        if lowered.startswith(("errors resolving", "dns resolution failed")) or "name resolution" in lowered:
            return f"no service answers at {where} (there is no such host)"
        if lowered.startswith(_LINK_BROKEN) or not details:
            had = f" after {self._so_far()}" if self._so_far() else ""
            return f"the connection to the service at {where} was lost{had}"
        return details


class Readiness:
    """A wait for a service to be ready: told how each health check went, it says how long to wait before the next."""

    POLL_S = 0.1
    CHECK_S = 5.0  # one check may take this long, or what is left if that is less

    def __init__(self, address: str, timeout_s: float) -> None:
        self._call = Call(address, Retry(), timeout_s)
        self._address, self._timeout_s = address, timeout_s
        self._reason = ""  # why it was not ready when we last looked

    def check_timeout_s(self) -> float:
        return min(self.CHECK_S, self._call.remaining_s() or 0.0)

    def not_serving(self) -> float:
        self._reason = f"the service at {self._address} is not ready"
        return self._again()

    def failed(self, failure: RpcFailure) -> float:
        """Raises at once when waiting cannot help: no health service there, or this caller may not ask."""
        error = self._call.error_of(failure)
        if not isinstance(error, Unavailable | DeadlineExceeded):
            raise error
        if isinstance(error, Unavailable) or not self._reason:  # a check cut short by the deadline tells nothing new
            self._reason = str(error)
        return self._again()

    def _again(self) -> float:
        if not self._call.remaining_s():
            raise DeadlineExceeded(f"{self._reason}; waited {self._timeout_s:g} s", "DEADLINE_EXCEEDED")
        return self.POLL_S


_NO_ANSWER = ("failed to connect to all addresses", "connection refused")
_LINK_BROKEN = (  # how gRPC's own remarks on a lost connection begin
    "cancelling all calls",
    "socket closed",
    "connection reset",
    "stream removed",
    "goaway",
    "recvmsg:",
    "sendmsg:",
    "ping timeout",
    "keepalive watchdog timeout",
    "broken pipe",
    "transport closed",
    "connection aborted",
    "eof",
    "endpoint closing",
    "end of tcp stream",
    "received rst_stream",
    "failed parsing http/2",
    "connection attempt timed out",
)


def _is_unanswered(failure: RpcFailure) -> bool:
    """Whether nobody listens at the address."""
    return failure.code() is grpc.StatusCode.UNAVAILABLE and (failure.details() or "").lower().startswith(_NO_ANSWER)


def _is_broken_link(failure: RpcFailure) -> bool:
    """Whether the call had reached a service, and lost it: not when nobody answered, nor when the service said so."""
    details = (failure.details() or "").strip().lower()
    if details.startswith("stream removed ("):
        details = details.removeprefix("stream removed (")
    return failure.code() is grpc.StatusCode.UNAVAILABLE and details.startswith(_LINK_BROKEN)


def _retry_after_ms(failure: RpcFailure) -> int | None:
    metadata: Sequence[tuple[str, str | bytes]] = tuple(failure.trailing_metadata() or ())
    for key, value in metadata:
        if key == RETRY_AFTER_KEY and str(value).isdecimal():
            return int(value)
    return None
