"""A service's life on a Ray cluster: the only file that names Ray resources, placement groups and restarts.

A service is one detached driver actor, named after it, and one detached actor per worker, each in a detached placement
group of its own. Everything of a service carries its name, so that `down` finds it all, after a crash too. Nothing of
it ever passes through Ray's object store, and no token through Ray.

`up`, `down` and `is_up` are for whoever manages services (the command line, a Ray job): blocking calls, any thread.
`RayWorkers` is the driver's: it runs on the driver's event loop.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody unless the user says so

import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from microtome.actors import ray_private
from microtome.actors.config import ServiceConfig
from microtome.actors.crew import StartOrder
from microtome.actors.link import WorkerEndpoint, WorkerSpec
from microtome.actors.remains import ProcessWatch, Remains, Trace, examine
from microtome.actors.stages import Stage, within
from microtome.actors.worker import WorkerActor
from microtome.planner.errors import BadConfig, BatchingError, WorkerLost
from microtome.planner.types import WorkerId

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours goes through it; Ray wants some
DOWN_TIMEOUT_S = 30.0
ADOPT_TIMEOUT_S = 5.0  # for a worker of an earlier life to answer
EXAMINE_TIMEOUT_S = 60.0  # for another node to say what has become of a worker's process
CALL_TIMEOUT_S = 10.0  # for the driver to answer a manager's call
STAGE_REPORT_S = 0.5  # between two looks at what a start is about
PLACE_REPORT_S = 5.0  # between two looks at what a place still lacks
CONNECT_TIMEOUT_S = 2.0  # to find out that nobody listens where a cluster's head should be
LOCAL_PLACE_TIMEOUT_S = 10.0  # on a Ray of our own no node ever comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a running service answers."""

    service: str
    address: str  # "host:port" for gRPC clients
    ray_address: str  # "host:port" of the Ray cluster's head
    joined: bool  # the service was up already, and nothing was started


