"""What the Triton kernels of attention take of a GPU, found without one: compiled ahead of time, per architecture.

    python -m bench.kernel_resources            # compile everything, print registers, spills and shared memory
    python -m bench.kernel_resources --write    # and make that the table which the tests compare with

Registers are per thread (255 is the most there is), `stack_bytes` is local memory per thread (what spills), shared
memory is per program. The assembler and the disassembler are those of Triton's own wheel.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from microtome.cuda_runtime.attention import triton_attention as launches
from microtome.cuda_runtime.attention import triton_kernels as kernels

TABLE = Path(__file__).parent / "kernel_resources.json"
ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # CUDA programming guide, compute capabilities


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A model's attention, as far as the kernels see it."""

    name: str
    heads: int
    kv_heads: int
    size: int
    dtype: str = "bf16"
    pool: str = ""  # "": as the tokens
    windowed: bool = False
    capped: bool = False
    sinks: bool = False


GEOMETRIES = (
    Geometry(name="smollm2-135m", heads=9, kv_heads=3, size=64),
    Geometry(name="llama-3.1-8b", heads=32, kv_heads=8, size=128),
    Geometry(name="phi-3-mini", heads=32, kv_heads=32, size=96),
    Geometry(name="gemma-2-9b", heads=16, kv_heads=8, size=256, windowed=True, capped=True),
    Geometry(name="gpt-oss-20b", heads=64, kv_heads=8, size=64, windowed=True, sinks=True),
    Geometry(name="llama-3.1-8b, fp8 pool", heads=32, kv_heads=8, size=128, pool="fp8e4nv"),
    Geometry(name="llama-3.2-1b, fp32", heads=32, kv_heads=8, size=64, dtype="fp32"),
    Geometry(name="llama-3.1-8b, fp32", heads=32, kv_heads=8, size=128, dtype="fp32"),
)


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Variant:
    """One kernel as one launch compiles it."""

    kernel: Any
    constants: dict[str, Any]
    warps: int
    stages: int


def cases() -> list[tuple[Geometry, int]]:
    """Every geometry on every architecture that has its pool's type: e4m3 came with sm_89."""
    return [(g, a) for g in GEOMETRIES for a in ARCHITECTURES if a >= 89 or g.pool != "fp8e4nv"]


def variants(geometry: Geometry, architecture: int) -> dict[str, Variant]:
    """The kernels that serve this geometry, by name."""
    heads, kv_heads, size = geometry.heads, geometry.kv_heads, geometry.size
    itemsize = 4 if geometry.dtype == "fp32" else 2
    flags = {"CAPPED": geometry.capped, "WINDOWED": geometry.windowed}
    found: dict[str, Variant] = {}

    def add(name: str, kernel: Any, launch: launches.Launch, **more: bool) -> None:
        found[name] = Variant(kernel, {**launch.constants, **more}, launch.warps, launch.stages)

    for name, tokens in (("one-token", 1), ("wide", 512)):
        narrow = tokens <= launches.NARROW
        splits = launches.splits_of(tokens, kv_heads)
        alone = launches.alone_launch(
            heads=heads, kv_heads=kv_heads, size=size, itemsize=itemsize, splits=splits, narrow=narrow
        )
        block_p = alone.constants["BLOCK_P"]
        join = launches.combine_launch(heads=heads, size=size, splits=splits, block_p=block_p, narrow=narrow)
        add(f"attend_alone, {name}", kernels.attend_alone, alone, **flags)
        add(f"combine, {name}", kernels.combine, join, WINDOWED=geometry.windowed, SINKS=geometry.sinks)
    tiles = launches.tiles_launch(
        heads=heads, kv_heads=kv_heads, size=size, itemsize=itemsize, roomy=architecture >= 90
    )
    add("attend_tiles", kernels.attend_tiles, tiles, SINKS=geometry.sinks, **flags)
    write = launches.write_launch(kv_heads=kv_heads, size=size, from_rows=True)
    add("write_cells", kernels.write_cells, write)
    return found


def compile_ahead(variant: Variant, geometry: Geometry, architecture: int) -> Resources:
    """Compile one kernel for `architecture` (80 is sm_80) and read what it takes from the binary."""
    types = {
        **dict.fromkeys(("q", "k", "v", "out", "sinks"), f"*{geometry.dtype}"),
        **dict.fromkeys(("k_pool", "v_pool"), f"*{geometry.pool or geometry.dtype}"),
        **dict.fromkeys(("rows", "token_rows", "positions", "cells"), "*i32"),
        **dict.fromkeys(("partial_acc", "partial_stats"), "*fp32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    names = variant.kernel.arg_names
    signature = {n: "constexpr" if n in variant.constants else types.get(n, "i32") for n in names}
    # As at run time: allocations and strides are multiples of 16.
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith("_stride")]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in variant.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return resources_of(compiled.asm["cubin"], compiled.metadata.shared, architecture)


def resources_of(cubin: bytes, shared_bytes: int, architecture: int) -> Resources:
    cuobjdump = Path(get_ptxas(architecture).path).with_name("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], shared_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    arguments = parser.parse_args()
    table: dict[str, dict[str, dict[str, int]]] = {}
    for geometry, architecture in cases():
        for name, variant in variants(geometry, architecture).items():
            begin = time.perf_counter()
            resources = compile_ahead(variant, geometry, architecture)
            took = time.perf_counter() - begin
            table.setdefault(f"{geometry.name}: {name}", {})[f"sm_{architecture}"] = asdict(resources)
            print(f"{geometry.name:<22} sm_{architecture:<4} {name:<24} {resources}  ({took:.1f} s)", flush=True)
    if arguments.write:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
