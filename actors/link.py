"""What both ends of the driver–worker link agree on: its addresses, metadata keys, limits and channel options.

Values only. Nothing here opens a socket, and nothing here imports torch, ray or grpc.

A silent link is ended by gRPC's own pings: `keepalive_ms` after the last byte a ping is sent, and `ping_timeout_ms`
later the connection is broken. They are answered by gRPC's threads, so a hung step does not break the link: only a
missing `StepResult` shows that (`worker_client`).
"""

from dataclasses import dataclass, field

from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig
from microtome.planner.types import Incarnation, WorkerId

SECRET_KEY = "microtome-secret"  # call metadata: the service's secret, on every call
INCARNATION_KEY = "microtome-incarnation"  # initial metadata of an accepted `Steps` stream: who answers
TAKEN_OVER = "a newer step stream has taken over"  # how a worker ends the older one

DEFAULT_EXECUTOR = "microtome.cuda_runtime.executor:build_executor"

TLS_SETTINGS = ("tls_certificate", "tls_key", "tls_authority", "tls_name")

ChannelOptions = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Checked when built: raises `BadConfig` naming the value and the limit."""

    max_message_bytes: int = 16 * 2**20  # of one message, either way
    keepalive_ms: int = 200  # of silence before a ping
    ping_timeout_ms: int = 300  # of no answer to a ping before the connection counts as broken
    call_timeout_s: float = 10.0  # for every call but the step stream itself
    reconnect_timeout_s: float = 2.0  # to get a broken step stream back before the worker counts as gone
    max_unanswered_steps: int = 8  # how many of its newest results a worker keeps for repeats
    driver_keepalive_ms: int = 5000  # of silence before a worker pings its driver, and of no answer before it is alone
    # Mutual TLS: paths of PEM files, the same on every node; empty: none, and the secret travels in clear.
    tls_certificate: str = ""  # what either end shows: one for the whole service
    tls_key: str = ""  # its private key
    tls_authority: str = ""  # who must have signed what the other end shows
    tls_name: str = ""  # the name that the certificate is for

    def __post_init__(self) -> None:
        if self.max_message_bytes < 4096:
            raise BadConfig(f"max_message_bytes {self.max_message_bytes} is below 4096")
        if self.keepalive_ms < 50:
            raise BadConfig(f"keepalive_ms {self.keepalive_ms} is below 50, the shortest a worker permits")
        if self.ping_timeout_ms < 1:
            raise BadConfig(f"ping_timeout_ms {self.ping_timeout_ms} is below 1")
        for name in ("call_timeout_s", "reconnect_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadConfig(f"{name} {getattr(self, name)} is not a positive number of seconds")
        if self.max_unanswered_steps < 1:
            raise BadConfig(f"max_unanswered_steps {self.max_unanswered_steps} is below 1")
        if self.driver_keepalive_ms < 50:
            raise BadConfig(f"driver_keepalive_ms {self.driver_keepalive_ms} is below 50")
        missing = [name for name in TLS_SETTINGS if not getattr(self, name)]
        if missing and len(missing) < len(TLS_SETTINGS):
            raise BadConfig(f"TLS takes {len(TLS_SETTINGS)} settings, {len(missing)} are empty: {', '.join(missing)}")

    @property
    def tls(self) -> bool:
        return bool(self.tls_certificate)

    @property
    def channel_options(self) -> ChannelOptions:
        """Of the driver's channel to a worker."""
        return (
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", self.keepalive_ms),
            ("grpc.http2.ping_timeout_ms", self.ping_timeout_ms),  # `keepalive_timeout_ms` does nothing in grpcio 1.85
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),  # between tries within `reconnect_timeout_s`
            ("grpc.min_reconnect_backoff_ms", 500),  # of one try to connect
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, shared with no other channel
            ("grpc.enable_retries", 0),  # a plan is repeated by us, by its step number, or not at all
            ("grpc.enable_http_proxy", 0),  # a worker is never behind the environment's web proxy
        )

    @property
    def server_options(self) -> ChannelOptions:
        """Of a worker's server. Without the ping options it ends an idle stream after 4 s for "too many pings"."""
        return (
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # A driver whose node is lost closes nothing: without pings of its own a worker would wait for it for ever.
            ("grpc.keepalive_time_ms", self.driver_keepalive_ms),
            ("grpc.http2.ping_timeout_ms", self.driver_keepalive_ms),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.so_reuseport", 0),  # a port in use is refused, not shared
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker process is told, once, in its constructor. Plain values: it can be pickled."""

    worker: WorkerId
    secret: str = field(repr=False)  # 64 hex digits, made by whoever starts the service; who lacks it is refused
    runtime: RuntimeOptions
    executor: str = DEFAULT_EXECUTOR  # "module:function", called with `runtime` on the step thread
    host: str = "127.0.0.1"  # address to bind
    link: LinkSettings = field(default_factory=LinkSettings)
    hang_timeout_s: float = 30.0  # healthy means: a step, or an idle probe, finished within this
    orphan_timeout_s: float = 60.0  # without a driver's stream or call for this long, the process ends itself
    revision: int = 0  # of the settings; handed back in the endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """A worker that is ready: where it answers, and which life of it. Plain values: it can be pickled."""

    worker: WorkerId
    address: str  # "host:port", gRPC
    incarnation: Incarnation
    pid: int
    device: str
    revision: int = 0  # of the settings it was started with
