"""What a device does with our methods, with nothing to download: weights are random and made on the device.

    python -m bench.gpu                                  # every model, on cuda; minutes each, most of it compilation
    python -m bench.gpu --model llama-3.2-1b --eager     # the library's own code captured, nothing compiled
    python -m bench.gpu --model toy --device cpu         # the same path where there is no GPU; claims nothing of one

Needs torch, triton and transformers; neither ray nor a network. The shapes are those of the published configurations.
Of each model, in this order, and with a non-zero exit status where a check fails:

- attention: the device's realisation against the reference, over random cells;
- right: a toy model's logits on the device against the same weights on a CPU in float32;
- captured: the widths whose methods are CUDA graphs; replayed: at every width, equal to the same program called at the
  same shape (bits), and near the library's own code (norm of the difference ÷ norm);
- memory: bytes allocated and reserved after 1000 replays, against those before;
- time of a replay per width and context, with (weights + K/V read) ÷ time as a share of the measured copy rate;
- time of the widest forward, with FLOP ÷ time as a share of the measured matrix rate;
- a whole step, sampler and host included, per width;
- a profile: the kernels that take most of a decode and of a prefill.

On a CPU methods are not captured: rows say so, rates and shares are left out, and nothing is written unless `--out`
names a folder.
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.build import assemble
from microtome.cuda_runtime.checkpoint import Checkpoint
from microtome.cuda_runtime.executor import Executor
from microtome.cuda_runtime.kv_pool import bytes_per_cell
from microtome.cuda_runtime.linear import int8
from microtome.cuda_runtime.linear.packed import pack_linears
from microtome.cuda_runtime.method import LINES, POSITIONS, ROWS, SELECTOR, TOKENS, CapturedMethod, Method
from microtome.cuda_runtime.model import CellModel, read_geometry, skeleton
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.program import (
    DECODE,
    MIN_OUTPUTS,
    PREFILL,
    CompiledForward,
    compile_exported,
    export,
)
from microtome.cuda_runtime.ready_model import ReadyModel
from microtome.cuda_runtime.start_up import StartUp
from microtome.planner.slicing import plan_ladder
from microtome.planner.types import (
    Cell,
    InputFlag,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SequenceOp,
    SetSampling,
    StepNumber,
    StepPlan,
)

OUT = Path(__file__).parents[1] / "docs" / "measured"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# Facts of the published configurations, as transformers' configuration classes take them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "toy": (
        "llama",
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA["rope_parameters"] | {"factor": 32.0},  # type: ignore[operator]
        },
    ),
    "qwen3-4b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
}
NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # norm of a difference ÷ norm
ATTENTION_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Failed(Exception):
    """A check did not hold."""


@dataclass(frozen=True)
class Scale:
    """How much of everything is done: little where a test runs it."""

    replays: int = 1000
    rounds: int = 7
    inner: int = 20  # calls in one timed round
    copy_bytes: int = 1 << 30
    matrix: int = 8192
    contexts: tuple[int, ...] = (128, 4096)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    max_step_tokens: int = 2048
    session_tokens: int = 8192


SMALL = Scale(20, 2, 2, 1 << 22, 128, (16, 64), (1, 2, 4), 32, 128)


@dataclass(frozen=True)
class Spread:
    """Of several rounds: milliseconds a call."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ms ({self.least:.3f} to {self.most:.3f})"


