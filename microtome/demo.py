"""The demo: a service of its own on this machine, eight chats at once, what each says as it says it, and the times.

On a terminal each chat has one live line; elsewhere, plain lines. Everything the demo starts is ended with it, also
when it fails or is interrupted.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from microtome.aio import AsyncClient
from microtome.answers import Update, Usage
from microtome.chats import CHATS, Chat
from microtome.errors import MicrotomeError
from microtome.local import busy, configuration, running
from microtome.terminal import head, one_line, tail
from microtome.timing import Timing

__all__ = ["run_chats", "run_demo"]

MODEL = "smollm2-135m"
READY_S = 60.0
CHAT_S = 300.0
REFRESHES_PER_S = 12
PLAIN_WIDTH = 88  # characters of a chat's text on one plain line
NARROW = 64  # columns of a terminal below which the least is shown
TOPIC_WIDTH = max(len(chat.topic) for chat in CHATS)


@dataclass(slots=True)
class Row:
    """One chat under way."""

    chat: Chat
    timing: Timing
    text: str = ""
    usage: Usage | None = None
    error: str = ""
    shown: int = 0  # characters of the text that plain lines have shown

    @property
    def over(self) -> bool:
        return self.usage is not None or bool(self.error)

    def add(self, update: Update, at_s: float) -> None:
        self.timing.note(at_s, len(update.token_ids))
        self.text += update.text
        self.usage = update.usage or self.usage


def run_demo(console: Console, *, workers: int = 1, model: str = MODEL) -> bool:
    """All of it, from the model to the last line. True: every chat was answered. Raises BadConfig, MicrotomeError."""
    config = configuration(
        {
            "model": model,
            "service.name": f"demo-{os.getpid()}",
            "service.port": 0,
            "workers.count": workers,
            "runtime.device": "cpu",
        }
    )
    began = time.monotonic()
    with ExitStack() as stack:
        with busy(console, f"starting Ray, the driver and {_count(workers, 'CPU worker')} with {model}"):
            endpoint = stack.enter_context(running(config))
        runner = stack.enter_context(asyncio.Runner())
        runner.get_loop()  # before anybody is invited to Ctrl-C: interrupted in the making, it would be left half made
        ready_s = time.monotonic() - began
        console.print(f"[bold]{model}[/] is served at {endpoint.address}; it took {ready_s:.1f} s to start")
        console.print()
        chats = run_chats(endpoint.address, console)
        try:
            rows = runner.run(chats)
        finally:
            chats.close()  # Ctrl-C before the loop had it: else Python remarks that it never ran
        console.print()
        console.print(times_table(rows, console.width))
        console.print(Text(whole_run(rows), style="bold"))
        for row in rows:
            if row.error:
                console.print(Text(f"{row.chat.topic} failed: {one_line(row.error)}", style="red"))
        console.print()
        stack.enter_context(busy(console, "stopping what was started"))
    console.print("the service and its Ray have ended")
    return not any(row.error for row in rows)


async def run_chats(address: str, console: Console, chats: Sequence[Chat] = CHATS) -> list[Row]:
    """Send all chats at once and show what comes. A chat that fails keeps its error; the others go on."""
    async with AsyncClient(address) as client:
        await client.wait_ready(READY_S)
        rows = [Row(chat, Timing(time.monotonic())) for chat in chats]
        view = Lines(rows, console)
        with view.shown():
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(_run_chat(client, row, view))
    return rows


async def _run_chat(client: AsyncClient, row: Row, view: "Lines") -> None:
    row.timing = Timing(time.monotonic())
    try:
        generation = client.generate(
            messages=row.chat.messages, max_new_tokens=row.chat.max_new_tokens, timeout_s=CHAT_S
        )
        async with generation:
            async for update in generation:
                row.add(update, time.monotonic())
                view.changed(row)
    except MicrotomeError as error:
        row.error = str(error)
        view.changed(row)


class Lines:
    """What the chats say: one live line each on a terminal, else a plain line whenever there is enough for one."""

    def __init__(self, rows: Sequence[Row], console: Console) -> None:
        self._rows, self._console = rows, console
        self._symbols = ("-", "*", "x", "...") if console.options.ascii_only else ("▸", "✓", "✗", "…")

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        # The lines are drawn from the rows when they are due, not when a token comes.
        with Live(get_renderable=self.lines, console=self._console, refresh_per_second=REFRESHES_PER_S):
            yield

    def changed(self, row: Row) -> None:
        if not self._console.is_terminal:
            for line in self._due(row):
                self._console.print(Text(f"{row.chat.topic:{TOPIC_WIDTH}}  {line}"), soft_wrap=True)

    def lines(self) -> RenderableType:
        """One line per chat: while it runs the end of its text, afterwards the beginning."""
        width = self._console.width
        narrow = width < NARROW
        goes_on, done, failed, ellipsis = self._symbols
        room = max(width - 2 - TOPIC_WIDTH - 2 - (0 if narrow else 6), 8)
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=1)
        grid.add_column(width=TOPIC_WIDTH, no_wrap=True)
        grid.add_column(width=room, no_wrap=True)
        if not narrow:
            grid.add_column(width=4, justify="right")
        for row in self._rows:
            line = one_line(row.text)
            if row.error:
                cells = [Text(failed, "red"), Text(head(one_line(row.error), room, ellipsis), "red")]
            elif row.over:
                cells = [Text(done, "green"), Text(head(line, room, ellipsis))]
            else:
                cells = [Text(goes_on, "cyan"), Text(tail(line, room, ellipsis), "bright_white")]
            cells.insert(1, Text(row.chat.topic, "bold"))
            if not narrow:
                cells.append(Text(str(row.timing.output_tokens), "dim"))
            grid.add_row(*cells)
        return grid

    def _due(self, row: Row) -> Iterator[str]:
        """The plain lines that are complete: as wide as a line is, up to a line's end in the text, or the last."""
        while row.shown < len(row.text):
            rest = row.text[row.shown :]
            end = rest.find("\n", 0, PLAIN_WIDTH)
            if end < 0:
                if len(rest) > PLAIN_WIDTH:
                    end = rest.rfind(" ", 0, PLAIN_WIDTH)
                    end = PLAIN_WIDTH - 1 if end <= 0 else end
                elif row.over:
                    end = len(rest) - 1
                else:
                    return
            row.shown += end + 1
            if line := one_line(rest[: end + 1]):
                yield line
        if row.error:
            yield f"failed: {one_line(row.error)}"


