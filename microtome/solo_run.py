"""Prompts through one planner and one executor in this process, and what came of it: the `solo` command.

For debugging, profiling and machines without Ray: it imports neither Ray nor gRPC. Requests are checked and put into
the planner's words by the same code as a service's, so a prompt is refused here as it is there.
"""

import importlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from microtome.chats import CHATS
from microtome.errors import InvalidRequest
from microtome.local import server_part
from microtome.planner.control import Control
from microtome.planner.errors import BadInput
from microtome.planner.protocols import Executor
from microtome.planner.types import Capability
from microtome.sampling import request_of
from microtome.solo import Answer, Engine, Request, run
from microtome.terminal import one_line, printable
from microtome.timing import Timing
from microtome.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from microtome.actors.config import ServiceConfig
    from microtome.actors.text import ModelText

__all__ = ["Solo", "SoloReport", "read_prompts"]

SEED_BITS = 64


def read_prompts(file: Path | None, options: Mapping[str, Any]) -> list[pb.GenerateRequest]:
    """The requests in a file, one a line; None: the demo's chats. Empty lines are skipped.

    A line that begins with "{" is a JSON object with `prompt`, `messages` or `token_ids` and any options of `generate`;
    any other line is a prompt as it stands. `options` hold where a line says nothing. Raises InvalidRequest, naming
    the line.
    """
    if file is None:
        return [
            request_of(None, chat.messages, None, {"max_new_tokens": chat.max_new_tokens, **_given(options)})
            for chat in CHATS
        ]
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"prompts {str(file)!r} cannot be read: {error}") from error
    requests = [_request_of(f"{file} line {number}", line, options) for number, line in enumerate(lines, 1) if line]
    if not requests:
        raise InvalidRequest(f"prompts {str(file)!r} hold no line")
    return requests


def _request_of(where: str, line: str, options: Mapping[str, Any]) -> pb.GenerateRequest:
    if not line.startswith("{"):
        return request_of(line, None, None, options)
    try:
        said: dict[str, Any] = json.loads(line)
        prompt, messages, token_ids = (said.pop(name, None) for name in ("prompt", "messages", "token_ids"))
        return request_of(prompt, messages, token_ids, {**_given(options), **said})
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
    except (InvalidRequest, TypeError) as error:
        raise InvalidRequest(f"{where}: {error}") from error


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Said:
    """One prompt and its answer. Times are milliseconds."""

    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    seed: int
    finish: str  # "stop", "length", "failed"
    error: str  # empty: none
    ttft_ms: float | None
    itl_mean_ms: float | None
    itl_p50_ms: float | None


