"""Ray's own autoscaler brings and takes nodes for a service's workers; a preempted node is left in time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cloud_life import LIMIT_S

ROOT = Path(__file__).parents[2]
TIMEOUT_S = LIMIT_S + 60


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_nodes_come_for_a_request_are_left_when_preempted_and_go_when_idle() -> None:
    life = subprocess.run(
        [sys.executable, "-m", "tests.support.cloud_life"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert life.returncode == 0, f"{life.stdout}\n{life.stderr[-3000:]}"
    lines = [json.loads(line) for line in life.stdout.splitlines() if line.startswith("{")]
    seen = {line["what"]: line for line in lines}
    assert seen["up"]["nodes"] == 1, "a service without workers was given a node"
    first = seen["first answer from no worker and no node"]
    assert first["right"]
    assert first["nodes"] >= 2  # a slow machine's autoscaler may start one more before the first has told of itself
    assert seen["preempted node is left"]["cause"] == "drained: its node is draining"
    goes_on = seen["stream goes on elsewhere"]
    assert goes_on["right"]
    assert goes_on["tokens"] < 4000, "the stream was over before its node was left"
    assert seen["up"]["driver_on_head"]
    lost = seen["another node says how its worker ended"]
    assert lost["loss"] == "died"
    assert "its process ended without a word, as after SIGKILL" in lost["cause"], lost["cause"]
    assert seen["backlog has brought a second worker and node"]["nodes"] == 3
    lacks = seen["third one says what it lacks"]["cause"]
    assert lacks.startswith("no node has room for it yet: node "), lacks
    assert lacks.count("CPU needs 1, free 0 of 1") >= 2, "it does not name every node"
    assert lacks.count("node 127.0.0.1: ") == 3, "it does not name every node"
    assert seen["a lost node's streams go on elsewhere"]["broken"] == 0
    assert seen["backlog is gone"]["right"]
    assert seen["backlog is gone"]["tokens"] > 0
    assert seen["idle node is gone"]["workers"] == 0
