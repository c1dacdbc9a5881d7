"""A service's status, for people to read."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from microtome.answers import Model, ServiceStatus
from microtome.terminal import one_line

__all__ = ["UNWRAPPED", "status_view"]

UNWRAPPED = 1000  # columns, where nothing is to be folded
_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "ended": "dim", "lost": "red"}


def status_view(state: ServiceStatus, model: Model, address: str) -> RenderableType:
    """A line on the service, one on its model and load, a row for each worker, why some are not ready, the counters."""
    headline = Text()
    headline.append(one_line(state.service), "bold")
    headline.append(f" {one_line(state.version)} at {address}, up {_duration(state.uptime_s)}")
    if state.ray_address:
        headline.append(f", on Ray {one_line(state.ray_address)}")
    load = Text(f"{one_line(model.name)}: {state.running} running, {state.waiting} waiting")
    counters = Text(", ".join(_counted(state.counters)), "dim")
    causes = [
        Text(f"{one_line(worker.name)} is {one_line(worker.state)}: {one_line(worker.cause)}", "dim")
        for worker in state.workers
        if worker.cause
    ]
    return Group(headline, load, _workers(state), *causes, counters)


def _workers(state: ServiceStatus) -> RenderableType:
    if not state.workers:
        return Text("no workers", "red")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("worker", "state", "device", "address"):
        table.add_column(name, overflow="fold")
    for name in ("pid", "sessions", "cells", "cached", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in state.workers:
        table.add_row(
            one_line(worker.name),
            Text(one_line(worker.state), _STYLES.get(worker.state, "")),
            one_line(worker.device),
            one_line(worker.address),
            str(worker.pid),
            str(worker.sessions),
            f"{worker.cells_used}/{worker.cells_usable}",
            str(worker.cells_cached),
            str(worker.steps),
        )
    return table


def _counted(counters: dict[str, int]) -> list[str]:
    counted = [
        f"{counters['generations_finished']} of {counters['generations_started']} generations finished",
        f"{counters['prompt_tokens']} prompt tokens ({counters['cached_tokens']} cached)",
        f"{counters['output_tokens']} output tokens",
        f"{counters['steps']} steps",
    ]
    if counters["steps"]:
        counted.append(f"{counters['step_us'] / counters['steps'] / 1e3:.1f} ms a step")
    busy_us = counters["step_us"] + counters["idle_us"]
    if busy_us:
        counted.append(f"{100 * counters['idle_us'] / busy_us:.1f} % idle between steps")
    return counted


def _duration(seconds: float) -> str:
    minutes, whole_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole_s, "s")]
    first = next((place for place, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2])