@dataclass(frozen=True, slots=True, kw_only=True)
class Downed:
    """What `down` ended."""

    service: str
    actors: tuple[str, ...]
    placement_groups: tuple[str, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """What things of a service are called on Ray. The slash is in no service's name, so prefixes are unambiguous."""

    service: str
    namespace: str

    @property
    def driver(self) -> str:
        return self.service

    def worker(self, worker: WorkerId) -> str:
        return f"{self.service}/{worker}"

    def group(self, worker: WorkerId) -> str:
        """Groups are listed without their namespace, so their names carry it."""
        return f"microtome/{self.namespace}/{self.service}/{worker}"

    @property
    def settings(self) -> str:
        """The key under which the settings of an update are kept."""
        return f"microtome/{self.namespace}/{self.service}"

    def worker_of(self, actor: str) -> WorkerId | None:
        head, slash, worker = actor.partition("/")
        return WorkerId(worker) if slash and head == self.service else None

    @classmethod
    def of(cls, config: ServiceConfig) -> "Names":
        return cls(config.service.name, config.service.ray_namespace)


# --- for whoever manages services ---


def up(
    config: ServiceConfig,
    *,
    ray_address: str | None = None,
    join: bool = False,
    tell: Callable[[Sequence[Stage]], None] = lambda stages: None,
) -> Endpoint:
    """Start the service and wait until its first workers can take work.

    `ray_address` None: the Ray this process is connected to, or else a Ray of its own on this machine, loopback only,
    which ends with this process. Raises `BadConfig` (with nothing left behind) for a service name or port in use, a
    model that cannot be loaded, or resources that no node has; a service of that name is joined instead of refused
    when `join`. `tell` is called now and again with what goes on meanwhile; compiling is limited by no timeout.
    """
    names = Names.of(config)
    tell([Stage("Ray")])
    if ray_address is None and not ray.is_initialized():
        _check_port(config)  # before a Ray is started for nothing
        _start_local_ray(config)
        config = replace(
            config,
            workers=replace(config.workers, place_timeout_s=min(config.workers.place_timeout_s, LOCAL_PLACE_TIMEOUT_S)),
        )
    else:
        _connect(ray_address, names.namespace)
    if config.service.port == 0:
        config = replace(config, service=replace(config.service, port=_free_port(config.service.host)))
    tell([Stage("the driver")])
    if _find_driver(names) is None:
        _remove_remains(names)
    try:
        driver = _start_driver(config, names)
    except ValueError as error:  # ActorAlreadyExistsError is one
        existing = _find_driver(names)
        if existing is None:
            raise
        address = _get(existing.address.remote(), timeout_s=CALL_TIMEOUT_S)
        if not join:
            raise BadConfig(f"a service named {names.service!r} is up already, at {address}") from error
        return Endpoint(service=names.service, address=address, ray_address=_ray_address(), joined=True)
    try:
        timeout_s = config.workers.place_timeout_s + config.workers.start_timeout_s
        address = _wait_ready(driver, timeout_s, tell)
    except BaseException:
        down(names.service, namespace=names.namespace)
        raise
    return Endpoint(service=names.service, address=address, ray_address=_ray_address(), joined=False)


def _wait_ready(driver: Any, timeout_s: float, tell: Callable[[Sequence[Stage]], None]) -> str:
    """The service's address. The driver limits each worker's start; who limits the driver is this, by `timeout_s`
    without a word from it."""
    ready = driver.wait_ready.remote()
    while True:
        starting, end = driver.starting.remote(), time.monotonic() + timeout_s
        while not ray.wait([ready, starting], timeout=STAGE_REPORT_S)[0]:
            if time.monotonic() > end:
                raise WorkerLost(f"the driver did not answer within {timeout_s:g} s")
        if ray.wait([ready], timeout=0)[0]:
            return str(_get(ready, timeout_s))
        tell(_get(starting, timeout_s))
        if ray.wait([ready], timeout=STAGE_REPORT_S)[0]:
            return str(_get(ready, timeout_s))


def down(service: str, *, namespace: str = "", ray_address: str | None = None) -> Downed:
    """End the service: afterwards no actor, placement group, process or port of it is left. Idempotent.

    `ray_address` None: the Ray this process is connected to. Raises `BadConfig` when there is no such Ray, and
    `BatchingError` when something will not go within 30 s.
    """
    names = Names(service, namespace or service)
    _connect(ray_address, names.namespace)
    actors: dict[str, ray_private.ActorFacts] = {}
    groups: set[str] = set()
    end = time.monotonic() + DOWN_TIMEOUT_S
    # Again and again until nothing is found: a driver that dies may have had a worker under way.
    while True:
        found = _actors_of(names)
        # The driver first, or it would put another worker in the place of each one that we end.
        for name in sorted(found, key=lambda name: name != names.driver):
            facts = ray_private.actor_facts(found[name])
            if facts is not None and (facts.pid or name not in actors):
                actors[name] = facts
            ray.kill(found[name], no_restart=True)
        pending = _groups_of(names)
        for name, group in pending.items():
            groups.add(name)
            remove_placement_group(group)
        alive = [facts.pid for facts in actors.values() if facts.pid and _is_alive(facts)]
        if not found and not pending and not alive:
            break
        if time.monotonic() > end:
            raise BatchingError(
                f"service {service!r} did not end within {DOWN_TIMEOUT_S:g} s: left are actors {sorted(found)}, "
                f"placement groups {sorted(pending)}, processes {alive}"
            )
        time.sleep(0.02)
    ray_private.forget(names.settings)
    pids = tuple(facts.pid for facts in actors.values() if facts.pid)
    return Downed(service=service, actors=tuple(sorted(actors)), placement_groups=tuple(sorted(groups)), pids=pids)


def _remove_remains(names: Names) -> None:
    """What a service of this name left behind when its driver was lost for good: nobody else would end it."""
    if _actors_of(names) or _groups_of(names):
        ended = down(names.service, namespace=names.namespace)
        log.warning("removed what an earlier %s left behind: %s", names.service, ", ".join(ended.actors) or "places")


def is_up(service: str, *, namespace: str = "") -> bool:
    """Whether the service's driver is there, or being restarted, on the Ray this process is connected to.

    False once `down` has been called, by anybody; also when that Ray itself is gone. For who runs a service in the
    foreground and must notice that it was ended elsewhere. Cheap enough to ask twice a second.
    """
    if not ray.is_initialized():
        return False
    try:
        return _find_driver(Names(service, namespace or service)) is not None
    except RayError:
        return False


def address_of(service: str, *, namespace: str = "", ray_address: str | None = None) -> str:
    """Where the service answers, "host:port", asked of Ray: for a Ray job. Raises `BadConfig` when it is not up."""
    return str(_get(_driver_of(service, namespace, ray_address).address.remote(), CALL_TIMEOUT_S))


def _driver_of(service: str, namespace: str, ray_address: str | None) -> Any:
    names = Names(service, namespace or service)
    _connect(ray_address, names.namespace)
    driver = _find_driver(names)
    if driver is None:
        raise BadConfig(f"no service named {service!r} is up in namespace {names.namespace!r} of {_ray_address()}")
    return driver


def _start_driver(config: ServiceConfig, names: Names) -> Any:
    """The driver's handle. `num_gpus=0` does not keep it off GPU nodes: it is pinned to the head."""
    from microtome.actors.main import DriverActor  # which imports this module

    return (
        ray.remote(DriverActor)
        .options(
            name=names.driver,
            namespace=names.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=1,
            num_gpus=0,
            resources={"node:__internal_head__": 0.001},
        )
        .remote(config, secrets.token_hex(32))
    )


def _find_driver(names: Names) -> Any | None:
    try:
        return ray.get_actor(names.driver, namespace=names.namespace)
    except ValueError:
        return None


def _actors_of(names: Names) -> dict[str, Any]:
    """Handles of what is alive of the service, by name."""
    found: dict[str, Any] = {}
    for listed in ray.util.list_named_actors(all_namespaces=True):
        name = listed["name"]
        if listed["namespace"] == names.namespace and (name == names.driver or names.worker_of(name) is not None):
            try:
                found[name] = ray.get_actor(name, namespace=names.namespace)
            except ValueError:
                continue  # it has gone meanwhile
    return found


def _groups_of(names: Names) -> dict[str, Any]:
    """Handles of the service's placement groups, by name."""
    prefix = names.group(WorkerId(""))
    return {
        group["name"]: ray_private.placement_group_by_id(group_id)
        for group_id, group in placement_group_table().items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def _is_alive(facts: ray_private.ActorFacts) -> bool:
    """Of a process on this machine, as the kernel says; of one elsewhere Ray's word is all there is."""
    if facts.node_address != ray.util.get_node_ip_address():
        return False
    try:
        return psutil.Process(facts.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _get(ref: Any, timeout_s: float) -> Any:
    """`ray.get` whose errors are ours, each one sentence."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except (RayError, GetTimeoutError) as error:
        raise _as_ours(error, f"the driver did not answer within {timeout_s:g} s") from error


def _as_ours(error: Exception, timed_out: str) -> BatchingError:
    """An error of ours that came through Ray, itself; another one as a sentence."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BatchingError):
        return error.cause
    if isinstance(error, GetTimeoutError):
        return WorkerLost(timed_out)
    if isinstance(error, ActorDiedError):
        detail = _why_dead(error)
        return WorkerLost(f"its process has died: {detail}" if detail else "its process has died")
    return WorkerLost(f"{type(error).__name__}: {_last_line(error)}")


def _why_dead(error: ActorDiedError) -> str:
    """Ray's page about a dead actor as one sentence; empty: all it says is that the connection ended."""
    text = str(error)
    detail = text.rpartition("Worker exit detail: ")[2] if "Worker exit detail: " in text else text
    sentence = detail.partition(" Some common causes")[0].strip().splitlines()[-1]
    return "" if sentence.startswith("Worker unexpectedly exits with a connection error") else sentence


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


# --- the Ray that this process talks to ---


def _start_local_ray(config: ServiceConfig) -> None:
    """A Ray of this process: on loopback, open (nobody else can reach it), ended with the process."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token file, and every later cluster wants it
    # Ray would run its workers at niceness 15, behind whoever else wants this machine's processors.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _keep_to_loopback()
    # An update starts a worker before another ends: they share the machine for a while.
    wanted = 1 + config.workers.cpus * (config.workers.scaling.max_workers + 1)
    try:
        with _sigterm_held(), _sigterm_kept():
            ray.init(
                address="local",
                namespace=config.service.ray_namespace,
                num_cpus=max(os.cpu_count() or 1, int(-(-wanted // 1))),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
            )
            ray_private.shuts_down_by_sigkill()
    except Exception as error:  # a node that does not come up raises that class and no narrower one
        raise BadConfig(f"Ray cannot be started on this machine: {_last_line(error)}") from error


def _connect(ray_address: str | None, namespace: str) -> None:
    """Join the cluster at `ray_address`, or make sure that this process is connected."""
    if ray.is_initialized():
        if ray_address not in (None, "auto", _ray_address()):
            raise BadConfig(f"this process is connected to the Ray at {_ray_address()}, not to {ray_address}")
        return
    if ray_address is None:
        raise BadConfig("no Ray address is given, and this process is not connected to a Ray")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # said, because unset means something else at each entry point
    _check_listens(ray_address)
    if _is_loopback_only(ray_address):
        _keep_to_loopback()
    try:
        with _sigterm_kept():
            ray.init(address=ray_address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RayError, RuntimeError) as error:
        raise BadConfig(
            f"the Ray at {ray_address} cannot be joined (RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']}): "
            f"{_last_line(error)}"
        ) from error


def _keep_to_loopback() -> None:
    """What this process starts or joins of Ray listens on, and dials, 127.0.0.1."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux too: binds everything to 127.0.0.1
    if not ray_private.binds_to_loopback():
        ray_private.bind_to_loopback()


@contextmanager
def _sigterm_held() -> Iterator[None]:
    """Processes started meanwhile never get SIGTERM; this one gets it afterwards.

    A signal to a whole process group or unit (`timeout`, systemd) is for us, who then end our Ray in order. Ended by
    the same signal, Ray would be gone before us, and each call to it would wait a minute before it aborts the process.
    A blocked signal, unlike a handler or another group, is inherited by whatever Ray starts; SIGKILL still ends it, as
    the kernel sends one when this process dies.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, twice: its C++ side prints a stack, its Python side exits. It is given back.

    Only the main thread may; elsewhere Ray leaves Python's side alone, and its own stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: C code had it, and only C code could put it back
            signal.signal(signal.SIGTERM, before)


def _check_listens(ray_address: str) -> None:
    """Ray itself takes 20 s to say that nobody is there."""
    host, colon, port = ray_address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or another form that only Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise BadConfig(f"no Ray answers at {ray_address}: {error.strerror or error}") from error


def _is_loopback_only(ray_address: str) -> bool:
    """Whether the Ray there is one of ours, that keeps to 127.0.0.1.

    To join such a one a process must keep to it too: else Ray turns the address into the machine's own, where nobody
    listens, and tries for ever. A Ray that listens everywhere is told from it by listening at that one as well.
    """
    host, _, port = ray_address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdecimal():
        return False
    own = ray.util.get_node_ip_address()
    if own == "127.0.0.1":
        return True
    try:
        socket.create_connection((own, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return True
    return False


def _ray_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _check_port(config: ServiceConfig) -> None:
    service = config.service
    try:
        with _listening(service.host, service.port):
            pass
    except OSError as error:
        raise BadConfig(f"port {service.port} on {service.host} cannot be bound: {error.strerror or error}") from error


def _free_port(host: str) -> int:
    """Known before the driver starts, because a restarted driver must have the same one."""
    with _listening(host, 0) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
        yield bound


# --- the driver's own ---


class RaySettings:
    """A `RevisionStore` in the cluster's head, which outlives the driver; `down` empties it."""

    def __init__(self, config: ServiceConfig) -> None:
        self._key = Names.of(config).settings

    async def save(self, data: bytes) -> None:
        await asyncio.to_thread(ray_private.keep, self._key, data)

    async def load(self) -> bytes:
        return await asyncio.to_thread(ray_private.kept, self._key)


class RayWorkers:
    """Workers as Ray actors: a `WorkerStarter`. On the driver's event loop; Ray's blocking calls run in threads."""

    def __init__(self, config: ServiceConfig, secret: str) -> None:
        self._config, self._secret, self._names = config, secret, Names.of(config)
        self._lives: set[asyncio.Task[None]] = set()
        self._traces: dict[WorkerId, tuple[Trace, ProcessWatch | None]] = {}

    async def start(self, order: StartOrder) -> WorkerEndpoint:
        worker, timeout_s = order.worker, self._config.workers.start_timeout_s
        try:
            group = await self._place(worker, order.waits)
            order.placed()
            actor = await _in_thread(self._create, order, group)
            self._trace(worker, await asyncio.wait_for(actor.trace.remote(), timeout_s))
            endpoint: WorkerEndpoint = await within(
                timeout_s,
                actor.start.remote(),
                stage=lambda: _stage(actor),
                tell=order.tells,
                period_s=STAGE_REPORT_S,
            )
        except TimeoutError as error:
            raise WorkerLost(f"{worker} was not ready within {timeout_s:g} s") from error
        except (RayError, ValueError) as error:  # a name that is still taken is a ValueError
            raise _as_ours(error, "") from error
        self._watch(actor, order.ended)
        return endpoint

    async def living(self, ended: Callable[[WorkerId, str], None]) -> Sequence[WorkerEndpoint]:
        actors = await asyncio.to_thread(_actors_of, self._names)
        workers = {name: worker for name in actors if (worker := self._names.worker_of(name)) is not None}
        answers = await asyncio.gather(*(self._endpoint(actors[name], worker) for name, worker in workers.items()))
        ready: list[WorkerEndpoint] = []
        for (name, worker), endpoint in zip(workers.items(), answers, strict=True):
            if endpoint is None:
                await self.end(worker)
            else:
                self._watch(actors[name], partial(ended, worker))
                ready.append(endpoint)
        # A place without a worker: the driver died between the two.
        for name in await asyncio.to_thread(_groups_of, self._names):
            worker = WorkerId(name.rpartition("/")[2])
            if worker not in {endpoint.worker for endpoint in ready}:
                await self.end(worker)
        return ready

    async def remains(self, worker: WorkerId) -> Remains | None:
        trace, watch = self._traces.pop(worker, (None, None))
        if trace is None:
            return None
        if trace.node == ray.get_runtime_context().get_node_id():
            try:
                return await asyncio.to_thread(examine, trace, watch)
            finally:
                if watch is not None:
                    watch.close()
        # The node's own look, if it can still have one: a node that is lost answers nothing.
        place = NodeAffinitySchedulingStrategy(trace.node, soft=False)
        look = ray.remote(examine).options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(trace)
        try:
            found: Remains | None = await asyncio.wait_for(look, EXAMINE_TIMEOUT_S)
        except (TimeoutError, RayError) as error:
            log.info("node %s does not say what has become of %s: %s", trace.node, worker, _last_line(error))
            return None
        return found

    def _trace(self, worker: WorkerId, trace: Trace) -> None:
        """Know what to look for if it is lost, and hold on to its process while it lives."""
        watch = None
        if trace.node == ray.get_runtime_context().get_node_id():
            with suppress(OSError):  # it has ended already, or this kernel has no such thing
                watch = ProcessWatch(trace.pid)
        self._traces[worker] = trace, watch

    async def end(self, worker: WorkerId) -> None:
        await asyncio.to_thread(self._end, worker)
        _, watch = self._traces.pop(worker, (None, None))
        if watch is not None:
            watch.close()

    def _end(self, worker: WorkerId) -> None:
        with suppress(ValueError):  # no such actor: it has gone already, or never was
            ray.kill(ray.get_actor(self._names.worker(worker), namespace=self._names.namespace))
        group = _groups_of(self._names).get(self._names.group(worker))
        if group is not None:
            remove_placement_group(group)

    async def leaving(self) -> Mapping[WorkerId, float | None]:
        try:
            return await asyncio.to_thread(self._leaving)
        except RayError as error:  # the head is away for a moment: it is asked again
            log.warning("Ray does not say which nodes drain: %s", _last_line(error))
            return {}

    def _leaving(self) -> Mapping[WorkerId, float | None]:
        """Ray tells nobody and stops nothing: who is on a draining node has to look."""
        draining = ray_private.draining_nodes()
        if not draining:
            return {}
        prefix, now_s = self._names.group(WorkerId("")), time.time()
        leaving: dict[WorkerId, float | None] = {}
        for group in placement_group_table().values():
            for node in group["bundles_to_node_id"].values():
                if group["name"].startswith(prefix) and node in draining:
                    deadline_ms = draining[node]
                    left_s = max(0.0, deadline_ms / 1000 - now_s) if deadline_ms else None
                    leaving[WorkerId(group["name"].removeprefix(prefix))] = left_s
        return leaving

    async def _place(self, worker: WorkerId, waits: Callable[[str], None]) -> PlacementGroup:
        """Room for the worker on some node. Raises `WorkerLost`, saying per node what is missing."""
        timeout_s, demand = self._config.workers.place_timeout_s, self._demand()
        group = await _in_thread(
            placement_group,
            [demand],
            strategy="STRICT_PACK",
            name=self._names.group(worker),
            lifetime="detached",  # a plain group dies with the process that made it, and takes its actors along
        )
        ready = asyncio.ensure_future(group.ready())
        end_s = time.monotonic() + timeout_s
        while not ready.done():
            left_s = end_s - time.monotonic()
            done, _ = await asyncio.wait([ready], timeout=max(0.0, min(left_s, PLACE_REPORT_S)))
            if done:
                break
            missing = await asyncio.to_thread(missing_resources, demand)
            if left_s <= PLACE_REPORT_S:
                ready.cancel()
                raise WorkerLost(f"no node had room for {worker} within {timeout_s:g} s: {missing}")
            waits(f"no node has room for it yet: {missing}")
        await ready
        return group

    def _create(self, order: StartOrder, group: PlacementGroup) -> Any:
        config = self._config
        spec = WorkerSpec(
            worker=order.worker,
            secret=self._secret,
            runtime=order.runtime,
            revision=order.revision,
            executor=config.workers.executor,
            host="",  # its node's address
            link=config.link,
            hang_timeout_s=config.workers.hang_timeout_s,
            orphan_timeout_s=config.workers.orphan_timeout_s,
        )
        return (
            ray.remote(WorkerActor)
            .options(
                name=self._names.worker(order.worker),
                namespace=self._names.namespace,
                lifetime="detached",
                max_restarts=0,  # the driver supervises
                num_cpus=config.workers.cpus,
                num_gpus=config.gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(spec)
        )

    def _demand(self) -> dict[str, float]:
        demand = {"CPU": self._config.workers.cpus, "GPU": self._config.gpus_per_worker}
        return {name: amount for name, amount in demand.items() if amount}

    async def _endpoint(self, actor: Any, worker: WorkerId) -> WorkerEndpoint | None:
        """Of a worker of an earlier life of the driver; None while it is not ready."""
        try:
            endpoint: WorkerEndpoint | None = await asyncio.wait_for(actor.endpoint.remote(), ADOPT_TIMEOUT_S)
            if endpoint is not None:
                self._trace(worker, await asyncio.wait_for(actor.trace.remote(), ADOPT_TIMEOUT_S))
        except (TimeoutError, RayError):
            return None
        return endpoint

    def _watch(self, actor: Any, ended: Callable[[str], None]) -> None:
        async def watch() -> None:
            try:
                await actor.life.remote()
            except ActorUnavailableError:
                return  # the cluster's word is in doubt; the worker's own stream decides
            except RayError as error:
                ended(str(_as_ours(error, "")))

        task = asyncio.create_task(watch())
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)


async def _stage(actor: Any) -> Stage | None:
    try:
        stage: Stage | None = await asyncio.wait_for(actor.stage.remote(), ADOPT_TIMEOUT_S)
    except (TimeoutError, RayError):
        return None  # why it does not answer, the call that starts it will tell
    return stage


async def _in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Like `asyncio.to_thread`, but when cancelled it waits: what the call makes is there for `end` to find."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def missing_resources(demand: Mapping[str, float]) -> str:
    """Per node, which of the resources in `demand` it lacks."""
    resources, draining = ray_private.resources_per_node(), ray_private.draining_nodes()
    lines: list[str] = []
    for node in ray.nodes():
        if not node["Alive"] or node["NodeID"] not in resources:
            continue
        free, total = resources[node["NodeID"]]
        lacks = [
            f"{name} needs {amount:g}, free {free.get(name, 0):g} of {total.get(name, 0):g}"
            for name, amount in demand.items()
            if free.get(name, 0) < amount
        ]
        if node["NodeID"] in draining:
            lacks.append("it is draining")
        lines.append(f"node {node['NodeManagerAddress']}: {', '.join(lacks) or 'has room'}")
    return "; ".join(lines) or "the cluster has no nodes"
