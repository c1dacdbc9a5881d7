"""A status as people read it: every worker, and why one is not ready."""

import dataclasses
import io

import pytest
from rich.console import Console

from microtome.answers import ServiceStatus, model_of, status_of
from microtome.status_view import status_view
from microtome.v1 import generation_pb2 as pb

COUNTERS = pb.Counters(
    generations_started=9,
    generations_finished=7,
    prompt_tokens=300,
    cached_tokens=100,
    output_tokens=321,
    steps=40,
    step_us=400_000,
    idle_us=100_000,
)

MODEL = model_of(pb.GetModelResponse(name="tiny"))


def status(*workers: pb.WorkerStatus, uptime_ms: int = 0, counters: pb.Counters = COUNTERS) -> ServiceStatus:
    return status_of(
        pb.StatusResponse(service="toy", version="1.2", uptime_ms=uptime_ms, workers=workers, counters=counters)
    )


def text(state: ServiceStatus, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(status_view(state, MODEL, "h:1"))
    return captured.get()


def test_a_worker_that_is_not_ready_says_why() -> None:
    lost = pb.WorkerStatus(name="worker-2", state="lost", cause="killed by\nsignal 9\x1b[2J")
    assert "worker-2 is lost: killed by signal 9[2J\n" in text(status(lost))


def test_a_worker_that_ended_in_order_is_no_alarm() -> None:
    ended = pb.WorkerStatus(name="worker-2", state="ended", cause="drained: an operator asked for it")
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(status_view(status(ended), MODEL, "h:1"))
    assert "\x1b[2mended" in captured.get()
    assert "\x1b[31m" not in captured.get()
    assert "worker-2 is ended: drained: an operator asked for it\n" in text(status(ended))


def test_a_long_cause_does_not_fold_the_workers_rows() -> None:
    ready = pb.WorkerStatus(name="worker-1", state="ready", device="cpu", address="127.0.0.1:40077", pid=12593)
    lost = pb.WorkerStatus(
        name="worker-2", state="lost", device="cpu", address="127.0.0.1:41731", cause="it died, " * 9
    )
    rows = text(status(ready, lost), 80).splitlines()
    assert sum("127.0.0.1:40077" in row and "12593" in row for row in rows) == 1
    assert sum("127.0.0.1:41731" in row and "lost" in row for row in rows) == 1


def test_the_model_and_the_load_are_told() -> None:
    assert "tiny: 0 running, 0 waiting\n" in text(status())


def test_a_service_without_workers_says_so() -> None:
    assert "no workers" in text(status())


def test_counters_are_summed_up() -> None:
    shown = text(status())
    for fact in (
        "7 of 9 generations finished",
        "300 prompt tokens (100 cached)",
        "321 output tokens",
        "40 steps",
        "10.0 ms a step",
        "20.0 % idle between steps",
    ):
        assert fact in shown


def test_a_service_that_has_run_no_step_has_no_averages() -> None:
    shown = text(status(counters=pb.Counters()))
    assert "0 steps" in shown
    assert "ms a step" not in shown
    assert "idle" not in shown


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [(0, "0 s"), (59_900, "59 s"), (61_000, "1 min 1 s"), (3_600_000, "1 h 0 min"), (200_000_000, "2 d 7 h")],
)
def test_uptime_has_two_units(milliseconds: int, shown: str) -> None:
    assert f"up {shown}\n" in text(status(uptime_ms=milliseconds))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_loses_no_figure(width: int) -> None:
    worker = pb.WorkerStatus(
        name="worker-1", state="ready", device="cuda:0 NVIDIA H200", cells_used=12, cells_usable=65536, pid=424242
    )
    shown = text(status(worker), width)
    assert "12/65536" in shown
    assert "424242" in shown


def test_every_counter_of_the_wire_is_among_the_values() -> None:
    assert set(dataclasses.asdict(status())["counters"]) == {field.name for field in pb.Counters.DESCRIPTOR.fields}