@dataclass(frozen=True, slots=True)
class SoloReport:
    said: list[Said]
    engine: Engine
    load_s: float

    @property
    def output_tokens(self) -> int:
        return sum(len(said.token_ids) for said in self.said)

    @property
    def seconds(self) -> float:
        return (self.engine.ended_us - self.engine.started_us) / 1e6

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "generations": [asdict(said) for said in self.said],
            "engine": asdict(self.engine),
            "load_s": self.load_s,
            "run_s": self.seconds,
            "output_tokens": self.output_tokens,
        }

    def view(self) -> RenderableType:
        """Texts, then times, then what the executor did."""
        return Group(*self._texts(), self._times(), Text(), self._engine(), self._forwards())

    def _texts(self) -> Iterator[RenderableType]:
        for number, said in enumerate(self.said, 1):
            yield Text(f"{number}  {one_line(said.prompt)}", style="bold", overflow="ellipsis", no_wrap=True)
            if said.error:
                yield Text(one_line(said.error), style="red")
            yield Text(printable(said.text).strip("\n"))
            yield Text()

    def _times(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        names = (
            "\n#",
            "prompt\ntokens",
            "\ncached",
            "output\ntokens",
            "\nfinish",
            "TTFT\nms",
            "ITL\nmean ms",
            "ITL\np50 ms",
        )
        for name in names:
            table.add_column(name, justify="left" if "finish" in name else "right", no_wrap=True)
        for number, said in enumerate(self.said, 1):
            counts = (said.prompt_tokens, said.cached_tokens, len(said.token_ids))
            times = (said.ttft_ms, said.itl_mean_ms, said.itl_p50_ms)
            table.add_row(
                str(number), *map(str, counts), said.finish, *("–" if t is None else f"{t:.1f}" for t in times)
            )
        return table

    def _engine(self) -> RenderableType:
        engine, seconds = self.engine, self.seconds
        facts = [f"{self.output_tokens} output tokens in {seconds:.2f} s", f"loaded in {self.load_s:.1f} s"]
        if seconds:
            facts[0] += f", {self.output_tokens / seconds:.1f} tokens/s"
        if engine.steps:
            facts.append(f"{engine.steps} steps of {engine.step_us / engine.steps / 1e3:.2f} ms")
            facts.append(f"{engine.tokens_run / engine.steps:.1f} tokens a step")
            facts.append(f"{100 * engine.idle_us / max(engine.idle_us + engine.step_us, 1):.1f} % idle between steps")
        return Text("; ".join(facts))

    def _forwards(self) -> RenderableType:
        forwards = ", ".join(f"{name} {count}" for name, count in self.engine.forwards.items() if count)
        return Text(f"forwards: {forwards or 'none'}")


class Solo:
    """A loaded model with a planner of its own. Loading takes seconds to minutes. Raises BadConfig."""

    def __init__(self, config: "ServiceConfig") -> None:
        began = time.monotonic()
        self._config = config
        self._text: ModelText = server_part("actors.text").load_model_text(config.runtime.model)
        importlib.import_module("transformers.utils.logging").disable_progress_bar()  # ours says what is going on
        module, _, function = config.workers.executor.partition(":")
        self._executor: Executor = getattr(importlib.import_module(module), function)(config.runtime)
        self._control = Control(config.planner)  # it knows what the executor holds, from one `answer` to the next
        self.load_s = time.monotonic() - began

    @property
    def capability(self) -> Capability:
        return self._executor.describe()

    def answer(self, asked: Sequence[pb.GenerateRequest], *, concurrency: int | None = None) -> SoloReport:
        """Run them all, `concurrency` of them at a time. One that is refused has its error in its answer."""
        refused: dict[int, str] = {}
        requests: dict[int, Request] = {}
        for index, request in enumerate(asked):
            try:
                requests[index] = self._planned(request)
            except BadInput as error:
                refused[index] = str(error)
        report = run(self._executor, self._control, list(requests.values()), concurrency=concurrency)
        answers = dict(zip(requests, report.answers, strict=True))
        said = [
            self._refused(asked[index], refused[index])
            if index in refused
            else self._said(asked[index], requests[index], answers[index])
            for index in range(len(asked))
        ]
        return SoloReport(said, report.engine, self.load_s)

    def _planned(self, request: pb.GenerateRequest) -> Request:
        """Raises BadInput."""
        words = server_part("actors.requests")
        capability = self.capability
        model = words.ServedModel(
            name=self._config.model,
            fingerprint=capability.fingerprint,
            vocab_size=capability.vocab_size,
            context_tokens=capability.max_session_tokens,
            end_token_ids=self._text.end_token_ids,
            has_chat_template=self._text.tokenizer.has_chat_template,
            architecture=self._text.architecture,
        )
        words.check_numbers(request, model)
        if request.stop:
            raise BadInput("a run without a service stops at token ids, not at texts")
        prompt = words.text_prompt(request)
        if prompt is None:
            tokens = list(request.token_ids.ids)
        elif isinstance(prompt, str):
            tokens = self._text.tokenizer.encode(prompt)
        else:
            tokens = self._text.tokenizer.encode_chat(prompt)
        words.check_prompt(tokens, model)
        seed = request.seed if request.HasField("seed") else secrets.randbits(SEED_BITS)
        options = words.generation_options(request, model, len(tokens), seed, None)
        return Request(prompt=tuple(tokens), options=options)

    def _said(self, asked: pb.GenerateRequest, request: Request, answer: Answer) -> Said:
        timing = Timing(answer.submitted_us / 1e6)
        for at_us in answer.token_times_us:
            timing.note(at_us / 1e6, 1)
        finish = "failed" if answer.finish is None else answer.finish.value
        shown = answer.tokens[:-1] if finish == "stop" else answer.tokens
        usage = answer.usage
        return Said(
            prompt=_prompt_of(asked),
            text=self._text.tokenizer.decode(shown),
            token_ids=answer.tokens,
            prompt_tokens=len(request.prompt),
            cached_tokens=0 if usage is None else usage.cached_tokens,
            seed=request.options.sampling.seed,
            finish=finish,
            error="" if answer.error is None else str(answer.error),
            ttft_ms=timing.first_token_ms,
            itl_mean_ms=timing.mean_between_ms,
            itl_p50_ms=timing.median_between_ms,
        )

    def _refused(self, asked: pb.GenerateRequest, error: str) -> Said:
        return Said(_prompt_of(asked), "", [], 0, 0, asked.seed, "failed", error, None, None, None)


def _prompt_of(request: pb.GenerateRequest) -> str:
    """A prompt as a heading: the text, the chat's last message, or the token ids."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            return request.chat.messages[-1].content
        case _:
            return " ".join(map(str, request.token_ids.ids))
