"""The GPU's bench where there is no GPU: the same path on a CPU, which says so and claims nothing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import gpu
from microtome.cuda_runtime.model import skeleton


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SCALE = gpu.Scale(
    replays=4,
    rounds=2,
    inner=1,
    copy_bytes=1 << 16,
    matrix=32,
    contexts=(16, 40),
    widths=(1, 2, 4),
    max_step_tokens=16,
    session_tokens=64,
)
WORDS = ("--device", "cpu", "--model", "toy", "--eager", "--dtype", "float32")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_run_without_a_gpu_checks_everything_and_holds_no_figure_of_one(
    quantize: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main([*WORDS, "--quantize", quantize, "--out", str(tmp_path)], SCALE) == 0
    said = capsys.readouterr().out
    assert "no GPU: methods are not captured, and no figure below is one of a GPU" in said
    (figures,) = tmp_path.glob("*.json")
    report = json.loads(figures.read_text())
    (found,) = report["models"]
    assert report["machine"]["captured"] is False
    assert set(report["attention"]["torch.float32"]) >= {"decodes", "mixed", "sinks"}
    assert set(report["toy"]) == {"forward_1", "forward_2", "forward_4", "forward_others"}
    assert found["replays"]["captured_widths"] == []
    assert found["memory"] == {"replays": 0, "grown_bytes": None}
    assert [(row["width"], row["context"]) for row in found["decode"]] == [(w, c) for c in (16, 40) for w in (1, 2, 4)]
    assert found["prefill"]["tokens"] == 16
    assert found["profile"]["decode"]
    assert found["step"]["step_us_least"] > 0
    assert "share" not in figures.read_text()
    page = (tmp_path / "no-gpu.md").read_text()
    assert page.startswith("# Measured on GPUs")
    assert "methods were not captured, so these are no figures of a GPU" in page.splitlines()[-1]
    assert " ms" not in page.splitlines()[-1]


def test_a_second_run_adds_its_row_behind_the_first(tmp_path: Path) -> None:
    machine = {"date": "d", "device": "Some GPU 80G", "command": "c", "captured": True}
    ms = {"middle": 2.0, "least": 1.5, "most": 2.5}
    found = {
        "model": "m",
        "dtype": "bfloat16",
        "methods": "compiled",
        "quantize": "none",
        "replays": {"captured_widths": [1, 2]},
        "memory": {"replays": 1000},
        "decode": [{"width": width, "context": 128, "ms": ms, "share_of_copy_rate": 0.83} for width in (1, 2)],
        "prefill": {"ms": ms, "share_of_matmul_rate": 0.6},
        "step": {"step_us_middle": 3000},
    }
    for _ in range(2):
        figures, page = gpu.write(tmp_path, machine, {"models": [found]})
    assert (figures.name, page.name) == ("gpu-some-gpu-80g.json", "gpu.md")
    rows = page.read_text().removeprefix(gpu.HEADER).splitlines()
    assert rows[0] == rows[1]
    assert "captured at 1, 2; replays equal; 1000 replays, no growth" in rows[0]
    assert "83% at 128 (2.00 ms, 1.50 to 2.50) | 60% (2.0 ms) | 3000 µs |" in rows[0]
    assert rows[0].count("|") == gpu.HEADER.splitlines()[-1].count("|")


def test_a_result_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = gpu.call

    def called(*arguments: object) -> torch.Tensor:
        return wrong(*arguments) + 1e-3  # type: ignore[arg-type]

    monkeypatch.setattr(gpu, "call", called)
    assert gpu.main(WORDS, SCALE) == 1
    assert "failed: forward_1: its replay is not its program's result" in capsys.readouterr().err


def test_without_a_device_it_says_how_to_run_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--device cpu --model toy" in capsys.readouterr().out


def test_the_shapes_are_those_of_the_published_models() -> None:
    """Parameters as the model cards give them, in billions; a tied table counts once."""
    for name, billions in (("llama-3.2-1b", 1.236), ("qwen3-4b", 4.022), ("llama-3.1-8b", 8.030)):
        checkpoint, nowhere = gpu.checkpoint_of(name), torch.device("meta")
        model = gpu.random_model(checkpoint, device=nowhere, dtype=torch.bfloat16, session_tokens=8192)
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions, name


def test_a_prompts_flop_are_two_for_each_weight_it_meets_and_four_for_each_pair_that_sees() -> None:
    checkpoint = gpu.checkpoint_of("toy")
    model = skeleton(checkpoint, dtype=torch.float32, session_tokens=64)
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "layers" in name)
    heads, size, vocabulary, hidden = 4, 16, 320, 64
    pairs = 1 + 2 + 3
    expected = 2 * 3 * layers + 2 * 4 * pairs * heads * size + 2 * 1 * vocabulary * hidden
    assert gpu.prefill_flop(checkpoint, 3, 1) == expected


def test_it_needs_neither_ray_nor_grpc() -> None:
    code = "import sys, bench.gpu; print([name for name in ('ray', 'grpc') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
