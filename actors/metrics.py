"""What is counted, for Prometheus: counters from `Control`'s own, gauges of now, histograms of what clients felt.

Nothing here is on the path of a token: totals are read when somebody scrapes, and a generation is looked at once, when
it ends. Names carry units; times are seconds, as Prometheus has it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from microtome.actors.crew import Member, State
from microtome.actors.journal_file import JournalFile
from microtome.actors.remains import Loss
from microtome.actors.streams import Stream
from microtome.planner.errors import BadConfig
from microtome.planner.status import ControlStatus
from microtome.planner.tenant_counters import OTHERS

LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)

# Of `planner.status.Counters`: field, name of the metric, factor to its unit, help.
COUNTERS = (
    ("generations_started", "microtome_generations_started", 1, "Generations admitted"),
    ("refused", "microtome_generations_refused", 1, "Generations refused at submission"),
    ("prompt_tokens", "microtome_prompt_tokens", 1, "Prompt tokens of admitted generations"),
    ("output_tokens", "microtome_output_tokens", 1, "Tokens delivered"),
    ("cached_tokens", "microtome_cached_tokens", 1, "Prompt tokens found in the prefix cache"),
    ("prefilled_tokens", "microtome_prefilled_tokens", 1, "Given tokens that were run, recomputed ones included"),
    ("overshoot_tokens", "microtome_overshoot_tokens", 1, "Tokens decoded after a stop that was not yet known"),
    ("parked", "microtome_parked", 1, "Times a running generation gave up its cells"),
    ("moved", "microtome_moved", 1, "Times a generation lost its worker and moved"),
    ("steps", "microtome_steps", 1, "Steps settled"),
    ("failed_steps", "microtome_failed_steps", 1, "Steps failed"),
    ("step_us", "microtome_step_seconds", 1e-6, "Time in steps, all workers"),
    ("idle_us", "microtome_idle_seconds", 1e-6, "Time between steps, all workers"),
)
# Of `planner.tenant_counters.TenantCounters`: field, name of the metric, help.
TENANT_COUNTERS = (
    ("generations", "microtome_tenant_generations", "Generations ended"),
    ("refused", "microtome_tenant_refused", "Generations refused at submission"),
    ("prompt_tokens", "microtome_tenant_prompt_tokens", "Prompt tokens of ended generations"),
    ("cached_tokens", "microtome_tenant_cached_tokens", "Of those, found in the prefix cache"),
    ("output_tokens", "microtome_tenant_output_tokens", "Tokens delivered by ended generations"),
)
OTHER_TENANTS = "(other)"
FINISHES = (("stopped", "stop"), ("reached_limit", "length"), ("cancelled", "cancelled"), ("failed", "failed"))


@dataclass(frozen=True, slots=True)
class Observation:
    """What one scrape reads, taken at one moment."""

    control: ControlStatus
    members: Sequence[Member]
    handling_s: float  # spent by the driver on events since it started
    text_s: float  # spent decoding text
    losses: Mapping[tuple[Loss, str], int]  # of workers: how, and what ended the process
    journal: JournalFile | None = None


class Metrics(Collector):
    """One registry per service, so that two in one process do not mix."""

    def __init__(self, observe: Callable[[], Observation]) -> None:
        """`observe` is called on the thread of whoever scrapes."""
        self._observe = observe
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._ttft = Histogram(
            "microtome_time_to_first_token_seconds",
            "From a call's arrival to its first token",
            buckets=LATENCY_S,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "microtome_inter_token_seconds",
            "Mean time between a generation's tokens",
            buckets=TOKEN_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "microtome_generation_seconds",
            "From a call's arrival to its end",
            buckets=LATENCY_S,
            registry=self.registry,
        )

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve them over HTTP on a thread; the answer ends it. Raises `BadConfig` when the port cannot be had."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise BadConfig(f"metrics port {port} on {host} cannot be bound: {error.strerror or error}") from error

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return end

    def generation_ended(self, stream: Stream, now_us: int) -> None:
        self._duration.observe((now_us - stream.created_us) * 1e-6)
        if stream.first_us is None:
            return
        self._ttft.observe((stream.first_us - stream.created_us) * 1e-6)
        if stream.length > 1:
            self._inter_token.observe((now_us - stream.first_us) * 1e-6 / (stream.length - 1))

    def collect(self) -> Iterator[Metric]:
        seen = self._observe()
        status, counters = seen.control, seen.control.counters
        for field, name, factor, text in COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(counters, field) * factor)
        finished = CounterMetricFamily("microtome_generations_finished", "Generations ended", labels=["reason"])
        for field, reason in FINISHES:
            finished.add_metric([reason], getattr(counters, field))
        yield finished
        yield CounterMetricFamily("microtome_driver_seconds", "Time spent handling events", value=seen.handling_s)
        yield CounterMetricFamily("microtome_text_seconds", "Time spent decoding text", value=seen.text_s)
        yield GaugeMetricFamily("microtome_generations_running", "With a place on a worker", value=status.running)
        yield GaugeMetricFamily("microtome_generations_waiting", "In line", value=status.waiting)
        yield GaugeMetricFamily("microtome_sessions_open", "Opened by callers", value=status.sessions)
        if seen.journal is not None:
            written, recording = seen.journal.written_bytes, seen.journal.recording
            yield CounterMetricFamily("microtome_journal_bytes", "Written to the journal by this driver", value=written)
            yield GaugeMetricFamily("microtome_journal_recording", "1 while the journal has no gap", value=recording)
        if len(status.tenants) > 1:
            yield from _tenants(status)
        yield from _workers(seen)


def _tenants(status: ControlStatus) -> Iterator[Metric]:
    """Labels are those that the configuration names, and one for all others: callers cannot make up more."""
    names = [(name, OTHER_TENANTS if name == OTHERS else name) for name in status.tenants]
    for field, metric, text in TENANT_COUNTERS:
        family = CounterMetricFamily(metric, text, labels=["tenant"])
        for name, label in names:
            family.add_metric([label], getattr(status.tenants[name], field))
        yield family
    ttft = SummaryMetricFamily(
        "microtome_tenant_time_to_first_token_seconds", "From submission to the first token", labels=["tenant"]
    )
    for name, label in names:
        counters = status.tenants[name]
        ttft.add_metric([label], counters.first_tokens, counters.ttft_us * 1e-6)
    yield ttft


def _workers(seen: Observation) -> Iterator[Metric]:
    states = dict.fromkeys(State, 0)
    for member in seen.members:
        states[member.state] += 1
    count = GaugeMetricFamily(
        "microtome_workers", "Workers by state; of those that are gone the recent", labels=["state"]
    )
    for state, number in states.items():
        count.add_metric([state.value], number)
    yield count
    lost = CounterMetricFamily(
        "microtome_workers_lost",
        "Workers lost: how, and the signal or exit code that ended the process, where it is known",
        labels=["reason", "process"],
    )
    for (loss, process), number in seen.losses.items():
        lost.add_metric([loss.value, process], number)
    yield lost
    families = {
        "cells_used": GaugeMetricFamily("microtome_cells_used", "Cells of sessions", labels=["worker"]),
        "cells_cached": GaugeMetricFamily("microtome_cells_cached", "Cells of the prefix cache", labels=["worker"]),
        "cells_usable": GaugeMetricFamily("microtome_cells_usable", "Cells of the pool", labels=["worker"]),
        "sessions": GaugeMetricFamily("microtome_worker_sessions", "Sessions placed", labels=["worker"]),
        "steps_in_flight": GaugeMetricFamily("microtome_steps_in_flight", "Steps sent", labels=["worker"]),
    }
    for worker in seen.control.workers:
        for field, family in families.items():
            family.add_metric([worker.worker], getattr(worker, field))
    yield from families.values()
