"""The generated code in microtome/v1, and whether it is what proto/ says.

`python -m tests.support.stubs write` generates it in place; `check` generates into a temporary folder, compares byte
for byte, and ends with 1 and the files' names when they differ.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("microtome/v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the stubs of every proto file below `target`/microtome/v1. Raises `RuntimeError` when protoc refuses."""
    sources = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto").rglob("*.proto"))
    well_known = files("grpc_tools") / "_proto"
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *outputs, *map(str, sources)])
    if status != 0:
        raise RuntimeError(f"protoc ended with {status} for {', '.join(map(str, sources))}")


def outdated() -> list[str]:
    """Names below microtome/v1 that are missing, left over, or not what protoc makes of proto/ today."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = _contents(Path(folder) / PACKAGE)
    committed = _contents(ROOT / PACKAGE)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def main(arguments: list[str]) -> int:
    if arguments == ["write"]:
        generate(ROOT)
        return 0
    if arguments == ["check"]:
        names = outdated()
        if names:
            print(f"generated code is out of date, run `make proto`: {', '.join(names)}", file=sys.stderr)
        return 1 if names else 0
    print("usage: python -m tests.support.stubs write|check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
