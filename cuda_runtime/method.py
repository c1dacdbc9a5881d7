"""A method: one program at one width (static) or a range of widths (dynamic), with the buffers it reads.

A static method always runs its whole width: on a CPU its program is called, on CUDA a graph captured from it is
replayed. What a slice leaves over is padding: token 0 at position 0 in the padding row, whose only cell is the scratch
cell; its outputs are never used. Its selector has exactly `width` entries, the last wanted one repeated. Buffers and
outputs keep their addresses for the method's life. A dynamic method runs what it is given.

N width, R selected rows, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from microtome.planner.types import MethodSpec

TOKENS, POSITIONS, ROWS, SELECTOR, FEEDBACK = range(5)  # the lines of a forward's columns, int64 [5, N]
LINES = 5
WARM_UP_RUNS = 3  # before a capture

# (tokens [1, N], positions [1, N], rows [N], selector [R]) -> logits [R, V]; index tensors are int64
Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """The device is this thread's current one meanwhile: where kernels start and graphs are replayed."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _columns(width: int, device: torch.device) -> Tensor:
    """Int64 [5, width], every line at a multiple of 16 bytes: programs copy, each time, what is not."""
    return torch.zeros(LINES, width + width % 2, dtype=torch.int64, device=device)[:, :width]


class Method(Protocol):
    @property
    def spec(self) -> MethodSpec: ...

    def width(self, length: int) -> int:
        """Tokens that a slice of `length` occupies, padding included."""

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        """Logits [>= rows, V], valid until the next run of any method: captured ones share memory. The first `rows`
        belong to the first `rows` entries of the selector. `columns_5N` has the slice's `width`, padding filled in."""


class StaticMethod:
    def __init__(self, spec: MethodSpec, program: Program, device: torch.device) -> None:
        self.spec = spec
        self._program = program
        self._columns = _columns(spec.max_tokens, device)

    def width(self, length: int) -> int:
        return self.spec.max_tokens

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        self._columns.copy_(columns_5N)
        return self._program(
            self._columns[TOKENS, None], self._columns[POSITIONS, None], self._columns[ROWS], self._columns[SELECTOR]
        )


class DynamicMethod:
    def __init__(self, spec: MethodSpec, program: Program) -> None:
        self.spec = spec
        self._program = program

    def width(self, length: int) -> int:
        return length

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        selected = max(rows, self.spec.min_rows)
        return self._program(
            columns_5N[TOKENS, None],
            columns_5N[POSITIONS, None],
            columns_5N[ROWS],
            columns_5N[SELECTOR, :selected].contiguous(),
        )


class CapturedMethod:
    """A static method on CUDA: captured once, over buffers that stay where they are, and replayed from then on.

    Nothing in a forward depends on lengths but numbers in those buffers and in the row table, so one capture serves
    any later step. `graph_pool` is shared by all methods; capture the widest first, and the others fit into its memory.
    """

    def __init__(self, spec: MethodSpec, program: Program, device: torch.device, padding_row: int) -> None:
        self.spec = spec
        self._program = program
        self._columns = _columns(spec.max_tokens, device)
        self._columns[ROWS] = padding_row
        self._graph = torch.cuda.CUDAGraph()
        self._logits: Tensor | None = None

    def capture(self, graph_pool: Any) -> None:
        """Run a few times on a stream of its own, as torch asks, then capture. Touches the scratch cell only."""
        stream = torch.cuda.Stream(self._columns.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._columns.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._forward()
        torch.cuda.current_stream(self._columns.device).wait_stream(stream)
        # Torch's own capture stream, one for all: memory is shared among captures of one stream only.
        with torch.cuda.graph(self._graph, pool=graph_pool):
            self._logits = self._forward()

    def width(self, length: int) -> int:
        return self.spec.max_tokens

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        if self._logits is None:
            raise RuntimeError(f"{self.spec.name} was not captured")  # never lazily: a step must not wait for it
        self._columns.copy_(columns_5N)
        self._graph.replay()
        return self._logits

    def _forward(self) -> Tensor:
        return self._program(
            self._columns[TOKENS, None], self._columns[POSITIONS, None], self._columns[ROWS], self._columns[SELECTOR]
        )
