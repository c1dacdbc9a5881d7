"""Options that several commands share, and how those of a service become layers of settings."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from microtome import local

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="MICROTOME_ADDRESS", help="Where the service answers, host:port.")
]

# Of a service, and of a run without one.
Model = Annotated[str, typer.Argument(help="A known model (smollm2-135m), a Hugging Face folder or a .gguf file.")]
Device = Annotated[str | None, typer.Option(show_default="cpu", help="cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(show_default="auto", help="auto, float32, bfloat16 or float16.")]
Quantize = Annotated[
    str | None, typer.Option(show_default="none", help="int8: linear layers' weights in 8 bits; or none.")
]
KvTokens = Annotated[int | None, typer.Option(show_default="by free memory", help="Tokens that the KV pool holds.")]
MaxStepTokens = Annotated[int | None, typer.Option(show_default="512", help="Tokens of the widest forward.")]
Threads = Annotated[int | None, typer.Option(show_default="as torch finds it", help="CPU threads of each worker.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in runtime.widths=1,2,4.")
]

# Of a generation.
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", "-n", show_default="256", help="1 or more.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", show_default="0", help="0: greedy.")]
TopK = Annotated[int | None, typer.Option(show_default="all", help="Draw from this many likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total share.")]
MinP = Annotated[float | None, typer.Option(help="Draw from tokens this likely, relative to the first.")]
Seed = Annotated[int | None, typer.Option(show_default="drawn", help="Equal seeds draw equal tokens.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: less of what was there, prompt and output.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Taken from tokens that the output has.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Taken for each time that the output has them.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
]
AllowedTokenId = Annotated[list[int] | None, typer.Option(help="Only such tokens are drawn; may be repeated.")]
BannedTokenId = Annotated[list[int] | None, typer.Option(help="This token is not drawn; may be repeated.")]
MinNewTokens = Annotated[int | None, typer.Option(show_default="0", help="Nothing stops it before.")]
Stop = Annotated[list[str] | None, typer.Option(help="End in front of this text; may be repeated.")]
Logprobs = Annotated[
    int | None, typer.Option(show_default="off", help="Tell of each token how likely it was, and of so many others.")
]
PromptLogprobs = Annotated[
    int | None, typer.Option(show_default="off", help="And of each token of the prompt. Both with --json.")
]
StopTokenId = Annotated[list[int] | None, typer.Option(help="Stop at this token, too; may be repeated.")]
N = Annotated[int | None, typer.Option("--n", show_default="1", help="Completions of the prompt, 1 to 128.")]
Priority = Annotated[int | None, typer.Option(show_default="0", help="Higher goes first.")]
Tenant = Annotated[str | None, typer.Option(help="Whose share it counts against.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end tokens.")]


def layers_of(
    config_file: Path | None, settings: Sequence[str] | None, given: Mapping[str, object]
) -> list[Mapping[str, object]]:
    """The layers of settings, each over those before: the file, the environment, `--set`, the options of their own."""
    reader = local.server_part("actors.config")
    layers: list[Mapping[str, object]] = [] if config_file is None else [reader.file_layer(config_file)]
    layers.append(reader.environment_layer(os.environ))
    layers.append(pairs_of(settings or [], "--set"))
    layers.append({key: value for key, value in given.items() if value is not None})
    return layers


def biases_of(given: Sequence[str] | None) -> dict[int, float] | None:
    """ID=BIAS as a mapping; None: none was given. Raises typer's BadParameter, which is status 2."""
    if not given:
        return None
    biases: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise typer.BadParameter(f"{pair!r} is not of the form ID=BIAS", param_hint="--logit-bias") from error
    return biases


def pairs_of(settings: Sequence[str], option: str) -> dict[str, object]:
    """KEY=VALUE as a mapping. Raises typer's BadParameter, which is status 2."""
    pairs: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"{setting!r} is not of the form KEY=VALUE", param_hint=option)
        pairs[key.strip()] = value.strip()
    return pairs
