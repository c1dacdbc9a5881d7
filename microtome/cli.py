"""The `microtome` command: reads arguments, calls, prints. What is asked for goes to standard output, the rest to
standard error.

An error that was foreseen is one sentence and an exit status, never a traceback: 1 it failed, 2 the command line is
wrong, 130 interrupted, 143 terminated. The server side is imported inside the commands that need it.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import microtome
from microtome import cli_artifact, cli_offline, local
from microtome.cli_options import (
    Address,
    AllowedTokenId,
    BannedTokenId,
    ConfigFile,
    Device,
    Dtype,
    FrequencyPenalty,
    IgnoreEos,
    KvTokens,
    LogitBias,
    Logprobs,
    MaxNewTokens,
    MaxStepTokens,
    MinNewTokens,
    MinP,
    Model,
    N,
    PresencePenalty,
    Priority,
    PromptLogprobs,
    Quantize,
    RepetitionPenalty,
    Seed,
    Settings,
    Stop,
    StopTokenId,
    Temperature,
    Tenant,
    Threads,
    TopK,
    TopP,
    biases_of,
    layers_of,
    pairs_of,
)
from microtome.errors import MicrotomeError, Unavailable
from microtome.planner.errors import BatchingError
from microtome.terminal import one_line, printable

FAILED = 1
INTERRUPTED = 130


class _OneSentence(TyperGroup):
    """Turns what was foreseen to go wrong into one sentence on standard error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MicrotomeError, BatchingError) as error:
            sentence = one_line(str(error)) or type(error).__name__
            if isinstance(error, Unavailable) and sentence.startswith("no service answers"):
                sentence += "; `microtome serve MODEL` starts one"
            _complain(sentence)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as error:  # the reader has gone, as in `microtome generate … | head`
            # Python flushes standard output once more when it exits; nothing must be left that could fail then.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from error


