"""What the machine can do at most, and what a model asks of it.

`python -m bench.peer_engines.limits` is a process like an engine's: for each line it measures how fast two threads
read as many bytes as the model's weights, over and over, and how fast they multiply large matrices.

- A token decoded alone needs every weight once: weight bytes ÷ read rate is the least time.
- A prompt's tokens need two operations per weight and token, and attention: operations ÷ matmul rate is the least time.
"""

import ctypes
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peer_engines import asked_by_environment as asked_for
from bench.peer_engines.turns import Reply, answer_lines

BYTES = {"bfloat16": 2, "float32": 4}
READ_RUNS, MATMUL_RUNS = 25, 5
SIDE = 3072  # of the matrices: their traffic is hidden behind arithmetic


@dataclass(frozen=True)
class Demand:
    """Of one model. Embeddings that are looked up only, norms and biases are left out: they are far below 1 %."""

    layer_weights: int  # of all layers' matrices
    head_weights: int  # of the matrix that makes logits
    layers: int
    attention_width: int  # heads × head size

    def decode_bytes(self, dtype: str) -> int:
        return BYTES[dtype] * (self.layer_weights + self.head_weights)

    def prefill_operations(self, tokens: int) -> int:
        """Of one prompt whose last token alone wants logits. Attention is causal: half of all pairs, two products."""
        pairs = tokens * (tokens + 1) // 2
        attention = 2 * 2 * self.layers * self.attention_width * pairs
        return 2 * tokens * self.layer_weights + 2 * self.head_weights + attention


def demand_of(config: Mapping[str, Any]) -> Demand:
    """Of a Llama-shaped model's `config.json`."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    key_values = config["num_key_value_heads"] * head
    attention = 2 * hidden * heads * head + 2 * hidden * key_values
    feed_forward = 3 * hidden * config["intermediate_size"]
    return Demand(
        layer_weights=config["num_hidden_layers"] * (attention + feed_forward),
        head_weights=hidden * config["vocab_size"],
        layers=config["num_hidden_layers"],
        attention_width=heads * head,
    )


def demand_of_folder(model: Path) -> Demand:
    return demand_of(json.loads((model / "config.json").read_text()))


@contextmanager
def started() -> Iterator[tuple[Mapping[str, Any], Reply]]:
    import torch  # here: what is above needs no torch

    torch.set_num_threads(asked_for.THREADS)
    torch.set_grad_enabled(False)
    weight_bytes = demand_of_folder(Path(asked_for.model())).decode_bytes("bfloat16")
    matrix = torch.randn(SIDE, SIDE).to(getattr(torch, asked_for.dtype()))
    with _reader(weight_bytes) as read:

        def reply(asked: Mapping[str, Any]) -> Mapping[str, Any]:
            return {
                "read_bytes_per_s": weight_bytes / min(_seconds(read) for _ in range(READ_RUNS)),
                "operations_per_s": 2 * SIDE**3 / min(_seconds(lambda: matrix @ matrix) for _ in range(MATMUL_RUNS)),
            }

        yield {"torch": torch.__version__}, reply


@contextmanager
def _reader(size: int) -> Iterator[Any]:
    """A call that reads `size` bytes, on large pages where the system gives them."""
    source = Path(__file__).parent / "read_rate.c"
    lines = size // 64
    # Private: memory that could be shared gets no large pages.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with tempfile.TemporaryDirectory() as folder, mmap.mmap(-1, size + mmap.PAGESIZE, flags=private) as memory:
        library = Path(folder) / "read_rate.so"
        flags = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
        subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True, stderr=sys.stderr)
        read_all = ctypes.CDLL(str(library)).read_all
        read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        read_all.restype = ctypes.c_uint64
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(view)
        try:
            yield lambda: read_all(address, lines, asked_for.THREADS)
        finally:
            del view  # a map that is looked at cannot be closed


def _seconds(call: Any) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    answer_lines(started)
