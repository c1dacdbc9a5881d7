"""A device that somebody holds is refused by name of who holds it; one that nobody does is taken."""

import os
from collections.abc import Mapping

import pytest

from microtome.cuda_runtime.device_holders import IDLE_MIB, check_unheld
from microtome.planner.errors import BadConfig

UUID, OTHER = "GPU-11111111-aaaa", "GPU-22222222-bbbb"


def smi(apps: str, used_mib: int | str) -> "Query":
    answers: Mapping[str, str] = {"compute-apps": apps, "gpu": f"{UUID}, {used_mib}\n{OTHER}, 70000\n"}
    return Query(answers)


class Query:
    def __init__(self, answers: Mapping[str, str]) -> None:
        self._answers = answers

    def __call__(self, argument: str) -> str:
        return self._answers[argument.removeprefix("--query-").partition("=")[0]]


def test_free_device_is_taken_whatever_others_hold() -> None:
    check_unheld(UUID, smi(f"{OTHER}, 77, python, 60000\n", 4))
    check_unheld(UUID.removeprefix("GPU-"), smi("", IDLE_MIB))


def test_holders_are_named_with_process_and_amount() -> None:
    apps = f"{UUID}, 77, /usr/bin/python3.11, 60000\n{UUID}, 78, a, b, [N/A]\n{OTHER}, 79, python, 5\n"
    with pytest.raises(BadConfig) as refused:
        check_unheld(UUID, smi(apps, 60300))
    assert str(refused.value) == (
        f"device {UUID} is held by process 77 (python3.11, 60000 MiB), process 78 (a, b); "
        "runtime.shared_device allows it"
    )


def test_own_process_is_no_holder() -> None:
    check_unheld(UUID, smi(f"{UUID}, {os.getpid()}, python, 500\n", 500))


def test_memory_of_an_invisible_process_is_refused_with_amount_and_limit() -> None:
    with pytest.raises(BadConfig) as refused:
        check_unheld(UUID, smi("", 20000))
    assert str(refused.value) == (
        f"device {UUID} has 20000 MiB in use, {IDLE_MIB} is the limit, by a process that is not visible from here; "
        "runtime.shared_device allows it"
    )


def test_amount_that_is_not_told_is_not_guessed() -> None:
    check_unheld(UUID, smi("", "[N/A]"))


def test_machine_without_the_tool_is_not_checked() -> None:
    def missing(argument: str) -> str:
        raise FileNotFoundError("nvidia-smi")

    check_unheld(UUID, missing)