class Bench:
    """One device, and what was found on it."""

    def __init__(self, device: torch.device, scale: Scale) -> None:
        self.device, self.scale = device, scale
        self.on_gpu = device.type == "cuda"

    def say(self, text: str) -> None:
        print(text, flush=True)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object], inner: int | None = None) -> Spread:
        """Of `inner` calls queued one behind the other, so that a device is measured and not its launches' latency."""
        inner = inner or self.scale.inner
        call()
        found = []
        for _ in range(self.scale.rounds):
            self.wait()
            began = time.perf_counter()
            for _ in range(inner):
                call()
            self.wait()
            found.append((time.perf_counter() - began) * 1e3 / inner)
        return Spread(median(found), min(found), max(found))

    def rates(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the device reaches on its own: bytes read and written by a copy, FLOP of a square product."""
        source = torch.empty(self.scale.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = self.timed(lambda: target.copy_(source))
        size = self.scale.matrix
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        product = self.timed(lambda: a @ b, 3)
        return {
            "copy_gb_per_s": 2 * self.scale.copy_bytes / copy.least / 1e6,
            "matmul_tflop_per_s": 2 * size**3 / product.least / 1e9,
            "copy_ms": vars(copy),
            "matmul_ms": vars(product),
        }


def checkpoint_of(name: str) -> Checkpoint:
    """A checkpoint without files."""
    kind, facts = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **facts)
    return Checkpoint(
        path=Path(name),
        name=name,
        architecture=kind,
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        config=config,
    )


def random_model(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, session_tokens: int) -> nn.Module:
    """The decoder with random weights, made on the device; tied ones once; norms of 1."""
    causal_lm = skeleton(checkpoint, dtype=dtype, session_tokens=session_tokens)
    torch.manual_seed(0)
    for module in causal_lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty_like(parameter, device=device)
            # Products keep their size from layer to layer, as trained ones do.
            there.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else there.fill_(1)
            module.register_parameter(name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, buffer.to(device), persistent=persistent)
    if checkpoint.config.tie_word_embeddings:
        causal_lm.get_output_embeddings().weight = causal_lm.get_input_embeddings().weight  # type: ignore[operator]
    return causal_lm


def options_of(bench: Bench, name: str, dtype: str, quantize: str) -> RuntimeOptions:
    scale = bench.scale
    return RuntimeOptions(
        model=name,
        device=str(bench.device),
        dtype=dtype,
        quantize=quantize,
        widths=scale.widths,
        max_step_tokens=scale.max_step_tokens,
        max_sequences=max(scale.widths) + 1,
        max_session_tokens=scale.session_tokens,
        kv_tokens=(max(scale.widths) + 1) * (max(scale.contexts) + 64) + scale.max_step_tokens,
    )


def ready(
    bench: Bench, checkpoint: Checkpoint, options: RuntimeOptions, *, compiled: bool, folder: Path
) -> tuple[CellModel, ReadyModel]:
    """The library's code with our attention, and what methods are to run: that, or its programs over its weights."""
    dtype = getattr(torch, options.dtype)
    causal_lm = random_model(
        checkpoint, device=bench.device, dtype=dtype, session_tokens=options.max_session_tokens or 0
    )
    layers = read_geometry(causal_lm, bench.device)
    if options.quantize == "int8":
        int8.quantize_linears(causal_lm, device=bench.device)
    if not bench.on_gpu:
        pack_linears(causal_lm)
    model = CellModel(causal_lm, get_attention(default_attention(bench.device)))
    decode: Any = model
    prefill: Any = model
    if compiled:
        weights = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        found = []
        for name in (DECODE, PREFILL):
            path = folder / f"{checkpoint.name}-{name}.pt2"
            exported = export(
                model, name, layers=layers, kv_dtype=dtype, max_step_tokens=max(2, options.max_step_tokens)
            )
            compile_exported(exported, path)
            found.append(CompiledForward(path, weights))
        decode, prefill = found
    return model, ReadyModel(
        decode=decode,
        prefill=prefill,
        min_outputs=MIN_OUTPUTS if compiled else 1,
        layers=layers,
        name=checkpoint.name,
        fingerprint="",
        kv_dtype=dtype,
    )


def columns_of(executor: Executor, width: int, context: int, vocabulary: int) -> Tensor:
    """A decode of `width` rows, each behind `context` tokens: whose K/V is whatever the pool holds."""
    device = executor.rows.device.device
    columns = torch.zeros(LINES, width, dtype=torch.int64)
    generator = torch.Generator().manual_seed(width)
    columns[TOKENS] = torch.randint(vocabulary, (width,), generator=generator)
    columns[POSITIONS] = context
    columns[ROWS] = columns[SELECTOR] = torch.arange(width)
    return columns.to(device)


def scatter_rows(executor: Executor) -> None:
    """Every row gets cells of its own, strewn over the pool, and the pool gets numbers like a model's."""
    table, usable = executor.rows.device, executor.pool.usable_cells
    count, length = table.shape[0] - 1, table.shape[1]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(usable, generator=generator).to(torch.int32)
    each = usable // count
    for row in range(count):
        own = order[row * each : (row + 1) * each]
        table[row, : min(each, length)] = own[:length].to(table.device)
    for tensor in (*executor.pool.k, *executor.pool.v):
        tensor[:-1].normal_()


def call(forward: Any, executor: Executor, columns: Tensor) -> Tensor:
    """The program called as it is, beside every method."""
    pool = executor.pool
    lines = columns.clone()
    return forward(  # type: ignore[no-any-return]
        lines[TOKENS, None], lines[POSITIONS, None], lines[ROWS], lines[SELECTOR], executor.rows.device, pool.k, pool.v
    )


def off_by(found: Tensor, expected: Tensor) -> float:
    a, b = found.to("cpu", torch.float64), expected.to("cpu", torch.float64)
    return float((a - b).norm() / b.norm())


def check_attention(bench: Bench, dtype: torch.dtype) -> dict[str, float]:
    """The device's realisation against the reference on a CPU in float64, per case."""
    attention: Any = get_attention(default_attention(bench.device))
    reference: Any = get_attention("reference")
    generator = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}
    cases: dict[str, tuple[Sequence[tuple[int, int]], dict[str, Any]]] = {
        "decodes": ([(37 * i, 1) for i in range(20)], {}),
        "a long decode": ([(3000, 1), (5, 1)], {}),
        "mixed": ([(300, 1), (0, 200), (64, 100), (7, 1)], {}),
        "windowed and capped": ([(500, 1), (0, 130)], {"window": 100, "softcap": 20.0}),
        "sinks": ([(500, 1), (0, 130)], {"window": 128, "sinks": True}),
    }
    heads, kv_heads, size = 8, 2, 64
    for name, (inputs, wants) in cases.items():
        positions = torch.cat([torch.arange(start, start + width) for start, width in inputs]).to(torch.int32)
        token_rows = torch.cat([torch.full((width,), i) for i, (_, width) in enumerate(inputs)]).to(torch.int32)
        longest, tokens = max(start + width for start, width in inputs), len(positions)
        cells = len(inputs) * longest
        rows = torch.randperm(cells, generator=generator).view(len(inputs), longest).to(torch.int32)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        q, k, v = normal(tokens, heads, size), normal(tokens, kv_heads, size), normal(tokens, kv_heads, size)
        pools = normal(cells + 1, kv_heads, size), normal(cells + 1, kv_heads, size)
        keywords: dict[str, Any] = {
            "scale": size**-0.5,
            "window": wants.get("window", 0),
            "softcap": wants.get("softcap", 0.0),
        }
        sinks = torch.randn(heads, generator=generator) if wants.get("sinks") else None
        wide: list[Any] = [tensor.double() for tensor in (q, k, v, *pools)]
        expected = reference.update_and_attend(
            *wide, rows, token_rows, positions, **keywords, sinks_N=None if sinks is None else sinks.double()
        )
        there: list[Any] = [tensor.to(bench.device) for tensor in (q, k, v, *pools, rows, token_rows, positions)]
        given_sinks = None if sinks is None else sinks.to(dtype).to(bench.device)
        out = attention.update_and_attend(*there, **keywords, sinks_N=given_sinks)
        found[name] = float((out.to("cpu", torch.float64) - expected).abs().max() / expected.abs().max())
        if not found[name] <= ATTENTION_NEAR[dtype]:
            raise Failed(f"attention, {name}, {dtype}: off by {found[name]:.2g}, {ATTENTION_NEAR[dtype]:g} at most")
    return found


