"""Builds the native operator with the machine's own compiler, once, and keeps it in the user's cache.

The file's name is a digest of the sources, the compiler, its flags, torch's version and the CPU's features, so that a
cache shared by unlike machines never hands out code the machine cannot run. Two processes that build at once end with
one file: it is written beside its place and moved there.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch.utils.cpp_extension import include_paths

from microtome.planner.errors import BadConfig

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("g++", "c++", "clang++")
KERNEL_FLAGS = ("-O3", "-fopenmp")
BINDING_FLAGS = ("-O2",)
# Hidden, so that two such libraries in one process never share a name; -w: GCC's own vector headers trip its
# uninitialised-value warning.
SHARED_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")


def find_compiler() -> str | None:
    """The path of a C++ compiler, None where there is none."""
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    return None


def build_library(*, cache_folder: Path | None = None, march: str = "native") -> Path:
    """The built library, from the cache (default: the user's) or the compiler. Raises `BadConfig` where neither can.

    `march` names the instruction set that the kernels may use, as the compiler names it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BadConfig(f"attention 'cpu_native' needs a C++ compiler; none of {', '.join(COMPILERS)} is on the path")
    folder = cache_folder or user_cache_path("microtome") / "native"
    library = folder / f"attention-{_digest(compiler, march)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = _compile(compiler, march, Path(scratch))
            os.replace(built, library)
    return library


def _compile(compiler: str, march: str, scratch: Path) -> Path:
    includes = [flag for path in include_paths() for flag in ("-isystem", path)]
    kernels, binding, library = scratch / "kernels.o", scratch / "binding.o", scratch / "attention.so"
    torch_libraries = str(Path(torch.__file__).parent / "lib")
    kernel_flags = (*SHARED_FLAGS, *KERNEL_FLAGS, f"-march={march}")
    compile_kernels = [compiler, *kernel_flags, "-c", str(SOURCES / "kernels.cpp")]
    compile_binding = [compiler, *SHARED_FLAGS, *BINDING_FLAGS, *includes, "-c", str(SOURCES / "binding.cpp")]
    _run_all([[*compile_kernels, "-o", str(kernels)], [*compile_binding, "-o", str(binding)]])
    # torch has its own OpenMP runtime loaded by the time this library is; the name is the same, so both share threads.
    link = [compiler, "-shared", str(kernels), str(binding), "-fopenmp", f"-L{torch_libraries}", "-lc10", "-ltorch_cpu"]
    _run_all([[*link, "-o", str(library)]])
    return library


def _run_all(commands: list[list[str]]) -> None:
    """Run side by side; raises `BadConfig` with the first complaint of a compiler that fails."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    complaints = [process.communicate()[1] for process in running]  # waits for every one of them
    for command, process, complaint in zip(commands, running, complaints, strict=True):
        if process.returncode != 0:
            first = next((line for line in complaint.splitlines() if "error" in line), complaint.strip()[:200])
            raise BadConfig(f"attention 'cpu_native' does not compile with {command[0]}: {first}")


def _digest(compiler: str, march: str) -> str:
    text = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            text.update(source.name.encode() + b"\0" + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    text.update("\0".join((version, torch.__version__, march, *KERNEL_FLAGS, *BINDING_FLAGS, *SHARED_FLAGS)).encode())
    text.update(_cpu_features().encode())
    return text.hexdigest()[:24]


def _cpu_features() -> str:
    """What -march=native depends on: the CPU's own list of features, where the system gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
