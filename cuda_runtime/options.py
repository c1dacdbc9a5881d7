"""What an operator may choose about one device's runtime. Values only; the checks are here, the meaning elsewhere."""

import math
from dataclasses import dataclass

from microtome.planner.errors import BadConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "float8_e4m3")
QUANTIZATIONS = ("auto", "none", "int8")
METHODS = ("auto", "compiled", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Checked when built: raises `BadConfig` naming the value and the limit."""

    model: str  # a local Hugging Face directory or a .gguf file
    device: str = "cpu"  # "cpu", "cuda" or "cuda:0": a worker sees one device
    dtype: str = "auto"  # of weights and activations; auto: float32 on a CPU, bfloat16 on CUDA
    kv_dtype: str = "auto"  # of cells; float8_e4m3 too, which takes less room and rounds more; auto: as dtype
    quantize: str = "auto"  # of linear layers' weights: int8 or none; auto: as an artifact has it, else none
    kv_tokens: int | None = None  # cells of the pool; None: from free memory
    memory_fraction: float = 0.9  # of the memory free after loading, for the pool
    max_step_tokens: int = 512  # the dynamic method's widest forward
    min_prefill_tokens: int = 2  # the dynamic method's narrowest forward
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of the static methods
    max_sequences: int = 1024  # live at once
    max_session_tokens: int | None = None  # None: the model's context length, as far as the pool holds it
    shared_device: bool = False  # a CUDA device may be held by other processes too; else it is refused
    threads: int | None = None  # of torch on a CPU; None: as torch finds it
    methods: str = "auto"  # eager, compiled (on first use), or auto: compiled where that was done before
    artifact_folder: str | None = None  # where what was compiled is kept; None: in the user's cache directory

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda") and not self.device.removeprefix("cuda:").isdecimal():
            raise BadConfig(f"device {self.device!r} is none of cpu, cuda, cuda:N")
        if self.dtype not in DTYPES:
            raise BadConfig(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise BadConfig(f"kv_dtype {self.kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
        if self.quantize not in QUANTIZATIONS:
            raise BadConfig(f"quantize {self.quantize!r} is none of {', '.join(QUANTIZATIONS)}")
        if self.methods not in METHODS:
            raise BadConfig(f"methods {self.methods!r} is none of {', '.join(METHODS)}")
        for name in ("kv_tokens", "max_session_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(f"{name} {value} is below 1")
        for name in ("max_step_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} {getattr(self, name)} is below 1")
        if not (math.isfinite(self.memory_fraction) and 0 < self.memory_fraction <= 1):
            raise BadConfig(f"memory_fraction {self.memory_fraction} is not in (0, 1]")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise BadConfig(f"widths {self.widths} are not one or more ascending positive numbers")
        if self.min_prefill_tokens < 2:
            raise BadConfig(f"min_prefill_tokens {self.min_prefill_tokens} is below 2")
        if self.max_step_tokens > self.widths[-1] and self.min_prefill_tokens > self.widths[-1] + 1:
            raise BadConfig(
                f"min_prefill_tokens {self.min_prefill_tokens} leaves a gap above the widest static width "
                f"{self.widths[-1]}: it may be {self.widths[-1] + 1} at most"
            )
        if self.kv_tokens is not None and self.kv_tokens < max(self.widths[-1], self.max_step_tokens):
            raise BadConfig(
                f"kv_tokens {self.kv_tokens} is below the widest step {max(self.widths[-1], self.max_step_tokens)}"
            )