def check_toy(bench: Bench, *, compiled: bool, quantize: str, folder: Path) -> dict[str, float]:
    """A toy model's logits on the device, at every width, against the same weights on a CPU in float32."""
    checkpoint = checkpoint_of("toy")
    options = options_of(bench, "toy", "float32", quantize)
    theirs, here = ready(bench, checkpoint, options, compiled=compiled, folder=folder)
    executor = made(bench, checkpoint, options, here)
    scatter_rows(executor)
    host = random_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, session_tokens=4096)
    if quantize == "int8":
        int8.quantize_linears(host, device=torch.device("cpu"))
    state = {name: tensor.cpu() for name, tensor in theirs.causal_lm.state_dict().items()}
    if bench.on_gpu and quantize != "int8":  # made on the device: another generator's numbers
        host.load_state_dict(state)
    on_cpu = CellModel(host, get_attention("reference"))
    found: dict[str, float] = {}
    if bench.on_gpu and quantize == "int8":
        return found  # whose numbers lie otherwise there; `replayed` and the kernel's own tests speak for it
    for method in executor.methods:
        width = method.spec.max_tokens if method.spec.static else min(method.spec.max_tokens, executor.rows.padding_row)
        columns = columns_of(executor, width, min(bench.scale.contexts), checkpoint.vocab_size)
        pools = [[tensor.to("cpu", copy=True) for tensor in side] for side in (executor.pool.k, executor.pool.v)]
        got = method.run(columns, width)[:width]
        lines = columns.cpu()
        expected = on_cpu(
            lines[TOKENS, None],
            lines[POSITIONS, None],
            lines[ROWS],
            lines[SELECTOR],
            executor.rows.device.cpu(),
            *pools,
        )
        found[method.spec.name] = off_by(got, expected)
        if not found[method.spec.name] <= NEAR[torch.float32]:
            raise Failed(f"toy, {method.spec.name}: logits are off by {found[method.spec.name]:.2g}")
    return found


