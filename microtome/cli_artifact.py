"""The commands about artifacts: make one, look at one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from microtome import local
from microtome.cli_options import (
    ConfigFile,
    Device,
    Dtype,
    MaxStepTokens,
    Model,
    Quantize,
    Settings,
    Threads,
    layers_of,
)


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    max_step_tokens: MaxStepTokens = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Export and compile MODEL into an artifact: a folder that starts in seconds on machines of this kind.

    Any command that takes a MODEL takes the folder. What `serve` compiles, it keeps in the cache by itself.
    """
    given = {
        "model": model,
        "runtime.device": device,
        "runtime.dtype": dtype,
        "runtime.quantize": quantize,
        "runtime.max_step_tokens": max_step_tokens,
    }
    config = local.configuration(*layers_of(config_file, settings, given))
    with local.busy(Console(stderr=True, highlight=False), f"exporting {config.model}"):
        took = local.server_part("cuda_runtime.build").export(config.runtime, out)
    print(f"{out}: {took}")


def inspect(
    artifact: Annotated[Path, typer.Argument(help="A folder that `export` has made.")],
    threads: Threads = None,
) -> None:
    """Say what an artifact is: geometry, files, and its methods with what each costs on this machine."""
    from microtome.artifact_view import artifact_view

    Console(highlight=False).print(artifact_view(artifact, threads=threads))
