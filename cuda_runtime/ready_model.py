"""A model that can run forwards: the library's own code over packed weights (eager), or its compiled programs.

Compiled programs come from an artifact: one that was named, or one in the cache, made on first use. The cache is keyed
by content: of the checkpoint, of the sources that shape a program, and by machine, library versions and settings. Two
processes that want the same one end with one: the second waits for the first.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from microtome.cuda_runtime import artifact
from microtome.cuda_runtime.artifact_cache import clear_unfinished, folder_of
from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.checkpoint import Checkpoint, fingerprint
from microtome.cuda_runtime.linear import int8
from microtome.cuda_runtime.linear.packed import operators, pack_linears
from microtome.cuda_runtime.model import CellModel, LayerGeometry, load_model, read_geometry
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.program import (
    DECODE,
    MIN_OUTPUTS,
    PREFILL,
    CompiledForward,
    Forward,
    ProgramRequest,
    compile_programs,
)
from microtome.cuda_runtime.start_up import StartUp
from microtome.planner.errors import BadConfig

_log = logging.getLogger("microtome.runtime")

# What a compiled program is shaped by, beside the libraries: a change here is another program.
_SHAPED_BY = (
    "artifact.py",
    "model.py",
    "program.py",
    "rotary.py",
    "attention/torch_operator.py",
    "linear/packed.py",
    "linear/fuse.py",
    "linear/int8.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    decode: Forward  # one token, one logits row
    prefill: Forward  # any number from 2, at least `min_outputs` logits rows
    min_outputs: int
    layers: tuple[LayerGeometry, ...]
    name: str  # of the model, as users know it
    fingerprint: str
    kv_dtype: torch.dtype  # of the cells it wants


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model is to run, and in which numbers."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype


def target_of(options: RuntimeOptions) -> Target:
    """What the options come to on this machine. Raises `BadConfig` where it does not have it."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadConfig(f"device {options.device!r}: this torch ({torch.__version__}) finds no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadConfig(f"device {options.device!r}: there are {torch.cuda.device_count()} CUDA devices")
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    if options.dtype != "auto":
        dtype = options.dtype
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    if kv_dtype == "float8_e4m3":
        kv_dtype = "float8_e4m3fn"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise BadConfig(f"kv_dtype float8_e4m3: {torch.cuda.get_device_name(device)} has no such numbers")
    return Target(device, getattr(torch, dtype), getattr(torch, kv_dtype))


def ready_model(options: RuntimeOptions, checkpoint: Checkpoint, target: Target, start_up: StartUp) -> ReadyModel:
    """The model as the options want it. Raises `BadConfig`."""
    if artifact.is_artifact(checkpoint.path):
        return _from_artifact(checkpoint.path, options, target.device, start_up)
    content = ""
    if options.methods != "eager":
        with start_up.stage("fingerprint"):
            content = fingerprint(checkpoint)
        path = cache_path(options, checkpoint, content, target)
        # A CPU's compiler takes minutes: worth it for those who asked. On CUDA there is no other way that is quick.
        if artifact.is_artifact(path) or options.methods == "compiled" or target.device.type == "cuda":
            _make_if_absent(path, options, checkpoint, content, target, start_up)
            return _from_artifact(path, options, target.device, start_up)
        _log.info(
            "methods are eager: compiled ones are quicker, once `serve` or runtime.methods=compiled has made them"
        )
    with start_up.stage("load"):
        model, layers = _load(options, checkpoint, target)
    return ReadyModel(
        decode=model,
        prefill=model,
        min_outputs=1,
        layers=layers,
        name=checkpoint.name,
        fingerprint=_of_numbers(content or fingerprint(checkpoint), _quantize(options)),
        kv_dtype=target.kv_dtype,
    )


def cache_path(options: RuntimeOptions, checkpoint: Checkpoint, content: str, target: Target) -> Path:
    """Where the artifact for these options is kept, or would be."""
    return folder_of(options.artifact_folder) / _key(options, checkpoint, content, target)