def made(bench: Bench, checkpoint: Checkpoint, options: RuntimeOptions, model: ReadyModel) -> Executor:
    with torch.inference_mode():
        return assemble(
            options,
            model,
            device=bench.device,
            context_length=checkpoint.context_length,
            vocab_size=checkpoint.vocab_size,
            start_up=StartUp(),
        )


def check_replays(
    bench: Bench, executor: Executor, theirs: CellModel, here: ReadyModel, vocabulary: int, dtype: torch.dtype
) -> dict[str, Any]:
    static = [method for method in executor.methods if method.spec.static]
    captured = [method.spec.max_tokens for method in static if isinstance(method, CapturedMethod)]
    if bench.on_gpu and captured != list(bench.scale.widths):
        raise Failed(f"captured widths are {captured}, not {list(bench.scale.widths)}")
    near: dict[str, float] = {}
    for method in static:
        width = method.spec.max_tokens
        columns = columns_of(executor, width, max(bench.scale.contexts), vocabulary)
        replayed = method.run(columns, width)[:width].clone()
        direct = call(here.decode if width == 1 else here.prefill, executor, columns)
        if not torch.equal(replayed, direct[:width]):
            raise Failed(f"{method.spec.name}: its replay is not its program's result: {off_by(replayed, direct):.2g}")
        near[method.spec.name] = off_by(replayed, call(theirs, executor, columns))
        if not near[method.spec.name] <= NEAR[dtype]:
            raise Failed(f"{method.spec.name}: off by {near[method.spec.name]:.2g} from the library's code")
    return {"captured_widths": captured, "replay_equals_program": True, "off_library_code": near}


def check_memory(bench: Bench, executor: Executor, vocabulary: int) -> dict[str, Any]:
    """Memory of the device before and after many replays in turns, and so of none that grows with them."""
    if not bench.on_gpu:
        return {"replays": 0, "grown_bytes": None}
    given = [
        (method, columns_of(executor, method.spec.max_tokens, max(bench.scale.contexts), vocabulary))
        for method in executor.methods
        if method.spec.static
    ]
    before = 0, 0
    for turn in range(bench.scale.replays + 10):
        if turn == 10:
            bench.wait()
            before = torch.cuda.memory_allocated(bench.device), torch.cuda.memory_reserved(bench.device)
        method, columns = given[turn % len(given)]
        method.run(columns, method.spec.max_tokens)
    bench.wait()
    after = torch.cuda.memory_allocated(bench.device), torch.cuda.memory_reserved(bench.device)
    if after != before:
        raise Failed(f"{bench.scale.replays} replays took memory: {before} bytes before, {after} after")
    return {"replays": bench.scale.replays, "grown_bytes": 0}


def weight_bytes(model: CellModel) -> int:
    """Of what a token's forward reads of the weights: all but an embedding's table, of which it reads one line.

    A table that is also the last layer's weight is read as that.
    """
    embedding = model.causal_lm.get_input_embeddings()  # type: ignore[operator]
    held = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    head = model.causal_lm.get_output_embeddings()  # type: ignore[operator]
    if getattr(head, "weight", None) is not embedding.weight:
        held.pop(embedding.weight.data_ptr(), None)
    return sum(tensor.nbytes for tensor in held.values())


