"""A model made ready for one kind of machine, as a directory: two programs, the weights once, and a manifest.

    manifest.json        what the rest is, with a digest of every file, and of itself
    decode.pt2           the compiled programs (`program.py`)
    prefill.pt2
    weights.safetensors  every tensor the programs want, as the device holds it; tied ones once
    config.json, tokenizer.json, …   the checkpoint's small files, so that an artifact serves text by itself

`read` refuses, naming the check, what is truncated, altered, of another format, or made for another machine or library
version; after that nothing in it is doubted. `write` makes it aside and moves it into place, so there are no halves.
An artifact is read like a checkpoint by whoever wants the tokenizer or the configuration only.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from microtome.cuda_runtime.arena import Arena, room
from microtome.cuda_runtime.checkpoint import Checkpoint, load_tokenizer
from microtome.cuda_runtime.model import LayerGeometry
from microtome.cuda_runtime.native_library import cpu_features
from microtome.cuda_runtime.program import PROGRAMS
from microtome.planner.errors import BadConfig

FORMAT = 2
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about an artifact but its bytes."""

    format: int
    torch: str  # version
    machine: str  # of `machine_kind`
    model: str  # as users name it
    fingerprint: str  # of the checkpoint
    architecture: str
    vocab_size: int
    context_length: int
    session_tokens: int  # the longest session it is good for
    dtype: str  # of weights and activations, as torch names it
    kv_dtype: str  # of cells
    quantize: str  # none or int8: of linear layers' weights
    attention: str  # the realisation whose operator the programs call
    layers: tuple[LayerGeometry, ...]
    max_step_tokens: int  # of the prefill program
    aliases: dict[str, str]  # a weight's name: the name under which it is kept
    files: dict[str, tuple[int, str]]  # name: bytes, SHA-256


def machine_kind(device: torch.device) -> str:
    """What compiled code is bound to. Equal kinds run each other's programs."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda sm_{major}{minor} {torch.version.cuda}"
    features = hashlib.sha256(cpu_features().encode()).hexdigest()[:16]
    return f"cpu {platform.machine()} {features}"


def is_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read(path: Path, device: torch.device) -> Manifest:
    """The manifest of a sound artifact that runs on `device`. Raises `BadConfig` naming the check that failed."""
    manifest = read_manifest(path)
    for check, found, here in (
        ("torch version", manifest.torch, torch.__version__),
        ("machine", manifest.machine, machine_kind(device)),
    ):
        if found != here:
            raise BadConfig(f"artifact {path}: check {check!r}: it was made for {found}, this is {here}")
    check_files(path, manifest)
    return manifest


def check_files(path: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest. Raises `BadConfig`."""
    for name, (size, digest) in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise BadConfig(f"artifact {path}: check 'files': {name} is missing")
        if file.stat().st_size != size:
            raise BadConfig(f"artifact {path}: check 'size': {name} has {file.stat().st_size} bytes, not {size}")
        if _digest(file) != digest:
            raise BadConfig(f"artifact {path}: check 'content': {name} was altered")


def read_weights(path: Path, manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Every weight by name, on `device`; each is there once."""
    with safe_open(path / WEIGHTS, framework="pt") as stored:
        names = list(stored.keys())
        if device.type == "cpu":
            arena = Arena(sum(room(stored.get_tensor(name).nbytes) for name in names))
            kept = {name: arena.copy(stored.get_tensor(name)) for name in names}
        else:
            kept = {name: stored.get_tensor(name).to(device) for name in names}
    return kept | {alias: kept[name] for alias, name in manifest.aliases.items()}


def write(
    path: Path,
    *,
    checkpoint: Checkpoint,
    fingerprint: str,
    device: torch.device,
    dtype: str,
    kv_dtype: str,
    quantize: str,
    attention: str,
    layers: tuple[LayerGeometry, ...],
    max_step_tokens: int,
    session_tokens: int,
    weights: Mapping[str, Tensor],
    compile_into: Callable[[Path], None],
) -> None:
    """Make the artifact at `path`, which must not exist or be empty. `compile_into` writes the programs to a folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise BadConfig(f"artifact {path}: there is something already")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".making-{path.name}-") as scratch:
        made = Path(scratch) / "artifact"
        made.mkdir()
        kept, aliases = _each_once(weights)
        save_file(kept, made / WEIGHTS)
        _write_small_files(checkpoint, made)
        compile_into(made)
        manifest = Manifest(
            format=FORMAT,
            torch=torch.__version__,
            machine=machine_kind(device),
            model=checkpoint.name,
            fingerprint=fingerprint,
            architecture=checkpoint.architecture,
            vocab_size=checkpoint.vocab_size,
            context_length=checkpoint.context_length,
            session_tokens=session_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantize=quantize,
            attention=attention,
            layers=layers,
            max_step_tokens=max_step_tokens,
            aliases=aliases,
            files={
                str(file.relative_to(made)): (file.stat().st_size, _digest(file))
                for file in sorted(made.rglob("*"))
                if file.is_file()
            },
        )
        fields = asdict(manifest)
        (made / MANIFEST).write_text(json.dumps(fields | {"digest": _digest_of(fields)}, indent=1))
        if path.exists():
            path.rmdir()
        os.replace(made, path)


def read_manifest(path: Path) -> Manifest:
    """What the artifact says of itself, well formed and signed; its files are not looked at. Raises `BadConfig`."""
    try:
        fields = json.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        raise BadConfig(f"artifact {path}: check 'manifest': {error.strerror}") from error
    except ValueError as error:
        raise BadConfig(f"artifact {path}: check 'manifest': it is not JSON ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise BadConfig(f"artifact {path}: check 'format': it is of format {found}, this reads {FORMAT}")
    digest = fields.pop("digest", None)
    if digest != _digest_of(fields):
        raise BadConfig(f"artifact {path}: check 'manifest': its digest does not match what it says")
    fields["layers"] = tuple(LayerGeometry(**layer) for layer in fields["layers"])
    fields["files"] = {name: tuple(file) for name, file in fields["files"].items()}
    manifest = Manifest(**fields)
    _check_geometry(path, manifest)
    return manifest


def _check_geometry(path: Path, manifest: Manifest) -> None:
    sound = manifest.layers and all(layer.kv_heads > 0 and layer.head_size > 0 for layer in manifest.layers)
    for check, good, says in (
        ("layers", sound, manifest.layers),
        ("vocab_size", manifest.vocab_size > 0, manifest.vocab_size),
        ("context_length", manifest.context_length > 0, manifest.context_length),
        ("session_tokens", 0 < manifest.session_tokens <= manifest.context_length, manifest.session_tokens),
        ("quantize", manifest.quantize in ("none", "int8"), manifest.quantize),
        ("max_step_tokens", manifest.max_step_tokens >= 2, manifest.max_step_tokens),
        ("programs", all(f"{name}.pt2" in manifest.files for name in PROGRAMS), sorted(manifest.files)),
        ("weights", WEIGHTS in manifest.files, sorted(manifest.files)),
    ):
        if not good:
            raise BadConfig(f"artifact {path}: check {check!r}: {says} cannot be")


def _each_once(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that are one in memory under one name, and the other names of those."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(weights.items()):
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor.detach().contiguous().cpu().clone()  # of its own: slices of an arena share one storage
    return kept, aliases


def _write_small_files(checkpoint: Checkpoint, folder: Path) -> None:
    config = checkpoint.config.to_dict()
    config.pop("quantization_config", None)  # of the file it came from: what is kept here is not quantised
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    load_tokenizer(checkpoint).save_pretrained(folder)
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