def _make_if_absent(
    path: Path,
    options: RuntimeOptions,
    checkpoint: Checkpoint,
    content: str,
    target: Target,
    start_up: StartUp,
) -> None:
    if artifact.is_artifact(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _sole_maker(path, start_up):
            if not artifact.is_artifact(path):
                make_artifact(path, options, checkpoint, content, target, start_up)
    except OSError as error:
        raise BadConfig(f"artifact_folder {path.parent}: {error.strerror or error}") from error


@contextmanager
def _sole_maker(path: Path, start_up: StartUp) -> Iterator[None]:
    """Holds the lock on the artifact at `path`; says who is waited for."""
    lock, maker = FileLock(f"{path}.lock"), Path(f"{path}.maker")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = f"process {found}" if (found := _text(maker)) else "another process"
        with start_up.stage("wait", f"waiting for {who}, which compiles the same: minutes, once", compiles=True):
            lock.acquire()
    try:
        maker.write_text(str(os.getpid()))
        clear_unfinished(path)
        yield
    finally:
        maker.unlink(missing_ok=True)
        lock.release()


def _text(file: Path) -> str:
    """Empty where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""


def make_artifact(
    path: Path,
    options: RuntimeOptions,
    checkpoint: Checkpoint,
    content: str,
    target: Target,
    start_up: StartUp,
) -> None:
    """Export and compile the checkpoint into an artifact at `path`. Raises `BadConfig`."""
    with start_up.stage("load"):
        model, layers = _load(options, checkpoint, target)
    session_tokens = _session_tokens(options, checkpoint)
    request = ProgramRequest(
        model=str(checkpoint.path),
        device=str(target.device),
        dtype=_name(target.dtype),
        kv_dtype=_name(target.kv_dtype),
        quantize=_quantize(options),
        attention=default_attention(target.device),
        layers=tuple((layer.kv_heads, layer.head_size, layer.window) for layer in layers),
        max_step_tokens=max(2, options.max_step_tokens, options.widths[-1]),
        session_tokens=session_tokens,
    )

    def compile_into(folder: Path) -> None:
        says = f"compiling the methods for this machine: minutes, once, then kept at {path}"
        with start_up.stage("export and compile", says, compiles=True):
            compile_programs(request, folder)

    with start_up.stage("write"):
        artifact.write(
            path,
            checkpoint=checkpoint,
            fingerprint=content,
            device=target.device,
            dtype=request.dtype,
            kv_dtype=request.kv_dtype,
            quantize=request.quantize,
            attention=request.attention,
            layers=layers,
            max_step_tokens=request.max_step_tokens,
            session_tokens=session_tokens,
            weights=dict(model.named_parameters(remove_duplicate=False))
            | dict(model.named_buffers(remove_duplicate=False)),
            compile_into=compile_into,
        )


def _from_artifact(path: Path, options: RuntimeOptions, device: torch.device, start_up: StartUp) -> ReadyModel:
    with start_up.stage("check"):
        manifest = artifact.read(path, device)
        if options.dtype not in ("auto", manifest.dtype):
            raise BadConfig(f"artifact {path}: it is of dtype {manifest.dtype}, not {options.dtype}")
        if options.kv_dtype != "auto" and not manifest.kv_dtype.startswith(options.kv_dtype):
            raise BadConfig(f"artifact {path}: its cells are of dtype {manifest.kv_dtype}, not {options.kv_dtype}")
        if options.quantize not in ("auto", manifest.quantize):
            raise BadConfig(f"artifact {path}: its weights are of quantize {manifest.quantize}, not {options.quantize}")
        widest = max(options.max_step_tokens, options.widths[-1])
        if widest > manifest.max_step_tokens:
            raise BadConfig(f"artifact {path}: it takes steps of {manifest.max_step_tokens} tokens, not of {widest}")
        if (options.max_session_tokens or 0) > manifest.session_tokens:
            raise BadConfig(
                f"artifact {path}: it takes sessions of {manifest.session_tokens} tokens, "
                f"not of {options.max_session_tokens}"
            )
    with start_up.stage("weights"):
        get_attention(manifest.attention)  # the programs call its operator, and that of packed linear layers
        operators()
        if manifest.quantize == "int8":
            int8.load_operators(device)
        weights = artifact.read_weights(path, manifest, device)
    with start_up.stage("programs"):
        return ReadyModel(
            decode=CompiledForward(path / f"{DECODE}.pt2", weights),
            prefill=CompiledForward(path / f"{PREFILL}.pt2", weights),
            min_outputs=MIN_OUTPUTS,
            layers=manifest.layers,
            name=manifest.model,
            fingerprint=_of_numbers(manifest.fingerprint, manifest.quantize),
            kv_dtype=getattr(torch, manifest.kv_dtype),
        )


def _load(
    options: RuntimeOptions, checkpoint: Checkpoint, target: Target
) -> tuple[CellModel, tuple[LayerGeometry, ...]]:
    session_tokens = _session_tokens(options, checkpoint)
    causal_lm = load_model(checkpoint, device=target.device, dtype=target.dtype, session_tokens=session_tokens)
    layers = read_geometry(causal_lm, target.device)
    if _quantize(options) == "int8":
        int8.quantize_linears(causal_lm, device=target.device)
    pack_linears(causal_lm)
    return CellModel(causal_lm, get_attention(default_attention(target.device))), layers


def _quantize(options: RuntimeOptions) -> str:
    """What is made of a checkpoint's own weights."""
    return "none" if options.quantize == "auto" else options.quantize


def _of_numbers(fingerprint: str, quantize: str) -> str:
    """Weights in other numbers are another model: no session goes from one to the other."""
    if quantize == "none":
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {quantize}".encode()).hexdigest()


def _session_tokens(options: RuntimeOptions, checkpoint: Checkpoint) -> int:
    return min(options.max_session_tokens or checkpoint.context_length, checkpoint.context_length)


def _key(options: RuntimeOptions, checkpoint: Checkpoint, content: str, target: Target) -> str:
    text = hashlib.sha256()
    here = Path(__file__).parent
    for name in _SHAPED_BY:
        text.update((here / name).read_bytes())
    for part in (
        content,
        artifact.machine_kind(target.device),
        torch.__version__,
        transformers.__version__,
        _name(target.dtype),
        _name(target.kv_dtype),
        _quantize(options),
        default_attention(target.device),
        max(options.max_step_tokens, options.widths[-1]),
        _session_tokens(options, checkpoint),
    ):
        text.update(f"{part}\0".encode())
    return text.hexdigest()[:32]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