def prefill_flop(checkpoint: Checkpoint, tokens: int, outputs: int) -> int:
    """Multiplications and additions of a prompt's forward from position 0: layers, attention, and logits of a few."""
    c = checkpoint.config
    heads, size = c.num_attention_heads, c.head_dim
    layer = c.hidden_size * size * (2 * heads + 2 * c.num_key_value_heads) + 3 * c.hidden_size * c.intermediate_size
    seen = tokens * (tokens + 1) // 2
    in_layers = c.num_hidden_layers * (layer * tokens + 2 * heads * size * seen)
    return int(2 * (in_layers + outputs * c.hidden_size * c.vocab_size))


def measure_decode(
    bench: Bench, executor: Executor, theirs: CellModel, here: ReadyModel, vocabulary: int, rates: dict[str, Any]
) -> list[dict[str, Any]]:
    weights, cell = weight_bytes(theirs), bytes_per_cell(here.layers, here.kv_dtype)
    found = []
    for context in bench.scale.contexts:
        for method in executor.methods:
            if not method.spec.static:
                continue
            width = method.spec.max_tokens
            columns = columns_of(executor, width, context, vocabulary)
            took = bench.timed(lambda method=method, columns=columns, width=width: method.run(columns, width))  # type: ignore[misc]
            moved = weights + width * (context + 1) * cell
            row = {"width": width, "context": context, "ms": vars(took), "bytes": moved}
            if bench.on_gpu:
                row["share_of_copy_rate"] = moved / took.middle / 1e6 / rates["copy_gb_per_s"]
            found.append(row)
            share = f", {row['share_of_copy_rate']:.0%} of the copy rate" if bench.on_gpu else ""
            bench.say(f"  decode, {width} rows behind {context} tokens: {took}{share}")
    return found


def measure_prefill(
    bench: Bench, executor: Executor, checkpoint: Checkpoint, rates: dict[str, Any]
) -> dict[str, Any] | None:
    method = executor.methods[-1]
    if method.spec.static:
        return None
    tokens = method.spec.max_tokens
    columns = torch.zeros(LINES, tokens, dtype=torch.int64, device=bench.device)
    columns[POSITIONS] = torch.arange(tokens, device=bench.device)
    columns[SELECTOR] = tokens - 1
    took = bench.timed(lambda: method.run(columns, 1), 3)
    flop = prefill_flop(checkpoint, tokens, max(1, method.spec.min_rows))
    row = {"tokens": tokens, "ms": vars(took), "flop": flop}
    if bench.on_gpu:
        row["share_of_matmul_rate"] = flop / took.middle / 1e9 / rates["matmul_tflop_per_s"]
    share = f", {row['share_of_matmul_rate']:.0%} of the matrix rate" if bench.on_gpu else ""
    bench.say(f"  prefill of {tokens}: {took}{share}")
    return row


class Decoder:
    """Whole steps of an executor: `width` sequences of `context` tokens, each fed back what it sampled."""

    def __init__(self, executor: Executor, width: int, context: int, first_step: int) -> None:
        self._executor, self._capability = executor, executor.describe()
        self._sequences = list(range(width))
        cells = iter(range(self._capability.usable_cells))
        self._histories = [[Cell(next(cells)) for _ in range(context)] for _ in self._sequences]
        self._spare = list(cells)
        self._length, self._step, self._fed_back = context, first_step, False

    def step(self) -> int:
        """One step; its microseconds, as the executor counts them."""
        width = len(self._sequences)
        flags = InputFlag.WANTS_OUTPUT | (InputFlag.FEEDBACK if self._fed_back else InputFlag(0))
        forwards = plan_ladder(width, self._capability.table)
        ops: list[SequenceOp] = []
        if not self._fed_back:
            for sequence, history in zip(map(SequenceId, self._sequences), self._histories, strict=True):
                ops += [OpenSequence(sequence, tuple(history)), SetSampling(sequence, SamplingParams())]
        plan = StepPlan(
            incarnation=self._capability.incarnation,
            step=StepNumber(self._step),
            table_digest=self._capability.table.digest,
            ops=tuple(ops),
            sequences=self._sequences,
            starts=[self._length] * width,
            widths=[1] * width,
            flags=[int(flags)] * width,
            cells=[self._spare.pop() for _ in self._sequences],
            tokens=[] if self._fed_back else [1] * width,
            slice_offsets=[forward.offset for forward in forwards],
            slice_lengths=[forward.length for forward in forwards],
            slice_methods=[forward.method for forward in forwards],
        )
        result = self._executor.run(plan)
        self._length, self._step, self._fed_back = self._length + 1, self._step + 1, True
        return result.step_us


