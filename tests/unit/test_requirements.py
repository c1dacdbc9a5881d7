"""What the package says it needs is what its code needs."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.stubs import ROOT


def least(name: str) -> Version:
    """The lowest version of a dependency that the bare install admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [requirement] = [r for r in map(Requirement, project["dependencies"]) if r.name == name]
    return min(Version(part.version) for part in requirement.specifier if part.operator in (">=", "=="))


def generated() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (ROOT / "microtome" / "v1").glob("*_pb2*.py")]


def test_the_oldest_grpc_that_is_admitted_runs_the_generated_code() -> None:
    needed = [Version(v) for text in generated() for v in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)]
    assert least("grpcio") >= max(needed)


def test_the_oldest_protobuf_that_is_admitted_runs_the_generated_code() -> None:
    versions = [re.search(r"# Protobuf Python Version: ([\d.]+)", text) for text in generated()]
    needed = [Version(found[1]) for found in versions if found]
    assert least("protobuf") >= max(needed)
