"""The one place where a realisation of attention has its name.

A realisation is loaded on first use, since one compiles C++ and another imports Triton; later calls get the same one.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType

import torch

from microtome.cuda_runtime.attention import cpu, cpu_native, reference, torch_operator
from microtome.cuda_runtime.attention.seam import Attention
from microtome.planner.errors import BadConfig

logger = logging.getLogger(__name__)


def _reference() -> Attention:
    return torch_operator.build("reference", reference.write_cells, reference.attend)


def _cpu() -> Attention:
    return torch_operator.build("cpu", cpu.write_cells, cpu.attend)


def _cpu_native() -> Attention:
    get_attention("cpu")  # takes over what the native one does not do
    return cpu_native.load()


def _triton() -> Attention:
    if find_spec("triton") is None:
        raise BadConfig("attention 'triton' needs the package triton, which PyTorch's CUDA builds bring; it is missing")
    return import_module("microtome.cuda_runtime.attention.triton_attention").load()  # type: ignore[no-any-return]


REALISATIONS: Mapping[str, Callable[[], Attention]] = MappingProxyType(
    {
        "reference": _reference,
        "cpu": _cpu,
        "cpu_native": _cpu_native,
        "triton": _triton,
    }
)


@cache
def get_attention(name: str) -> Attention:
    """The realisation called `name`; raises `BadConfig` where there is none, or where it cannot run here."""
    if name not in REALISATIONS:
        raise BadConfig(f"attention {name!r} is not known; known are {', '.join(REALISATIONS)}")
    return REALISATIONS[name]()


def default_attention(device: torch.device) -> str:
    """The name of the fastest realisation that runs on `device`. On a CPU this may take a compiler's seconds, once."""
    if device.type == "cuda":
        return "triton"
    if device.type != "cpu":
        return "reference"
    try:
        cpu_native.build()
    except BadConfig as problem:
        logger.warning("attention over cells runs on stock operators, which are slower: %s", problem)
        return "cpu"
    return "cpu_native"