def measure_steps(bench: Bench, make: Callable[[], Executor]) -> dict[str, Any]:
    """Of whole steps at the widest width: the executor's own microseconds, smallest and middle."""
    decoder = Decoder(make(), max(bench.scale.widths), min(bench.scale.contexts), 1)
    decoder.step()
    found = sorted(decoder.step() for _ in range(min(32, bench.scale.replays)))
    row = {"width": max(bench.scale.widths), "step_us_middle": median(found), "step_us_least": found[0]}
    bench.say(f"  a whole step of {row['width']} rows: {row['step_us_middle']:.0f} µs ({found[0]} at least)")
    return row


def profile(bench: Bench, method: Method, columns: Tensor) -> list[dict[str, Any]]:
    """The operators or kernels that take most, of a few forwards."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(5):
            method.run(columns, 1)
        bench.wait()
    own = "self_device_time_total" if bench.on_gpu else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, own))
    return [
        {"name": event.key[:80], "calls": event.count, "us": round(getattr(event, own))}
        for event in events[:12]
        if getattr(event, own) > 0
    ]


def run_model(bench: Bench, name: str, *, dtype: str, compiled: bool, quantize: str, folder: Path) -> dict[str, Any]:
    """All of one model. Raises `Failed`."""
    checkpoint, options = checkpoint_of(name), options_of(bench, name, dtype, quantize)
    bench.say(f"{name}, {dtype}, {'compiled' if compiled else 'eager'}, quantize {quantize}")
    began = time.perf_counter()
    theirs, here = ready(bench, checkpoint, options, compiled=compiled, folder=folder)
    executor = made(bench, checkpoint, options, here)
    started_s = time.perf_counter() - began
    scatter_rows(executor)
    rates = bench.rates(getattr(torch, dtype))
    if bench.on_gpu:
        bench.say(f"  copy {rates['copy_gb_per_s']:.0f} GB/s, product {rates['matmul_tflop_per_s']:.0f} TFLOP/s")
    vocabulary = checkpoint.vocab_size
    found: dict[str, Any] = {"model": name, "dtype": dtype, "methods": "compiled" if compiled else "eager"}
    found |= {"quantize": quantize, "start_s": started_s, "weight_bytes": weight_bytes(theirs)}
    found["pool_cells"] = executor.pool.usable_cells
    found["replays"] = check_replays(bench, executor, theirs, here, vocabulary, getattr(torch, dtype))
    found["memory"] = check_memory(bench, executor, vocabulary)
    if bench.on_gpu:
        found["rates"] = rates
    found["decode"] = measure_decode(bench, executor, theirs, here, vocabulary, rates)
    found["prefill"] = measure_prefill(bench, executor, checkpoint, rates)
    static = [method for method in executor.methods if method.spec.static]
    narrow = columns_of(executor, static[0].spec.max_tokens, min(bench.scale.contexts), vocabulary)
    found["profile"] = {"decode": profile(bench, static[0], narrow)}
    if not executor.methods[-1].spec.static:
        wide = columns_of(executor, max(bench.scale.widths), min(bench.scale.contexts), vocabulary)
        found["profile"]["prefill"] = profile(bench, executor.methods[-1], wide)
    found["step"] = measure_steps(bench, lambda: executor)
    return found


def machine_of(bench: Bench, command: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if not bench.on_gpu:
        return facts | {"device": f"CPU ({platform.machine()}), no GPU", "captured": False}
    import triton

    properties = torch.cuda.get_device_properties(bench.device)
    return facts | {
        "device": properties.name,
        "captured": True,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def markdown_rows(machine: dict[str, Any], models: Sequence[dict[str, Any]]) -> list[str]:
    """A row per model. Where nothing was captured, it says so and holds no figure."""
    rows = []
    for found in models:
        what = f"{found['model']}, {found['dtype']}, {found['methods']}, quantize {found['quantize']}"
        head = f"| {machine['date']} | {machine['device']} | {what} | `{machine['command']}` |"
        if not machine["captured"]:
            rows.append(f"{head} checks passed; methods were not captured, so these are no figures of a GPU | | | |")
            continue
        cells = []
        first = found["decode"][0]
        for row in found["decode"]:
            if row["width"] == first["width"]:
                ms = row["ms"]
                cells.append(
                    f"{row['share_of_copy_rate']:.0%} at {row['context']} ({ms['middle']:.2f} ms, "
                    f"{ms['least']:.2f} to {ms['most']:.2f})"
                )
        prefill = found["prefill"]
        share = "" if prefill is None else f"{prefill['share_of_matmul_rate']:.0%} ({prefill['ms']['middle']:.1f} ms)"
        captured = ", ".join(map(str, found["replays"]["captured_widths"]))
        rows.append(
            f"{head} captured at {captured}; replays equal; {found['memory']['replays']} replays, no growth "
            f"| {'; '.join(cells)} | {share} | {found['step']['step_us_middle']:.0f} µs |"
        )
    return rows


HEADER = """\
# Measured on GPUs

