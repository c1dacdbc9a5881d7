"""Linear layers over 8-bit weights on a GPU: the kernel against exact arithmetic, and captured whole."""

from pathlib import Path

import pytest
import torch

from microtome.cuda_runtime.executor import build_executor
from microtome.cuda_runtime.linear.int8 import load_operators, quantize
from microtome.cuda_runtime.method import CapturedMethod
from microtome.cuda_runtime.options import RuntimeOptions
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import toy_directory

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 40), (2048, 2048), (130, 14336)])
def test_results_are_those_of_exact_arithmetic(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    load_operators(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    numbers, scale = quantize(normal(outputs, inputs) * inputs**-0.5)
    bias = normal(outputs)
    for rows in (1, 2, 16, 17, 64, 65, 300):
        x = normal(rows, inputs)
        exact = (x.double() @ numbers.double().T) * scale.double() + bias.double()
        found = torch.ops.microtome.int8_linear_triton(x, numbers, scale, bias)
        assert float((found.double() - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype], rows


@pytest.mark.parametrize("methods", ["eager", "compiled"])
def test_captured_methods_give_the_tokens_of_a_cpu(methods: str, tmp_path: Path) -> None:
    produced = []
    for device in ("cuda", "cpu"):
        executor = build_executor(
            RuntimeOptions(
                model=str(toy_directory(tmp_path)),
                device=device,
                dtype="float32",
                quantize="int8",
                methods=methods if device == "cuda" else "eager",
                artifact_folder=str(tmp_path / "artifacts"),
                kv_tokens=1024,
                max_step_tokens=64,
                widths=(1, 2, 4),
                max_sequences=8,
                shared_device=True,
            )
        )
        assert isinstance(executor.methods[0], CapturedMethod) is (device == "cuda")
        driver = StepDriver(executor)
        sequences = [driver.open() for _ in range(3)]
        tokens = [driver.step(*(Work(sequence, [5, 6, 7 + sequence]) for sequence in sequences))]
        tokens += [driver.step(*map(Work, sequences)) for _ in range(20)]
        produced.append(tokens)
    assert produced[0] == produced[1]
