"""The commands about artifacts: make one, look at one, list and delete those in the cache."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

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


def artifacts(
    remove: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Delete this one; may be repeated.")] = None,
    remove_unusable: Annotated[bool, typer.Option(help="Delete those that nothing here can use.")] = False,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """List the compiled models in the cache, with what each takes on the disk; delete some of them.

    One that was deleted is made again by the next `serve` that wants it. What runs is not disturbed.
    """
    cache = local.server_part("cuda_runtime.artifact_cache")
    nameless = {"model": "none"}  # the folder is all that is wanted
    runtime = local.configuration(nameless, *layers_of(config_file, settings, {})).runtime
    folder: Path = cache.folder_of(runtime.artifact_folder)
    keys = list(remove or [])
    if remove_unusable:
        keys += [item.key for item in cache.cached(folder) if item.unusable and item.unusable != cache.BEING_MADE]
    for key in dict.fromkeys(keys):
        cache.remove(folder, key)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("key", "model", "numbers", "made"):
        table.add_column(name, no_wrap=True)
    table.add_column("MB", justify="right")
    table.add_column("of use here")
    kept = cache.cached(folder)
    for item in kept:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.made_s))
        table.add_row(item.key, item.model, item.dtype, made, f"{item.size / 1e6:,.0f}", item.unusable or "yes")
    console = Console(highlight=False)
    if kept:
        console.print(table)
    console.print(f"{folder}: {sum(item.size for item in kept) / 1e6:,.0f} MB")