app = typer.Typer(
    cls=_OneSentence,
    name="microtome",
    help="Serve language models in slices: continuous batching on Ray, tokens over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # what was not foreseen is a defect: its plain traceback belongs in the report
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def serve(
    model: Model,
    name: Annotated[
        str | None, typer.Option(show_default="microtome", help="Of the service; one name, one service.")
    ] = None,
    host: Annotated[str | None, typer.Option(show_default="127.0.0.1", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(show_default="50051", help="Port to listen on; 0: any free one.")] = None,
    workers: Annotated[int | None, typer.Option(show_default="1", help="How many, one device each.")] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(
            show_default="--workers",
            help="However little there is to do; 0: the first call starts one, --idle-s ends it.",
        ),
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(show_default="--workers", help="However much there is to do.")
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option(show_default="300", help="Seconds without work before the last worker goes.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    kv_tokens: KvTokens = None,
    max_step_tokens: MaxStepTokens = None,
    threads: Threads = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Compile nothing: ready sooner the first time, slower ever after.")
    ] = False,
    journal: Annotated[
        Path | None, typer.Option(show_default="none", help="Write down what the planner decides, for `replay`.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(show_default="one of its own, here", help="The Ray cluster to use, host:port of its head."),
    ] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Serve MODEL in the foreground, until Ctrl-C or `microtome down`.

    The first start compiles the model for this machine, which takes a while, and keeps what was made in the cache.

    Settings come from defaults, --config, MICROTOME_… variables and the options here, each over those before.
    """
    given = {
        "model": model,
        "service.name": name,
        "service.host": host,
        "service.port": port,
        "workers.count": workers,
        "workers.min": min_workers,
        "workers.max": max_workers,
        "workers.idle_s": idle_s,
        "runtime.device": device,
        "runtime.dtype": dtype,
        "runtime.quantize": quantize,
        "runtime.kv_tokens": kv_tokens,
        "runtime.max_step_tokens": max_step_tokens,
        "runtime.threads": threads,
        "runtime.methods": "eager" if eager else None,
        "journal.path": None if journal is None else str(journal.absolute()),
    }
    compiled = {"runtime.methods": "compiled"}  # worth a slow first start: the others find it done
    layers = [compiled, *layers_of(config_file, settings, given)]
    local.serve(local.configuration(*layers), ray_address, Console(), Console(stderr=True))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; with --chat the user's message; -: stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a chat message, by the model's template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it; implies --chat.")] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    logit_bias: LogitBias = None,
    allowed_token_id: AllowedTokenId = None,
    banned_token_id: BannedTokenId = None,
    min_new_tokens: MinNewTokens = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    n: N = None,
    priority: Priority = None,
    tenant: Tenant = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds that all of it may take.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON when it is done, a line for each completion.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tokens and times, on standard error.")] = False,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Generate text, and print it as it comes."""
    from microtome.printing import TextPrinter
    from microtome.timing import Timing

    text = sys.stdin.read() if prompt == "-" else prompt
    messages = None
    if chat or system is not None:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
    show = printable if sys.stdout.isatty() else str
    printer = TextPrinter(n or 1, lambda piece: print(show(piece), end="", flush=True))
    with microtome.Client(address) as client:
        timing = Timing(time.monotonic())
        generation = client.generate(
            text if messages is None else None,
            messages=messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases_of(logit_bias),
            allowed_token_ids=allowed_token_id,
            banned_token_ids=banned_token_id,
            min_new_tokens=min_new_tokens,
            stop=stop,
            stop_token_ids=stop_token_id,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
            priority=priority,
            tenant=tenant,
            timeout_s=timeout_s,
        )
        try:
            for update in generation:
                if not update.index:
                    timing.note(time.monotonic(), len(update.token_ids))
                if not as_json:
                    printer.add(update)
        finally:
            generation.close()
            printer.end_line()
    for completion in generation.completions:
        if as_json:
            print(json.dumps(dataclasses.asdict(completion), ensure_ascii=False))
        if not verbose:
            continue
        usage = completion.usage
        facts = [
            f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached)",
            f"output {usage.output_tokens} tokens",
            f"finish {completion.finish_reason}",
            f"seed {completion.seed}",
        ]
        if not completion.index and timing.first_token_ms is not None:
            facts.append(f"TTFT {timing.first_token_ms:.0f} ms")
        if not completion.index and timing.mean_between_ms is not None:
            facts.append(f"ITL mean {timing.mean_between_ms:.1f} ms, p50 {timing.median_between_ms:.1f} ms")
        Console(stderr=True, highlight=False).print(Text("; ".join(facts), style="dim"), soft_wrap=True)


@app.command()
def status(
    queue: Annotated[bool, typer.Option("--queue", help="What waits, in order, and what runs, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as JSON.")] = False,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Say how the service is: model, workers, load, counters."""
    from microtome.status_view import UNWRAPPED, status_view
    from microtome.whereabouts_view import queue_view

    with microtome.Client(address) as client:
        state, model = client.status(), client.model()
        listed = client.queue() if queue else ()
    if as_json:
        told = {"model": model.name, **dataclasses.asdict(state)}
        if queue:
            told["queue"] = [dataclasses.asdict(one) for one in listed]
        print(json.dumps(told, ensure_ascii=False, indent=2))
        return
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:  # a file or a program: one line is one fact
        console.width = UNWRAPPED
    console.print(status_view(state, model, address))
    if queue:
        console.print(queue_view(listed))


@app.command()
def where(
    generation_id: Annotated[str, typer.Argument(help="Its id, as every update and `status --queue` name it.")],
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as JSON, a line for each completion.")] = False,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Say where a generation is: how far, or what it waits for, how many come before it, and how long still."""
    from microtome.whereabouts_view import sentence_of

    with microtome.Client(address) as client:
        places = client.where(generation_id)
    for place in places:
        if as_json:
            print(json.dumps(dataclasses.asdict(place), ensure_ascii=False))
        else:
            print(f"completion {place.index}: {sentence_of(place)}" if len(places) > 1 else sentence_of(place))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as `status` shows it.")],
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; the drain itself goes on.")] = None,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Take one worker out of service without breaking a stream, and wait until it is gone."""
    with microtome.Client(address) as client:
        client.drain(worker, timeout_s=timeout_s)
    print(f"{worker} is drained")


@app.command()
def update(
    model: Annotated[str | None, typer.Option(show_default="as it is", help="As for `serve`.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of the workers, as in kv_tokens=8192.")
    ] = None,
    drain_first: Annotated[
        bool, typer.Option("--drain-first", help="Give up a worker's place before the next one is asked for.")
    ] = False,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds to wait; the update itself goes on.")] = None,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Change the model or the workers' settings, worker by worker, without dropping a stream."""
    layer = pairs_of(option or [], "--option")
    settings = {key if "." in key or key == "model" else f"runtime.{key}": str(value) for key, value in layer.items()}
    if model is not None:
        settings.update({"model": model, "runtime.model": local.server_part("fetch").resolve_model(model)})
    if not settings:
        raise typer.BadParameter("nothing is to be changed: give --model or --option", param_hint="--model")
    with microtome.Client(address) as client:
        revision = client.update(settings, drain_first=drain_first, timeout_s=timeout_s)
    print(f"every worker has the new settings (revision {revision})")


@app.command()
def scale(
    min_workers: Annotated[int | None, typer.Option("--min", show_default="as it is", help="Fewest workers.")] = None,
    max_workers: Annotated[int | None, typer.Option("--max", show_default="as it is", help="Most workers.")] = None,
    address: Address = local.DEFAULT_ADDRESS,
) -> None:
    """Change how many workers the service may have. Kept until it is taken down."""
    if min_workers is None and max_workers is None:
        raise typer.BadParameter("nothing is to be changed: give --min, --max or both", param_hint="--min")
    with microtome.Client(address) as client:
        least, most = client.scale(min_workers, max_workers)
    print(f"between {least} and {most} workers from now on" if least < most else f"{least} workers from now on")


@app.command()
def down(
    name: Annotated[str | None, typer.Option(show_default="the one at --address", help="Of the service.")] = None,
    namespace: Annotated[str | None, typer.Option(show_default="the service's name", help="Of it on Ray.")] = None,
    address: Address = local.DEFAULT_ADDRESS,
    ray_address: Annotated[
        str | None, typer.Option(show_default="as the service says", help="The Ray cluster it is on, host:port.")
    ] = None,
) -> None:
    """Take a service down, and everything that belongs to it."""
    local.server_part("actors.cluster")  # said before anything is asked
    if name is None or ray_address is None:
        with microtome.Client(address) as client:
            state = client.status()
        if name is not None and name != state.service:
            raise microtome.MicrotomeError(
                f"the service at {address} is {state.service!r}, not {name!r}; "
                "say where it is with --address or --ray-address"
            )
        name, ray_address = state.service, ray_address or state.ray_address
    if ended := local.down(name, namespace or "", ray_address):
        print(f"service {name!r} is down; ended: {', '.join(ended)}")
    else:
        print(f"no service {name!r} is up on the Ray at {ray_address}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A known model, such as smollm2-135m.")],
) -> None:
    """Fetch a known model into the cache, and print its path."""
    print(local.server_part("fetch").fetch(name))


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="CPU workers.", min=1)] = 1,
    model: Annotated[str, typer.Option(help="As for `serve`.")] = "smollm2-135m",
) -> None:
    """Serve a small model here, hold eight chats with it at once, show the times, and end it all."""
    from microtome.demo import run_demo

    if not run_demo(Console(highlight=False), workers=workers, model=model):
        raise typer.Exit(FAILED)


app.command()(cli_offline.solo)
app.command()(cli_artifact.export)
app.command()(cli_artifact.inspect)
app.command()(cli_artifact.artifacts)
app.command()(cli_offline.replay)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"microtome {microtome.__version__}")


def main() -> None:
    """The command's entry point."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own remarks on sockets: ours say it in one sentence
    app()


def _complain(sentence: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"microtome: {sentence}"), soft_wrap=True)
