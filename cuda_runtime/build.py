"""From options to an executor that is ready: load, size, allocate, warm up, measure, in this order and once."""

import logging
import platform
import uuid
from pathlib import Path

import torch
from torch import Tensor

from microtome.cuda_runtime import sampler
from microtome.cuda_runtime.artifact import is_artifact
from microtome.cuda_runtime.checkpoint import find_checkpoint, fingerprint
from microtome.cuda_runtime.device_holders import check_unheld
from microtome.cuda_runtime.executor import Executor
from microtome.cuda_runtime.kv_pool import KvPool, allocate_pool, size_pool
from microtome.cuda_runtime.measure import measured
from microtome.cuda_runtime.method import (
    CapturedMethod,
    DynamicMethod,
    Method,
    Program,
    StaticMethod,
)
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.program import Forward
from microtome.cuda_runtime.ready_model import ReadyModel, make_artifact, ready_model, target_of
from microtome.cuda_runtime.rows import RowTable
from microtome.cuda_runtime.start_up import StartUp
from microtome.planner.errors import BadConfig
from microtome.planner.types import Capability, Cell, Incarnation, MethodSpec, MethodTable

_log = logging.getLogger("microtome.runtime")


def build(options: RuntimeOptions) -> Executor:
    """An executor over an empty pool. Raises `BadConfig` for what cannot work. Takes seconds to minutes."""
    start_up = StartUp()
    checkpoint = find_checkpoint(options.model)
    target = target_of(options)
    device = target.device
    if device.type == "cuda" and not options.shared_device:
        check_unheld(_device_uuid(device))
    if device.type == "cuda":
        # Of this thread: programs are loaded to the current device, and captured there.
        torch.cuda.set_device(device.index or 0)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = ready_model(options, checkpoint, target, start_up)
    executor = assemble(
        options,
        model,
        device=device,
        context_length=checkpoint.context_length,
        vocab_size=checkpoint.vocab_size,
        start_up=start_up,
    )
    _log.info("ready: %s", start_up)
    return executor


def assemble(
    options: RuntimeOptions,
    model: ReadyModel,
    *,
    device: torch.device,
    context_length: int,
    vocab_size: int,
    start_up: StartUp,
) -> Executor:
    """An executor of `model`, which is on `device`: pool, methods and their costs. Raises `BadConfig`."""
    with start_up.stage("pool"):
        size = size_pool(
            model.layers,
            device=device,
            dtype=model.kv_dtype,
            kv_tokens=options.kv_tokens,
            memory_fraction=options.memory_fraction,
            at_least=max(options.widths[-1], options.max_step_tokens),
        )
        pool = allocate_pool(model.layers, size.usable_cells, device=device, dtype=model.kv_dtype)
        _log.info("room for %d tokens: %s", size.usable_cells, size.reason)
        max_session_tokens = min(options.max_session_tokens or context_length, context_length, pool.usable_cells)
        rows = RowTable(options.max_sequences, max_session_tokens, pool.scratch_cell, device)
    with start_up.stage("capture"):
        methods = _methods(options, model, rows, pool, device)
    with start_up.stage("warm-up"):
        sampler.prepare(device)
        table = MethodTable(measured(methods, rows))
    capability = Capability(
        incarnation=Incarnation(uuid.uuid4().hex),
        device=_device_name(device),
        device_uuid=_device_uuid(device),
        model=model.name,
        fingerprint=model.fingerprint,
        vocab_size=vocab_size,
        usable_cells=pool.usable_cells,
        scratch_cell=Cell(pool.scratch_cell),
        max_sequences=options.max_sequences,
        max_session_tokens=max_session_tokens,
        windows=tuple(sorted({layer.window for layer in model.layers})),
        table=table,
        max_output_rows=options.max_sequences,
    )
    return Executor(capability=capability, methods=methods, rows=rows, pool=pool)


def method_specs(options: RuntimeOptions, min_outputs: int = 1) -> tuple[MethodSpec, ...]:
    """The ladder the options ask for, ascending by width; the dynamic method only where it is the widest."""
    specs = [MethodSpec(name=f"forward_{width}", max_tokens=width, static=True) for width in options.widths]
    if options.max_step_tokens > options.widths[-1]:
        specs.append(
            MethodSpec(
                name="forward_others",
                max_tokens=options.max_step_tokens,
                static=False,
                min_tokens=options.min_prefill_tokens,
                min_rows=min_outputs,
            )
        )
    return tuple(specs)


def _methods(
    options: RuntimeOptions, model: ReadyModel, rows: RowTable, pool: KvPool, device: torch.device
) -> list[Method]:
    decode, prefill = (_program(forward, rows, pool) for forward in (model.decode, model.prefill))
    methods: list[Method] = []
    captured: list[CapturedMethod] = []
    for spec in method_specs(options, model.min_outputs):
        program = decode if spec.max_tokens == 1 else prefill
        if not spec.static:
            methods.append(DynamicMethod(spec, program))
        elif device.type == "cuda":
            captured.append(CapturedMethod(spec, program, device, rows.padding_row))
            methods.append(captured[-1])
        else:
            methods.append(StaticMethod(spec, program, device))
    if captured:
        graph_pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for method in reversed(captured):  # the widest first: the others fit into its memory
                method.capture(graph_pool)
    return methods


def _program(forward: Forward, rows: RowTable, pool: KvPool) -> Program:
    def program(tokens_1N: Tensor, positions_1N: Tensor, rows_N: Tensor, selector_R: Tensor) -> Tensor:
        return forward(tokens_1N, positions_1N, rows_N, selector_R, rows.device, pool.k, pool.v)

    return program


def export(options: RuntimeOptions, path: Path) -> StartUp:
    """Make an artifact of the model at `path`; where its time went. Raises `BadConfig`."""
    start_up = StartUp()
    checkpoint = find_checkpoint(options.model)
    if is_artifact(checkpoint.path):
        raise BadConfig(f"model {checkpoint.path} is an artifact already")
    target = target_of(options)
    with start_up.stage("fingerprint"):
        content = fingerprint(checkpoint)
    make_artifact(path, options, checkpoint, content, target, start_up)
    return start_up


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def _device_uuid(device: torch.device) -> str:
    return platform.node() if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
