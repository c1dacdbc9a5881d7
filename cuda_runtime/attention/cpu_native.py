"""Attention over cells on a CPU in C++: reads K and V where they lie, gathers nothing.

Promises `seam.Attention`. Float32 and bfloat16 tokens and pools, head sizes that are multiples of 16 up to 256;
anything else goes to the stock operators of `cpu`. Lone tokens (decodes) give the same bits whatever shares the
forward with them and however many threads run. Raises IndexError, with nothing touched, for a row, position or cell
to be written that does not exist.
"""

from pathlib import Path

import torch

from microtome.cuda_runtime.attention import torch_operator
from microtome.cuda_runtime.attention.seam import Attention
from microtome.cuda_runtime.native_library import build_library

SOURCES = Path(__file__).parent / "native"


def build(*, cache_folder: Path | None = None, march: str = "native") -> Path:
    """The built library, found in the cache or compiled. Raises `BadConfig` where there is no compiler."""
    return build_library("attention", SOURCES, cache_folder=cache_folder, march=march)


def load(library: Path | None = None) -> Attention:
    """Load `library` (default: built here, or found built) once per process. `cpu` is loaded already.

    Raises `BadConfig` where there is no compiler.
    """
    library = library or build()
    torch_operator.define("cpu_native")
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return torch_operator.collect("cpu_native")
