"""The commands that need no service: a model run in this process, a journal run again."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from microtome import local
from microtome.cli_options import (
    ConfigFile,
    Device,
    Dtype,
    IgnoreEos,
    KvTokens,
    MaxNewTokens,
    MaxStepTokens,
    MinP,
    Model,
    Quantize,
    Seed,
    Settings,
    StopTokenId,
    Temperature,
    Threads,
    TopK,
    TopP,
    layers_of,
)

FAILED = 1


def solo(
    model: Model,
    prompts: Annotated[
        Path | None, typer.Option(show_default="the demo's chats", help="A file of prompts: one a line, text or JSON.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, show_default="all", help="Prompts at a time.")] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    kv_tokens: KvTokens = None,
    max_step_tokens: MaxStepTokens = None,
    threads: Threads = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Run prompts through one planner and one executor in this process, without Ray or gRPC.

    Prints texts, times, and what the executor did. Settings come from the same places as those of `serve`.
    """
    from microtome.solo_run import Solo, read_prompts

    asked = read_prompts(
        prompts,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop_token_ids": stop_token_id,
            "ignore_eos": ignore_eos or None,
        },
    )
    given = {
        "model": model,
        "runtime.device": device,
        "runtime.dtype": dtype,
        "runtime.quantize": quantize,
        "runtime.kv_tokens": kv_tokens,
        "runtime.max_step_tokens": max_step_tokens,
        "runtime.threads": threads,
    }
    config = local.configuration(*layers_of(config_file, settings, given))
    remarks = Console(stderr=True, highlight=False)
    with local.busy(remarks, f"loading {config.model}"):
        loaded = Solo(config)
    with local.busy(remarks, f"running {len(asked)} prompts"):
        report = loaded.answer(asked, concurrency=concurrency)
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        Console(highlight=False).print(report.view())
    if any(said.error for said in report.said):
        raise typer.Exit(FAILED)


def replay(
    file: Annotated[Path, typer.Argument(help="A journal that a service has written.")],
    policy: Annotated[str | None, typer.Option(show_default="as recorded", help="What if: under this policy.")] = None,
    workers: Annotated[int | None, typer.Option(show_default="as recorded", help="What if: this many workers.")] = None,
    life: Annotated[
        int | None, typer.Option(show_default="all; what if: the longest", help="One of the driver's lives, from 1.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what is found to this file, too.")] = None,
) -> None:
    """Run a journal's events again, and say where the planner's answers first differ from those written down.

    With --policy or --workers: simulate instead what those would have made of the same requests. The exit status is 1
    when an answer differs or a record is damaged.
    """
    from microtome import replaying

    console, remarks = Console(highlight=False), Console(stderr=True, highlight=False)
    agrees = replaying.run(
        file, policy=policy, workers=workers, life=life, json_file=json_file, console=console, remarks=remarks
    )
    if not agrees:
        raise typer.Exit(FAILED)