Written by `python -m bench.gpu`: weights are random, in the shapes of the models named. A decode's share is
(weights + K/V read) ÷ time ÷ the rate of a copy on the same device; a prefill's is FLOP ÷ time ÷ the rate of a square
product. Medians of rounds, least and most in parentheses.

| date | device | model | command | checks | one row's decode | prefill | a whole step, widest |
|---|---|---|---|---|---|---|---|
"""


def write(folder: Path, machine: dict[str, Any], report: dict[str, Any]) -> tuple[Path, Path]:
    """The JSON anew, the rows behind those of earlier runs."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in machine["device"].lower()).strip("-")
    kind = "gpu" if machine["captured"] else "no-gpu"
    figures, page = folder / f"{kind}-{slug}.json", folder / f"{kind}.md"
    figures.write_text(json.dumps(report, indent=1) + "\n")
    before = page.read_text() if page.exists() else HEADER
    page.write_text(before + "".join(row + "\n" for row in markdown_rows(machine, report["models"])))
    return figures, page


def main(words: Sequence[str] | None = None, scale: Scale | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="again for more; all but the toy by default")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    parser.add_argument("--eager", action="store_true", help="capture the library's own code; compile nothing")
    parser.add_argument("--out", type=Path, help="a folder; docs/measured by default, on a GPU")
    asked = parser.parse_args(words)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: --device cpu --model toy runs the same path without its figures")
        return 2
    bench = Bench(device, scale or (Scale() if device.type == "cuda" else SMALL))
    if not bench.on_gpu:
        bench.say("no GPU: methods are not captured, and no figure below is one of a GPU")
    command = shlex.join(["python", "-m", "bench.gpu", *(sys.argv[1:] if words is None else words)])
    machine = machine_of(bench, command)
    report: dict[str, Any] = {"machine": machine, "models": []}
    try:
        with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            kinds = (torch.float32, torch.bfloat16) if bench.on_gpu else (torch.float32,)
            report["attention"] = {str(kind): check_attention(bench, kind) for kind in kinds}
            bench.say(f"attention ({default_attention(device)}) against the reference: {report['attention']}")
            report["toy"] = check_toy(bench, compiled=not asked.eager, quantize=asked.quantize, folder=folder)
            bench.say(f"a toy's logits against float32 on a CPU: {report['toy']}")
            for name in asked.model or [name for name in MODELS if name != "toy"]:
                found = run_model(
                    bench,
                    name,
                    dtype=asked.dtype,
                    compiled=not asked.eager,
                    quantize=asked.quantize,
                    folder=folder,
                )
                report["models"].append(found)
                if bench.on_gpu:
                    torch.cuda.empty_cache()
    except Failed as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1
    out = asked.out or (OUT if bench.on_gpu else None)
    if out is not None:
        for path in write(out, machine, report):
            bench.say(f"written: {path}")
    for row in markdown_rows(machine, report["models"]):
        bench.say(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
