"""`ServiceConfig`: everything one service is told. Read once and checked once, at the edge; frozen; handed down.

`read_config` merges layers of settings, each later one over those before: defaults, then a file, the environment, the
command line. A layer is a mapping whose keys are dotted (`"workers.count"`) or nested (`{"workers": {"count": 2}}`).
Text is accepted for any value, as a file or the environment gives it; a value that does not parse is an error.

Every error is a `BadConfig` of one sentence that names the setting, its value and its limit. Each part of the service
gets its own section only. Imports neither torch nor ray nor grpc.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from microtome.actors.link import DEFAULT_EXECUTOR, LinkSettings
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.scaling import ScalingConfig

ENVIRONMENT_PREFIX = "MICROTOME_"

# Of a step's plan at most: a token's cell and id, and its input's sequence, start, width and flags, as varints.
PLAN_BYTES_PER_TOKEN = 24

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_IMPORT_STRING = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSection:
    """Who the service is and where clients reach it."""

    name: str = "microtome"  # of the driver actor, and part of every actor's and placement group's name
    namespace: str = ""  # of its actors on Ray; empty: the service's name
    host: str = "127.0.0.1"  # address that clients' port is bound to
    port: int = 50051  # of clients' gRPC; 0: any free one
    max_request_bytes: int = 4 * 2**20  # of one client message
    metrics_port: int | None = None  # of Prometheus metrics over HTTP, on the same address; None: not served
    admin: bool = True  # the same port takes DrainWorker and Update, from whoever can reach it
    retain_s: float = 300.0  # how long an ended generation that is resumable can still be resumed
    retain_tokens: int = 4_000_000  # of ended generations, kept at most; the oldest go first

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadConfig(
                f"service name {self.name!r} is not 1 to 63 letters, digits, dots, dashes or underscores, "
                "the first a letter or digit"
            )
        if self.namespace and not _NAME.fullmatch(self.namespace):
            raise BadConfig(
                f"namespace {self.namespace!r} is not 1 to 63 letters, digits, dots, dashes or underscores, "
                "the first a letter or digit"
            )
        if not self.host or any(c.isspace() for c in self.host):
            raise BadConfig(f"host {self.host!r} is not an address")
        if not 0 <= self.port <= 65535:
            raise BadConfig(f"port {self.port} is not in 0 to 65535")
        if not 1024 <= self.max_request_bytes < 2**31:
            raise BadConfig(f"max_request_bytes {self.max_request_bytes} is not in 1024 to {2**31 - 1}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise BadConfig(f"metrics_port {self.metrics_port} is not in 0 to 65535")
        if not 0 <= self.retain_s < float("inf"):
            raise BadConfig(f"retain_s {self.retain_s:g} is not 0 or more seconds")
        if self.retain_tokens < 0:
            raise BadConfig(f"retain_tokens {self.retain_tokens} is below 0")

    @property
    def ray_namespace(self) -> str:
        return self.namespace or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSection:
    """How many workers, what each takes from its node, and how long each may be silent."""

    count: int = 1  # at start, within the two below
    min: int | None = None  # however little there is to do; None: `count`, or `max` if that is less
    max: int | None = None  # however much there is to do; None: `count`, or `min` if that is more; 1 at least
    target_wait_s: float = 2.0  # predicted wait for a first token above which more workers are wanted
    target_occupancy: float = 0.85  # share of all cells in use above which more workers are wanted
    settle_s: float = 30.0  # of a smaller load before a worker goes, and between two that go
    idle_s: float = 300.0  # without any generation before the last worker goes, where `min` is 0
    cpus: float = 1  # each
    gpus: float | None = None  # each; None: one when the device is CUDA, else none
    place_timeout_s: float = 600.0  # from asking for a place to having it; an autoscaler adds a node meanwhile
    start_timeout_s: float = 900.0  # from the place to ready; loading and capture included, compiling not
    hang_timeout_s: float = 30.0  # a step, or an idle probe, finishes within this (beside the step's predicted time)
    orphan_timeout_s: float = 60.0  # a worker that hears no driver for this long ends itself
    gone_s: float = 600.0  # status shows a worker that has ended, or was lost, for this long
    executor: str = DEFAULT_EXECUTOR  # "module:function", called with the runtime section

    def __post_init__(self) -> None:
        if self.count < 0:
            raise BadConfig(f"workers.count {self.count} is below 0")
        _ = self.scaling  # its own checks
        if not 0 <= self.cpus < float("inf"):
            raise BadConfig(f"workers.cpus {self.cpus:g} is not 0 or more")
        if self.gpus is not None and not 0 <= self.gpus <= 1:
            raise BadConfig(f"workers.gpus {self.gpus:g} is not in 0 to 1: a worker has one device")
        for name in ("place_timeout_s", "start_timeout_s", "hang_timeout_s", "orphan_timeout_s", "gone_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadConfig(f"workers.{name} {getattr(self, name):g} is not a positive number of seconds")
        if not _IMPORT_STRING.fullmatch(self.executor):
            raise BadConfig(f"workers.executor {self.executor!r} is not of the form module:function")

    @property
    def scaling(self) -> ScalingConfig:
        most = self.max if self.max is not None else max(1, self.count, self.min or 0)
        return ScalingConfig(
            min_workers=self.min if self.min is not None else min(self.count, most),
            max_workers=most,
            target_wait_s=self.target_wait_s,
            target_occupancy=self.target_occupancy,
            settle_s=self.settle_s,
            idle_s=self.idle_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSection:
    """Whether what the planner is told and answers is written down, for `microtome replay`."""

    path: str = ""  # of the file, or of a directory for it, on the driver's node; empty: nothing is written
    max_bytes: int = 2**30  # of the file; recording ends there. One older file may stand beside it

    def __post_init__(self) -> None:
        if self.max_bytes < 2**20:
            raise BadConfig(f"journal.max_bytes {self.max_bytes} is below {2**20}")

    def file(self, service: str) -> Path | None:
        """None: nothing is written. In a directory, the file has the service's name."""
        if not self.path:
            return None
        path = Path(self.path)
        return path / f"{service}.journal" if path.is_dir() else path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One service's settings, nested by owner. Raises `BadConfig` when two sections contradict each other."""

    model: str  # as users name it; where it lies is `runtime.model`
    runtime: RuntimeOptions
    service: ServiceSection = field(default_factory=ServiceSection)
    workers: WorkersSection = field(default_factory=WorkersSection)
    link: LinkSettings = field(default_factory=LinkSettings)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    journal: JournalSection = field(default_factory=JournalSection)

    def __post_init__(self) -> None:
        if not self.model:
            raise BadConfig("model '' is empty: it names a directory, a .gguf file or a known model")
        if self.workers.gpus and self.runtime.device == "cpu":
            raise BadConfig(f"workers.gpus {self.workers.gpus:g} is above 0, and runtime.device cpu uses none")
        if self.workers.gpus == 0 and self.runtime.device != "cpu":
            raise BadConfig(f"workers.gpus 0 leaves runtime.device {self.runtime.device} without its 1 device")
        if 0 < self.gpus_per_worker < 1 and not self.runtime.shared_device:
            raise BadConfig(
                f"workers.gpus {self.gpus_per_worker:g} is below 1: then workers share a device, which "
                "runtime.shared_device has to allow"
            )
        step_tokens = max(self.runtime.max_step_tokens, self.planner.max_batch_tokens or 0)
        plan_bytes = PLAN_BYTES_PER_TOKEN * step_tokens
        if plan_bytes > self.link.max_message_bytes:
            raise BadConfig(
                f"link.max_message_bytes {self.link.max_message_bytes} is below the {plan_bytes} that a plan of "
                f"{step_tokens} tokens can take"
            )
        if self.planner.plan_ahead > self.link.max_unanswered_steps:
            raise BadConfig(
                f"planner.plan_ahead {self.planner.plan_ahead} is above link.max_unanswered_steps "
                f"{self.link.max_unanswered_steps}: a worker could not repeat an answer that was lost"
            )

    @property
    def gpus_per_worker(self) -> float:
        if self.workers.gpus is not None:
            return self.workers.gpus
        return 0.0 if self.runtime.device == "cpu" else 1.0

    @property
    def first_workers(self) -> int:
        """Workers to begin with."""
        scaling = self.workers.scaling
        return max(scaling.min_workers, min(self.workers.count, scaling.max_workers))


