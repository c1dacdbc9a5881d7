"""A service that lives as long as a block of this process: for `microtome serve`, the demo and short jobs.

    with running(config) as endpoint:
        ...endpoint.address...

What the block started is ended when it is left, however it is left: the service, and the Ray that was started for it.
Imports of the server side happen inside: without them, `ServerPartsMissing` says in one sentence what to install.
"""

import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from microtome.planner.errors import BadConfig

if TYPE_CHECKING:
    from microtome.actors.cluster import Downed, Endpoint
    from microtome.actors.config import ServiceConfig
    from microtome.actors.stages import Stage

DEFAULT_ADDRESS = "127.0.0.1:50051"  # of a service, when nothing else is said
WATCH_S = 0.5  # between two looks whether the service is still there


class ServerPartsMissing(BadConfig):
    """This installation is a client only."""


def server_part(name: str) -> Any:
    """The module `microtome.<name>`. Raises ServerPartsMissing when something it needs is not installed."""
    try:
        return importlib.import_module(f"microtome.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "microtome":
            raise
        raise ServerPartsMissing(
            f"this needs the server parts, and {error.name} is not installed: pip install 'microtome[server]'"
        ) from error


def configuration(*layers: Mapping[str, object]) -> "ServiceConfig":
    """The settings of a service: `layers` as for `read_config`, and a known model's name turned into its path.

    A known model that is absent is fetched, once the settings have been found good. Raises BadConfig.
    """
    read_config = server_part("actors.config").read_config
    config: ServiceConfig = read_config(*layers)
    if config.runtime.model == config.model:
        config = read_config(*layers, {"runtime.model": server_part("fetch").resolve_model(config.model)})
    return config


@contextmanager
def busy(console: Console, what: str, *, plainly: bool = True) -> Iterator[Callable[[str], None]]:
    """Say what is going on while it goes on: a spinner on a terminal; elsewhere a line, unless `plainly` is False.

    The block gets a function that says more of it, behind `what`, on a terminal only.
    """
    if console.is_terminal:
        with console.status(escape(what)) as status:
            yield lambda more: status.update(escape(f"{what}: {more}"))
        return
    if plainly:
        console.print(what, soft_wrap=True, markup=False)
    yield lambda more: None


@contextmanager
def running(
    config: "ServiceConfig", ray_address: str | None = None, tell: "Callable[[Sequence[Stage]], None]" = lambda _: None
) -> "Iterator[Endpoint]":
    """Bring the service up, and take it down when the block is left.

    `ray_address` None: on a Ray of its own, which ends too. Raises BadConfig when it cannot be started; a service of
    that name which was there before is left alone. In the main thread, SIGTERM leaves the block like Ctrl-C does, then
    raises SystemExit; one more of either is ignored while things are taken down. `tell`: as for `cluster.up`.
    """
    if ray_address is None:
        _check_model_is_here(config)
    cluster, ray = server_part("actors.cluster"), importlib.import_module("ray")
    service = config.service
    # A signal to the whole process group (`timeout`, systemd) ends our own Ray beside us, and all that ran on it.
    gone = suppress(ray.exceptions.RayError) if ray_address is None and not ray.is_initialized() else nullcontext()
    with _sigterm_leaves(), _disconnected_after(ray):
        endpoint: Endpoint = cluster.up(config, ray_address=ray_address, tell=tell)
        try:
            yield endpoint
        finally:
            with _one_signal_ignored(), gone:
                cluster.down(service.name, namespace=service.ray_namespace)


def serve(config: "ServiceConfig", ray_address: str | None, output: Console, remarks: Console) -> None:
    """Run the service until somebody ends it: Ctrl-C, SIGTERM, or `down` from elsewhere.

    `output` gets the one line that says that it is ready, and how to go on; `remarks` the rest. Raises BadConfig when
    it cannot be started, KeyboardInterrupt for Ctrl-C, SystemExit for SIGTERM: after everything was taken down.
    """
    service, began = config.service.name, time.monotonic()
    with ExitStack() as stack:
        with busy(remarks, f"starting {service!r} with {config.model}", plainly=False) as say:
            endpoint = stack.enter_context(running(config, ray_address, _told(say, remarks)))
        elsewhere = "" if endpoint.address == DEFAULT_ADDRESS else f" --address {endpoint.address}"
        scaling = config.workers.scaling
        count, device = config.first_workers, config.runtime.device
        workers = f"{count} worker{'' if count == 1 else 's'} on {device}"
        if not count:
            workers = f"no worker yet: the first call starts one on {device}"
        try:
            output.print(
                f"ready: {config.model} at {endpoint.address}, {workers}, after {time.monotonic() - began:.1f} s",
                f'  try   microtome generate "Once upon a time"{elsewhere}',
                f"  stop  Ctrl-C, or: microtome down{elsewhere}",
                *(
                    []
                    if scaling.min_workers
                    else [f"  idle  no worker after {scaling.idle_s:g} s, until the next call"]
                ),
                sep="\n",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
            while server_part("actors.cluster").is_up(service, namespace=config.service.ray_namespace):
                time.sleep(WATCH_S)
            remarks.print(f"{service!r} was taken down", markup=False, highlight=False)
        except KeyboardInterrupt:
            remarks.print(f"taking {service!r} down", markup=False, highlight=False)
            raise


def _told(say: Callable[[str], None], remarks: Console) -> "Callable[[Sequence[Stage]], None]":
    """Shows what a start is about; what takes minutes gets a line of its own, once."""
    lines: set[str] = set()

    def tell(stages: "Sequence[Stage]") -> None:
        # On the spinner's one line there is room for who compiles only: the rest is above it.
        say(", ".join(f"{stage.name.partition(':')[0]} compiles" if stage.compiles else stage.name for stage in stages))
        for stage in stages:
            if stage.compiles and stage.name not in lines:
                lines.add(stage.name)
                remarks.print(f"{stage.name} (--eager does without)", soft_wrap=True, markup=False, highlight=False)

    return tell


def down(service: str, namespace: str, ray_address: str | None) -> tuple[str, ...]:
    """Take a service down, wherever it was started. Returns the names of the actors that were ended; none: none was up.

    `namespace` empty: the service's name. Raises BadConfig when there is no Ray at `ray_address`.
    """
    cluster, ray = server_part("actors.cluster"), importlib.import_module("ray")
    # At once, because a Ray that was the service's own may end now, and a process still connected would wait for it.
    with _disconnected_after(ray):
        ended: Downed = cluster.down(service, namespace=namespace, ray_address=ray_address)
    return ended.actors


def _check_model_is_here(config: "ServiceConfig") -> None:
    """Say that it is no model before a Ray is started for nothing. On a cluster it lies on the workers' nodes."""
    if config.workers.executor == server_part("actors.link").DEFAULT_EXECUTOR:
        server_part("cuda_runtime.checkpoint").check_files(config.runtime.model)


@contextmanager
def _disconnected_after(ray: Any) -> Iterator[None]:
    """Leave this process as it was: not connected to Ray. A Ray that was started for it ends with that."""
    connected_before = ray.is_initialized()
    try:
        yield
    finally:
        if not connected_before:
            with _one_signal_ignored():
                ray.shutdown()


@contextmanager
def _sigterm_leaves() -> Iterator[None]:
    """In the main thread, SIGTERM leaves the block as Ctrl-C does, and then the process with its own status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def terminate(signum: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt  # a SystemExit would lose its status on its way through Ray's waiting

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from interrupt
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_signal_ignored() -> Iterator[None]:
    """Ctrl-C pressed twice must not leave half of it behind; pressed three times, it is meant."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def once(signum: int, frame: object) -> None:
        seen.append(signum)
        if len(seen) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, once) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
