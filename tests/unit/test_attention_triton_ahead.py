"""The Triton kernels compile ahead for sm_80, sm_90 and sm_100, and take no more of a GPU than the table says."""

import json

import pytest

from bench.kernel_resources import SHARED_LIMIT_BYTES, TABLE, Geometry, cases, compile_ahead, variants

KERNELS = json.loads(TABLE.read_text())["kernels"]
# Another release of the compiler may place a few registers differently; a spill or a lost stage is what to catch.
REGISTERS_SLACK = 16


@pytest.mark.parametrize(("geometry", "architecture"), cases(), ids=[f"{g.name}, sm_{a}" for g, a in cases()])
def test_kernels_take_what_the_table_says(geometry: Geometry, architecture: int) -> None:
    for name, variant in variants(geometry, architecture).items():
        resources = compile_ahead(variant, geometry, architecture)
        allowed = KERNELS[f"{geometry.name}: {name}"][f"sm_{architecture}"]
        assert resources.registers <= allowed["registers"] + REGISTERS_SLACK, name
        assert resources.stack_bytes <= allowed["stack_bytes"], f"{name} spills"
        assert resources.shared_bytes <= allowed["shared_bytes"], name


def test_table_holds_no_spill_at_sixteen_bits_and_fits_every_architecture() -> None:
    for kernel, architectures in KERNELS.items():
        for architecture, resources in architectures.items():
            limit = SHARED_LIMIT_BYTES[int(architecture.removeprefix("sm_"))]
            assert resources["shared_bytes"] <= limit, (kernel, architecture)
            if "fp32" not in kernel:
                assert resources["stack_bytes"] == 0, (kernel, architecture)


def test_table_and_kernels_name_each_other() -> None:
    made = {f"{g.name}: {name}": f"sm_{a}" for g, a in cases() for name in variants(g, a)}
    assert set(made) == set(KERNELS)
