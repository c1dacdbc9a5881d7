"""The example jobs, submitted to a real Ray cluster, from a folder whose names could shadow ours."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus

from microtome import Client
from tests.support.ray_head import RayHead, ray_head
from tests.support.stubs import ROOT
from tests.support.toy_model import toy_directory

PROMPTS = 100


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    private = tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp", ignore_cleanup_errors=True)
    with private as folder, ray_head(Path(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, beside packages named like our folders that break when anything imports them."""
    folder = tmp_path_factory.mktemp("job") / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("actors", "planner", "cuda_runtime", "proto"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('the job has its own {name}')\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("model"))


def answers(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def check_answers(log: str) -> None:
    lines = answers(log)
    assert sorted(line["number"] for line in lines) == list(range(PROMPTS))  # type: ignore[type-var]
    assert [line for line in lines if "error" in line or not line["output_tokens"]] == []
    assert f"{PROMPTS} answered, 0 failed" in log


def test_job_brings_its_own_service_up_and_down(head: RayHead, working_dir: Path, model: Path) -> None:
    command = f"{sys.executable} own_service.py --model {model} --prompts {PROMPTS} --max-new-tokens 8"
    status, log = head.run_job(command, working_dir)
    assert status == JobStatus.SUCCEEDED, log
    check_answers(log)


def test_job_uses_a_service_that_is_up_and_leaves_it_up(head: RayHead, working_dir: Path, model: Path) -> None:
    microtome = Path(sys.executable).with_name("microtome")
    options = [
        "--name",
        "shared",
        "--port",
        "0",
        "--ray-address",
        head.address,
        "--threads",
        "1",
        "--set",
        "runtime.methods=eager",
    ]
    serving = subprocess.Popen(
        [microtome, "serve", *options, str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        ready = serving.stdout.readline()
        assert ready.startswith("ready: "), serving.communicate()
        address = ready.split(" at ")[1].split(",")[0]

        command = f"{sys.executable} existing_service.py --service shared --prompts {PROMPTS} --max-new-tokens 8"
        status, log = head.run_job(command, working_dir)

        assert status == JobStatus.SUCCEEDED, log
        check_answers(log)
        with Client(address) as client:
            assert client.status().counters["generations_finished"] == PROMPTS
    finally:
        serving.terminate()
        serving.communicate(timeout=60)


def test_job_for_a_service_that_is_not_up_fails_in_one_sentence(head: RayHead, working_dir: Path) -> None:
    status, log = head.run_job(f"{sys.executable} existing_service.py --service nobody", working_dir)
    assert status == JobStatus.FAILED
    assert "no service named 'nobody' is up in namespace 'nobody'" in log
    assert "Traceback" not in log
