"""The two programs of a model, exported and compiled: `decode` for one token, `prefill` for 2 to `max_step_tokens`.

Every method of a ladder runs one of them: on CUDA it is captured at each static width, on a CPU called. Shapes that an
operator chooses anew at each start (cells, sequences, session length) stay symbols, so a program fits any pool. K/V and
weights are not in a program: both are handed in when it runs or is loaded, and so exist once, however many methods.

Export and compilation need shapes and types only: they work on a skeleton whose weights are never read, in a process
of their own per program, side by side. A program is torch's own package (`torch.export`, then AOTInductor), and whoever
has loaded it needs neither the model's code nor a compiler.

T tokens, R selected rows, V vocabulary, S rows of L entries.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from microtome.cuda_runtime.attention.registry import get_attention
from microtome.cuda_runtime.checkpoint import Checkpoint, find_checkpoint
from microtome.cuda_runtime.linear import int8
from microtome.cuda_runtime.linear.fuse import fuse
from microtome.cuda_runtime.linear.packed import join_side_by_side, pack_linears
from microtome.cuda_runtime.model import CellModel, LayerGeometry, skeleton
from microtome.planner.errors import BadConfig

DECODE, PREFILL = "decode", "prefill"
PROGRAMS = (DECODE, PREFILL)
MIN_OUTPUTS = 2  # logits rows that `prefill` selects at least: a size of one would not stay a symbol
_EXAMPLE_TOKENS, _EXAMPLE_OUTPUTS, _EXAMPLE_CELLS, _EXAMPLE_ROWS, _EXAMPLE_LENGTH = 6, 3, 40, 5, 24


class Forward(Protocol):
    """What a method runs: a `CellModel`, or one of its programs."""

    def __call__(
        self,
        tokens_1T: Tensor,
        positions_1T: Tensor,
        token_rows_T: Tensor,
        selector_R: Tensor,
        rows_SL: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Logits [R, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """What determines a program, beside the machine and the library versions."""

    model: str  # a checkpoint's path: its configuration is read, its weights are not
    device: str
    dtype: str
    kv_dtype: str  # of cells, as torch names it
    quantize: str  # none or int8
    attention: str
    layers: tuple[tuple[int, int, int], ...]  # kv_heads, head_size, window
    max_step_tokens: int
    session_tokens: int


def compile_programs(request: ProgramRequest, folder: Path) -> None:
    """Write `<program>.pt2` for both programs into `folder`. Raises `BadConfig` with the compiler's last words."""
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "request.json"
        described.write_text(json.dumps(asdict(request)))
        running = {}
        for name in PROGRAMS:
            words = (Path(scratch) / f"{name}.log").open("w+")
            command = [sys.executable, "-m", __name__, str(described), name, str(folder / f"{name}.pt2")]
            running[name] = (subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT), words)
        failures = []
        for name, (process, words) in running.items():
            if process.wait() != 0:
                words.seek(0)
                last = next((line for line in reversed(words.read().splitlines()) if line.strip()), "no message")
                failures.append(f"program {name} of {request.model} does not compile: {last}")
            words.close()
    if failures:
        raise BadConfig(failures[0])


def export(
    model: CellModel, name: str, *, layers: Sequence[LayerGeometry], kv_dtype: torch.dtype, max_step_tokens: int
) -> ExportedProgram:
    """The program `name` of `model`, whose weights may be unset."""
    device = next(model.parameters()).device
    tokens, outputs = (1, 1) if name == DECODE else (_EXAMPLE_TOKENS, _EXAMPLE_OUTPUTS)

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def pool(layer: LayerGeometry) -> Tensor:
        return torch.zeros(_EXAMPLE_CELLS, layer.kv_heads, layer.head_size, dtype=kv_dtype, device=device)

    arguments = (
        integers(1, tokens),
        integers(1, tokens),
        integers(tokens),
        integers(outputs),
        integers(_EXAMPLE_ROWS, _EXAMPLE_LENGTH, dtype=torch.int32),
        [pool(layer) for layer in layers],
        [pool(layer) for layer in layers],
    )
    token_axis: Any = None
    output_axis: Any = None
    if name == PREFILL:
        token_axis = Dim("tokens", min=2, max=max_step_tokens)
        output_axis = Dim("outputs", min=MIN_OUTPUTS, max=max_step_tokens)
    cell_axis = Dim("cells", min=2)
    shapes = (
        {1: token_axis},
        {1: token_axis},
        {0: token_axis},
        {0: output_axis},
        {0: Dim("sequences", min=2), 1: Dim("length", min=2)},
        [{0: cell_axis} for _ in layers],
        [{0: cell_axis} for _ in layers],
    )
    with torch.no_grad():
        exported = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False)
    if device.type == "cpu":
        fuse(exported.graph)
        for operator in ("packed_linear", "int8_linear"):
            join_side_by_side(exported.graph, operator)
        exported.graph_module.recompile()
    return exported


def compile_exported(exported: ExportedProgram, path: Path) -> None:
    """Compile for the device the program was exported on, without its weights."""
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs={"aot_inductor.package_constants_in_so": False}
        )


class CompiledForward:
    """A loaded program over the caller's weights, which live as long as it does. Promises `Forward`."""

    def __init__(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        from torch._inductor import aoti_load_package

        # Torch's guard against calls from several threads asks after events, which a capture forbids; one thread calls.
        self._program = aoti_load_package(str(path), run_single_threaded=True)
        wanted = self._program.get_constant_fqns()
        if missing := sorted(set(wanted) - set(weights)):
            raise BadConfig(f"{path}: {len(missing)} of its weights are not there, such as {missing[0]}")
        self.weights = {name: weights[name] for name in wanted}
        self._program.load_constants(self.weights, check_full_update=True, user_managed=True)

    def __call__(
        self,
        tokens_1T: Tensor,
        positions_1T: Tensor,
        token_rows_T: Tensor,
        selector_R: Tensor,
        rows_SL: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        flat = [tokens_1T, positions_1T, token_rows_T, selector_R, rows_SL, *k_pools, *v_pools]
        logits: Tensor = self._program.loader.boxed_run(flat)[0]
        return logits


def build_skeleton(checkpoint: Checkpoint, request: ProgramRequest) -> CellModel:
    """The model that `request` describes, with every weight's shape and no weight's value, on its device."""
    device, dtype = torch.device(request.device), getattr(torch, request.dtype)
    causal_lm = skeleton(checkpoint, dtype=dtype, session_tokens=request.session_tokens)
    if request.quantize == "int8":
        int8.quantize_linears(causal_lm, device=device)
    pack_linears(causal_lm, device=device)
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty_like(parameter, device=device)
            module.register_parameter(name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Those with numbers keep them: the compiler may write small ones into the program.
            persistent = name not in module._non_persistent_buffers_set
            there = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module.register_buffer(name, there, persistent=persistent)
    return CellModel(causal_lm, get_attention(request.attention))


def main(described: str, name: str, path: str) -> None:
    """One program, in this process."""
    fields = json.loads(Path(described).read_text())
    fields["layers"] = tuple(tuple(layer) for layer in fields["layers"])
    request = ProgramRequest(**fields)
    layers = [LayerGeometry(*layer) for layer in request.layers]
    model = build_skeleton(find_checkpoint(request.model), request)
    kv_dtype = getattr(torch, request.kv_dtype)
    exported = export(model, name, layers=layers, kv_dtype=kv_dtype, max_step_tokens=request.max_step_tokens)
    compile_exported(exported, Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
