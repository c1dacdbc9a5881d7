"""`microtome serve` and the demo as processes on a Ray of their own, with a toy model: they work, and leave nothing.

Each process gets a temporary folder of its own for Ray, by which everything that it started is recognised afterwards.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from microtome.client import Client
from tests.support.toy_model import toy_directory

COMMAND = [sys.executable, "-m", "microtome"]
WAIT_S = 120.0
SMALL = [
    "--threads",
    "1",
    "--kv-tokens",
    "2048",
    "--max-step-tokens",
    "64",
    "--set",
    "runtime.widths=1,8",
    "--set",
    "runtime.methods=eager",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture
def ray_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(ray_folder: str) -> Iterator[Start]:
    """Starts the command; what a failed test leaves is told to end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_TMPDIR": ray_folder},
            start_new_session=True,  # a process group of its own, as under systemd or `timeout`
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # closes its pipes, and waits
            process.terminate()


def belonging_to(folder: str) -> list[psutil.Process]:
    """The living processes that were started with this Ray folder, or by one that was."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def assert_nothing_left(folder: str) -> None:
    """Ray's own processes are told to go and take a moment; ours are waited for and must be gone by then."""
    _, alive = psutil.wait_procs(belonging_to(folder), timeout=10)
    assert [process.cmdline() for process in alive] == []


def wait_for_process(name: str, serving: subprocess.Popen[str], folder: str) -> None:
    """Until there is one of that name beside `serving`."""
    end = time.monotonic() + WAIT_S
    while not any(name in " ".join(process.cmdline()[:1]) for process in belonging_to(folder)):
        assert time.monotonic() < end
        assert serving.poll() is None
        time.sleep(0.05)


def ready_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"ready: .* at (127\.0\.0\.1:\d+), 1 worker on cpu, after [\d.]+ s\n", line)
    assert found, (line, process.communicate(timeout=WAIT_S))
    return found[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_service_is_served_used_and_taken_down_from_elsewhere(model: Path, start: Start, ray_folder: str) -> None:
    serving = start("serve", str(model), "--port", "0", "--name", "elsewhere", *SMALL)
    address = ready_address(serving)
    assert serving.stdout is not None
    assert f'microtome generate "Once upon a time" --address {address}' in serving.stdout.readline()

    for chat in ([], ["--chat"]):
        said = run("generate", "once upon a time", "-n", "4", "--address", address, "--verbose", "--ignore-eos", *chat)
        assert (said.returncode, "output 4 tokens" in said.stderr) == (0, True), said
    with Client(address) as client:
        client.wait_ready()
        worker = client.status().workers[0]
        assert worker.cells_used == 0
        # Ray's default is 15, behind whoever else wants the processor.
        assert psutil.Process(worker.pid).nice() == psutil.Process().nice()

    down = run("down", "--address", address)
    assert (down.returncode, down.stderr) == (0, "")
    assert down.stdout == "service 'elsewhere' is down; ended: elsewhere, elsewhere/worker-1\n"
    _, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, remarks) == (0, "'elsewhere' was taken down\n")
    assert_nothing_left(ray_folder)


def test_sigterm_takes_the_service_down(model: Path, start: Start, ray_folder: str) -> None:
    serving = start("serve", str(model), "--port", "0", *SMALL)
    ready_address(serving)
    serving.terminate()
    _, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, remarks) == (143, "taking 'microtome' down\n")
    assert_nothing_left(ray_folder)


def test_sigterm_to_the_whole_process_group_takes_the_service_down(model: Path, start: Start, ray_folder: str) -> None:
    # Were Ray's processes ended by it, too, each call to Ray would wait a minute, and then abort this one.
    serving = start("serve", str(model), "--port", "0", *SMALL)
    ready_address(serving)
    os.killpg(serving.pid, signal.SIGTERM)
    _, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, remarks) == (143, "taking 'microtome' down\n")
    assert_nothing_left(ray_folder)


@pytest.mark.parametrize("process_name", ["gcs_server", "raylet", "DriverActor"])
def test_sigterm_to_the_whole_process_group_while_it_starts_leaves_nothing(
    model: Path, start: Start, ray_folder: str, process_name: str
) -> None:
    serving = start("serve", str(model), "--port", "0", *SMALL)
    wait_for_process(process_name, serving, ray_folder)
    os.killpg(serving.pid, signal.SIGTERM)
    out, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, out, remarks) == (143, "", "")
    assert_nothing_left(ray_folder)


def test_sigterm_while_it_starts_leaves_nothing(model: Path, start: Start, ray_folder: str) -> None:
    # Ray waits for the driver then; and its own handler would print a stack and change the status.
    serving = start("serve", str(model), "--port", "0", *SMALL)
    wait_for_process("DriverActor", serving, ray_folder)
    serving.terminate()
    out, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, out, remarks) == (143, "", "")
    assert_nothing_left(ray_folder)


def test_that_it_compiles_is_told_and_a_service_that_ends_then_leaves_no_compiler(
    model: Path, start: Start, ray_folder: str, tmp_path: Path
) -> None:
    compiled = [*SMALL, "--set", "runtime.methods=compiled", "--set", f"runtime.artifact_folder={tmp_path}"]
    serving = start("serve", str(model), "--port", "0", *compiled)
    assert serving.stderr is not None
    line = serving.stderr.readline()
    assert line.startswith("worker-1: compiling the methods for this machine: minutes, once, then kept at "), (
        line,
        serving.communicate(timeout=WAIT_S),
    )
    assert str(tmp_path) in line
    assert line.endswith(" (--eager does without)\n")
    serving.terminate()
    out, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, out, remarks) == (143, "", "")
    assert_nothing_left(ray_folder)


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, start: Start, ray_folder: str
) -> None:
    broken = toy_directory(tmp_path)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    serving = start("serve", str(broken), "--port", "0", *SMALL)
    out, remarks = serving.communicate(timeout=WAIT_S)
    assert (serving.returncode, out) == (1, "")
    assert remarks.startswith("microtome: ")
    assert remarks.count("\n") == 1
    assert str(broken) in remarks
    assert_nothing_left(ray_folder)


def test_the_demo_answers_eight_chats_and_leaves_nothing(model: Path, start: Start, ray_folder: str) -> None:
    demo = start("demo", "--model", str(model))
    shown, remarks = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, remarks) == (0, ""), shown
    for topic in ("capital", "rainbow", "haiku", "three rivers", "gardener", "reverse", "summary", "tale"):
        assert re.search(rf"^ {topic} +\d+ +\d+ +\d+ +[\d.–]+ +[\d.–]+ $", shown, re.MULTILINE), topic
    assert re.search(r"8 chats at once: \d+ output tokens in [\d.]+ s, [\d.]+ tokens/s", shown)
    assert shown.endswith("stopping what was started\nthe service and its Ray have ended\n")
    assert_nothing_left(ray_folder)


def test_an_interrupted_demo_leaves_nothing(model: Path, start: Start, ray_folder: str) -> None:
    demo = start("demo", "--model", str(model))
    assert demo.stdout is not None
    while " is served at " not in (line := demo.stdout.readline()):
        assert line, demo.communicate(timeout=WAIT_S)
    demo.send_signal(signal.SIGINT)
    _, remarks = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, remarks) == (130, "")
    assert_nothing_left(ray_folder)
