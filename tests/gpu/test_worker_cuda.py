"""What a worker's device part promises on a GPU beside its tokens: the pool, its size, who may start, the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from microtome.cuda_runtime.coin import coins
from microtome.cuda_runtime.device_holders import IDLE_MIB
from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.kv_pool import bytes_per_cell, size_pool
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.cuda_runtime.method import CapturedMethod
from microtome.cuda_runtime.model import LayerGeometry
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.sampler import sample
from microtome.planner.errors import BadConfig
from microtome.planner.types import SamplingParams
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import toy_directory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LAYERS = (LayerGeometry(kv_heads=8, head_size=128, window=0),) * 4


def build(folder: Path, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(toy_directory(folder)),
        "device": "cuda",
        "dtype": "float32",
        "methods": "eager",
        "kv_tokens": 2048,
        "max_step_tokens": 64,
        "widths": (1, 2, 3, 4, 8),
        "max_sequences": 16,
        "shared_device": True,
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


def test_pool_lies_on_the_device_and_never_moves(tmp_path: Path) -> None:
    executor = build(tmp_path)
    tensors = (*executor.pool.k, *executor.pool.v, executor.rows.device)
    assert all(tensor.is_cuda for tensor in tensors)
    places = [tensor.data_ptr() for tensor in tensors]
    driver = StepDriver(executor)
    sequences = [driver.open() for _ in range(4)]
    driver.step(*(Work(sequence, list(range(3, 19))) for sequence in sequences))
    for _ in range(30):
        driver.step(*map(Work, sequences))
    assert [tensor.data_ptr() for tensor in tensors] == places


def test_replay_at_every_width_equals_its_program_called(tmp_path: Path) -> None:
    executor = build(tmp_path)
    with torch.inference_mode():
        for method in executor.methods:
            if not method.spec.static:
                continue
            assert isinstance(method, CapturedMethod)
            width = method.spec.max_tokens
            columns = torch.zeros(5, width, dtype=torch.int64, device=CUDA)
            columns[0] = torch.arange(3, 3 + width, device=CUDA)
            columns[2] = columns[3] = torch.arange(width, device=CUDA)
            executor.rows.device[:width, 0] = torch.arange(width, device=CUDA, dtype=torch.int32)
            replayed = method.run(columns, width).clone()
            assert torch.equal(replayed, method._forward())


def test_pool_takes_its_share_of_the_memory_that_is_free() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for fraction in (0.25, 0.5):
        size = size_pool(
            LAYERS, device=CUDA, dtype=torch.bfloat16, kv_tokens=None, memory_fraction=fraction, at_least=1
        )
        taken = (size.usable_cells + 1) * bytes_per_cell(LAYERS, torch.bfloat16)
        assert 0.98 * fraction * free < taken <= 1.02 * fraction * free
    with pytest.raises(BadConfig, match=r"bytes, \d+ are free"):
        size_pool(
            LAYERS,
            device=CUDA,
            dtype=torch.bfloat16,
            kv_tokens=free // bytes_per_cell(LAYERS, torch.bfloat16) + 1,
            memory_fraction=0.9,
            at_least=1,
        )


def test_memory_that_torch_keeps_for_later_counts_as_free() -> None:
    def cells() -> int:
        return size_pool(
            LAYERS, device=CUDA, dtype=torch.bfloat16, kv_tokens=None, memory_fraction=0.5, at_least=1
        ).usable_cells

    before = cells()
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    del kept
    assert cells() >= 0.99 * before


def test_sampler_on_the_device_draws_the_tokens_of_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 32000, generator=generator) * 3
    policies = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.3, top_k=40, seed=2),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4),
        SamplingParams(repetition_penalty=1.3, logit_bias=((7, 4.0),)),
    ]
    history = torch.arange(50).numpy()
    rows = [SampledRow(policies[index % 6], 50 + index, lambda: history) for index in range(12)]
    assert sample(logits.cuda(), rows).tokens == sample(logits, rows).tokens
    seeds = torch.arange(1000)
    assert torch.equal(coins(seeds.cuda(), seeds.cuda()).cpu(), coins(seeds, seeds))


def test_a_device_that_somebody_holds_is_refused(tmp_path: Path) -> None:
    code = (
        f"import sys, torch; held = torch.zeros({2 * IDLE_MIB << 20}, dtype=torch.uint8, device='cuda');"
        "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadConfig, match=r"is held by process|MiB in use"):
            build(tmp_path, shared_device=False)
        build(tmp_path, shared_device=True)
        holder.communicate("")


def test_solo_runs_on_the_device(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick brown fox\na thin slice\n")
    command = [sys.executable, "-m", "microtome", "solo", str(toy_directory(tmp_path)), "--prompts", str(prompts)]
    command += ["--dtype", "float32", "--max-new-tokens", "8", "--kv-tokens", "2048", "--json"]
    command += ["--set", "runtime.shared_device=true", "--set", "runtime.methods=eager"]
    texts = []
    for device in ("cuda", "cpu"):
        done = subprocess.run([*command, "--device", device], capture_output=True, text=True, check=True)
        texts.append([said["text"] for said in json.loads(done.stdout)["generations"]])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_bench_runs_whole_on_the_toy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--model", "toy", "--eager", "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    (figures,) = tmp_path.glob("gpu-*.json")
    (found,) = json.loads(figures.read_text())["models"]
    assert found["memory"]["grown_bytes"] == 0
    assert found["replays"]["captured_widths"] == [1, 2, 4, 8, 16, 32, 64]
