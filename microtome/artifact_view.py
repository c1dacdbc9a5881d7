"""What `microtome inspect` shows of an artifact: what it says of itself, checked, and what its methods cost here."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from microtome.local import server_part
from microtome.planner.errors import BadConfig
from microtome.planner.types import Capability

if TYPE_CHECKING:
    from microtome.cuda_runtime.artifact import Manifest

_KV_TOKENS = 4096  # of the pool in which the methods are measured


def artifact_view(path: Path, *, threads: int | None = None) -> RenderableType:
    """Read the artifact, every check included, start it, and describe both. Raises BadConfig."""
    artifacts, options_of = server_part("cuda_runtime.artifact"), server_part("cuda_runtime.options").RuntimeOptions
    _check_artifact(path, artifacts.MANIFEST)
    manifest = artifacts.read_manifest(path)
    device, widest = manifest.machine.partition(" ")[0], manifest.max_step_tokens
    options = options_of(
        model=str(path),
        device=device,
        kv_tokens=max(_KV_TOKENS, widest),
        max_step_tokens=widest,
        widths=tuple(width for width in (1, 2, 4, 8, 16, 32) if width <= widest),
        threads=threads,
    )
    capability = server_part("cuda_runtime.executor").build_executor(options).describe()
    return Group(_facts(manifest), Text(), _files(manifest), Text(), _methods(capability))


def _check_artifact(path: Path, manifest: str) -> None:
    if not path.exists():
        raise BadConfig(f"artifact {path}: no such folder")
    if not (path / manifest).is_file():
        raise BadConfig(
            f"artifact {path}: it is none, as it holds no {manifest}; `microtome export MODEL FOLDER` makes one"
        )


def _facts(manifest: "Manifest") -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    layers = manifest.layers
    shapes = sorted({(layer.kv_heads, layer.head_size, layer.window) for layer in layers})
    for name in (
        "model",
        "architecture",
        "fingerprint",
        "format",
        "torch",
        "machine",
        "dtype",
        "kv_dtype",
        "quantize",
        "attention",
        "vocab_size",
        "context_length",
        "session_tokens",
        "max_step_tokens",
    ):
        table.add_row(name, str(getattr(manifest, name)))
    for kv_heads, head_size, window in shapes:
        count = sum(
            (layer.kv_heads, layer.head_size, layer.window) == (kv_heads, head_size, window) for layer in layers
        )
        seen = f"window {window}" if window else "no window"
        table.add_row("layers", f"{count} x {kv_heads} key/value heads x {head_size}, {seen}")
    return table


def _files(manifest: "Manifest") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("SHA-256")
    for name, (size, digest) in manifest.files.items():
        table.add_row(name, f"{size:,}", digest[:16])
    return table


def _methods(capability: Capability) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("method")
    table.add_column("tokens", justify="right")
    table.add_column("cost µs, measured here", justify="right")
    for method in capability.table.methods:
        tokens = str(method.max_tokens) if method.static else f"{method.min_tokens} to {method.max_tokens}"
        per_token = "" if method.static else f" + {method.cost_ns_per_token / 1000:.1f} a token"
        table.add_row(method.name, tokens, f"{method.cost_us:,}{per_token}")
    return table