def times_table(rows: Sequence[Row], width: int = 80) -> Table:
    """Per chat: tokens, time to first token (TTFT) and inter-token latency (ITL), as the client saw them."""
    narrow = width < NARROW
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0) if narrow else (0, 1), show_edge=False)
    table.add_column("\nchat", no_wrap=True, overflow="ellipsis")
    for name in ("prompt\ntokens", "output\ntokens", "TTFT\nms", "ITL\nmean ms", "ITL\np50 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.usage is None:
            table.add_row(row.chat.topic, *["–"] * 5, style="red")
            continue
        timing = row.timing
        table.add_row(
            row.chat.topic,
            str(row.usage.prompt_tokens),
            str(row.usage.output_tokens),
            _ms(timing.first_token_ms, 0),
            _ms(timing.mean_between_ms, 1),
            _ms(timing.median_between_ms, 1),
        )
    return table


def whole_run(rows: Sequence[Row]) -> str:
    """One sentence: the tokens of all chats together, and how many a second."""
    tokens = sum(row.timing.output_tokens for row in rows)
    if not tokens:
        return "no chat was answered"
    seconds = max(row.timing.ended_s for row in rows) - min(row.timing.began_s for row in rows)
    firsts = [row.timing.first_token_ms for row in rows if row.timing.first_token_ms is not None]
    failed = sum(bool(row.error) for row in rows)
    chats = f"{_count(len(rows), 'chat')} at once" + (f" ({failed} failed)" if failed else "")
    return (
        f"{chats}: {tokens} output tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tokens/s; median TTFT {statistics.median(firsts):.0f} ms"
    )


def _ms(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
