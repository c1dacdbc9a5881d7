"""Who takes part: each engine's environment, module and model, as `install.sh` puts them under one folder."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from platformdirs import user_cache_path

HOME_VARIABLE = "PEERS_HOME"
OURS, OURS_SERVED, OURS_INT8 = "microtome", "microtome-served", "microtome-int8"
DTYPES = ("bfloat16", "float32")
MODEL = "models/smollm2-135m"

# On a CPU vLLM wants both in front of everything else.
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
VLLM_OPENMP = "vllm/lib/libiomp5.so"


@dataclass(frozen=True)
class Engine:
    """One engine under one set of settings. Paths are within the peers' folder; `python` empty: ours."""

    name: str
    title: str
    module: str  # of bench.peer_engines
    model: Callable[[str], str]  # by dtype
    python: str = ""
    server: str = ""  # what its module starts
    dtypes: tuple[str, ...] = DTYPES  # in whose comparison it takes part
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)  # in its own names
    preloads: bool = False  # what vLLM wants
    stays: bool = True  # its process lives from the first round to the last; else it is new in each

    def missing(self, home: Path) -> Path | None:
        """What it needs and is not there."""
        needed = (self.python, self.server, *(self.model(dtype) for dtype in self.dtypes))
        return next((home / path for path in needed if path and not (home / path).exists()), None)

    def command(self, home: Path) -> list[str]:
        return [str(home / self.python) if self.python else sys.executable, "-m", f"bench.peer_engines.{self.module}"]

    def asked(self, home: Path, dtype: str, cores: tuple[int, ...], settings: Mapping[str, object]) -> dict[str, str]:
        """Its process's environment, beside the bench's own."""
        asked = {
            "BENCH_MODEL": str(home / self.model(dtype)),
            "BENCH_DTYPE": dtype,
            "BENCH_SETTINGS": json.dumps({**self.settings, **settings}),
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }
        if self.preloads:
            libraries = [str(path) for path in (TCMALLOC, home / VLLM_OPENMP) if path.exists()]
            asked["BENCH_SERVER_PRELOAD" if self.server else "LD_PRELOAD"] = ":".join(libraries)
            asked["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        if self.server:
            asked["BENCH_SERVER"] = str(home / self.server)
        return asked


def _checkpoint(dtype: str) -> str:
    return MODEL


def _gguf(kind: str) -> Callable[[str], str]:
    return lambda dtype: f"{MODEL}.{kind}.gguf"


_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

ENGINES = (
    Engine(OURS, "Microtome, in process", "microtome_in_process", _checkpoint),
    # New in each round: Ray's own processes are never quite idle, and would cost the others.
    Engine(OURS_SERVED, "Microtome, through Ray and gRPC", "microtome_served", _checkpoint, stays=False),
    Engine(
        OURS_INT8,
        "Microtome, in process, weights of 8 bits",
        "microtome_in_process",
        _checkpoint,
        dtypes=("bfloat16",),
        settings={"runtime.quantize": "int8"},
    ),
    Engine(
        "vllm",
        "vLLM, in process",
        "vllm_in_process",
        _checkpoint,
        python="vllm/bin/python",
        environment=_VLLM,
        preloads=True,
    ),
    Engine(
        "vllm-served",
        "vLLM's server",
        "vllm_served",
        _checkpoint,
        server="vllm/bin/python",
        environment={name: value for name, value in _VLLM.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
        preloads=True,
    ),
    Engine(
        "openvino",
        "OpenVINO GenAI, in process",
        "openvino_in_process",
        lambda dtype: "ovmodel-fp16",
        python="ov/bin/python",
    ),
    Engine(
        "transformers",
        "transformers' continuous batching",
        "transformers_in_process",
        _checkpoint,
        python="hf/bin/python",
    ),
    *(
        Engine(
            f"llama-{kind.lower()}",
            f"llama.cpp's server, {kind}",
            "llama_served",
            _gguf(kind),
            server="llamabin/llama-server",
            dtypes=("bfloat16",),
        )
        for kind in ("BF16", "Q8_0", "Q4_1")
    ),
    Engine(
        "onnxruntime",
        "onnxruntime-genai, in process",
        "onnxruntime_in_process",
        lambda dtype: "ort-fp32",
        python="ort/bin/python",
        dtypes=("float32",),
    ),
)
LIMITS = Engine("limits", "the machine", "limits", _checkpoint)

SETS = {
    "main": (OURS, OURS_SERVED, "vllm", "openvino"),
    "rest": (OURS, OURS_INT8, "vllm-served", "transformers", "llama-bf16", "llama-q8_0", "llama-q4_1", "onnxruntime"),
    "all": tuple(engine.name for engine in ENGINES),
}


def peers_home() -> Path:
    return Path(os.environ.get(HOME_VARIABLE) or user_cache_path("microtome-peers"))


def chosen(names: str) -> tuple[Engine, ...]:
    """Of a set's name, or engines' names with commas between. Raises ValueError naming what is unknown."""
    wanted = SETS.get(names) or tuple(names.split(","))
    by_name = {engine.name: engine for engine in ENGINES}
    if unknown := [name for name in wanted if name not in by_name]:
        raise ValueError(f"engine {unknown[0]!r} is none of {', '.join([*SETS, *by_name])}")
    return tuple(by_name[name] for name in wanted)