def updated(config: ServiceConfig, settings: Mapping[str, object]) -> ServiceConfig:
    """`config` with another model or other settings of `runtime`, which are all that a running service can change.

    A new `model` is also the new `runtime.model` unless that is given too. Raises `BadConfig`.
    """
    known = setting_types()
    parsed: dict[str, Any] = {}
    for key, value in settings.items():
        if key != "model" and not key.startswith("runtime."):
            raise BadConfig(f"{key} cannot be changed while the service runs: only model and runtime settings can")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise BadConfig(f"no setting is named {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        parsed[key.removeprefix("runtime.") if key != "model" else ""] = parse_value(key, value, known[key])
    model = parsed.pop("", None)
    if model is not None:
        parsed.setdefault("model", model)
    return replace(config, model=model or config.model, runtime=replace(config.runtime, **parsed))


Layer = Mapping[str, object]


def read_config(*layers: Layer) -> ServiceConfig:
    """Build the configuration from layers of settings, each later one over those before.

    `model` is the one setting without a default; `runtime.model` is `model` unless it is set. A key that names no
    setting, a value that does not parse, and a value out of range raise `BadConfig`.
    """
    settings: dict[str, object] = {}
    for layer in layers:
        settings.update(_flat(layer))
    if "model" not in settings:
        raise BadConfig("no model is set: it names a directory, a .gguf file or a known model")
    settings.setdefault("runtime.model", settings["model"])
    known = setting_types()
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise BadConfig(f"no setting is named {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        parsed = parse_value(key, value, known[key])
        if section:
            sections.setdefault(section, {})[name] = parsed
        else:
            values[name] = parsed
    for section, kind in _sections().items():
        if section in sections:
            values[section] = kind(**sections[section])
    return ServiceConfig(**values)


def environment_layer(environment: Mapping[str, str]) -> dict[str, object]:
    """Settings from variables such as `MICROTOME_WORKERS_COUNT=2` or `MICROTOME_MODEL=…`.

    Variables with the prefix that name no setting are left alone: other programs of ours have their own.
    """
    names = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key for key in setting_types()}
    return {names[name]: value for name, value in environment.items() if name in names}


def file_layer(path: Path) -> dict[str, object]:
    """Settings from a YAML file: sections as mappings. An unreadable or malformed file raises `BadConfig`."""
    import yaml  # only a service reads files: the client's install has no YAML

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"configuration file {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"configuration file {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise BadConfig(f"configuration file {str(path)!r} holds a {type(loaded).__name__}, not a mapping of settings")
    return dict(_flat(loaded))


def setting_types() -> dict[str, Any]:
    """Every setting's dotted key and its type."""
    kinds: dict[str, Any] = {}
    hints = get_type_hints(ServiceConfig)
    for name, kind in hints.items():
        if is_dataclass(kind):
            inner = get_type_hints(kind)
            kinds.update({f"{name}.{part.name}": inner[part.name] for part in fields(kind) if part.init})
        else:
            kinds[name] = kind
    return kinds


def parse_value(key: str, value: object, kind: Any) -> object:
    """`value`, or the text of it, as the setting's type. Raises `BadConfig` naming key, value and type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "") and str not in arguments):
            return None
        return parse_value(key, value, next(a for a in arguments if a is not type(None)))
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise BadConfig(f"{key} {value!r} is none of {', '.join(map(str, arguments))}")
    if origin in (tuple, frozenset):
        parts: object = re.split(r"[,\s]+", value.strip(" ,()[]")) if isinstance(value, str) else value
        if not isinstance(parts, list | tuple | set | frozenset):
            raise BadConfig(f"{key} {value!r} is not a list")
        items = [parse_value(key, part, arguments[0]) for part in parts if part != ""]
        return frozenset(items) if origin is frozenset else tuple(items)
    try:
        if kind is bool:
            return _parse_bool(value)
        if kind is int and not isinstance(value, bool) and isinstance(value, int | str):
            return int(value)
        if kind is float and not isinstance(value, bool) and isinstance(value, int | float | str):
            return float(value)
        if kind is str and isinstance(value, str | Path):
            return str(value)
    except ValueError:
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(kind, str(kind))
    raise BadConfig(f"{key} {value!r} is not {wanted}")


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _sections() -> dict[str, Any]:
    hints = get_type_hints(ServiceConfig)
    return {name: kind for name, kind in hints.items() if is_dataclass(kind)}


def _flat(layer: Layer, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in layer.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
