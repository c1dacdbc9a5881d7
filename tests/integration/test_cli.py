"""The command against a scripted service: what it prints where, and that an error is one sentence and a status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

import microtome
from microtome import local
from microtome.cli import app
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.journal import Encoder
from microtome.v1 import generation_pb2 as pb
from tests.support.fake_generation import WAIT_S, Endless, FakeGeneration, Served, refuses, response, says
from tests.support.recorded import busy_day


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(FakeGeneration())
    yield served
    served.stop()


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin, env=environment)


def sentence(result: Result, status: int = 1) -> str:
    """The one sentence of a command that failed: on standard error, alone, no traceback."""
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr.startswith("microtome: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("microtome: ").rstrip("\n")


# --- generate ---


def test_generate_prints_the_text_and_nothing_else(served: Served) -> None:
    result = run("generate", "hi", "--address", served.address)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello world\n", "")
    assert served.service.seen[0].text == "hi"


def test_generate_ends_the_line_only_when_the_text_does_not(served: Served) -> None:
    served.service.scripts = [says(response("Hello\n", 1, last=True))]
    assert run("generate", "hi", "--address", served.address).stdout == "Hello\n"
    served.service.scripts = [says(response("", 2, last=True))]
    assert run("generate", "hi", "--address", served.address).stdout == ""


def test_the_address_may_come_from_the_environment(served: Served) -> None:
    assert run("generate", "hi", MICROTOME_ADDRESS=served.address).stdout == "Hello world\n"


def test_generate_hands_every_option_on(served: Served) -> None:
    options = (
        "-n 9 -t 0.5 --top-k 4 --top-p 0.25 --min-p 0.125 --seed 7 --stop-token-id 5 --stop-token-id 6 --ignore-eos "
        "--n 1 --priority -3 --tenant acme --repetition-penalty 1.25 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--logit-bias 7=-2.5 --logit-bias 8=1 --allowed-token-id 7 --banned-token-id 9 --min-new-tokens 2 --stop END "
        "--stop STOP --logprobs 0 --prompt-logprobs 3"
    )
    assert run("generate", "hi", "-a", served.address, *options.split()).exit_code == 0
    [request] = served.service.seen
    request.ClearField("generation_id")
    assert request == pb.GenerateRequest(
        text="hi",
        max_new_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        seed=7,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        n=1,
        priority=-3,
        tenant="acme",
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: -2.5, 8: 1.0},
        allowed_token_ids=pb.TokenIds(ids=[7]),
        banned_token_ids=[9],
        min_new_tokens=2,
        stop=["END", "STOP"],
        logprobs=0,
        prompt_logprobs=3,
    )


def test_a_bias_that_is_no_pair_is_a_wrong_command_line(served: Served) -> None:
    result = run("generate", "hi", "-a", served.address, "--logit-bias", "7:2")
    assert result.exit_code == 2
    assert "'7:2' is not of the form ID=BIAS" in " ".join(result.stderr.split())
    assert not served.service.seen


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--chat"], [("user", "hi")]),
        (["--system", "be brief"], [("system", "be brief"), ("user", "hi")]),
    ],
)
def test_generate_as_a_chat(served: Served, options: list[str], messages: list[tuple[str, str]]) -> None:
    assert run("generate", "hi", "-a", served.address, *options).exit_code == 0
    assert [(m.role, m.content) for m in served.service.seen[0].chat.messages] == messages


def test_the_prompt_may_come_from_standard_input(served: Served) -> None:
    run("generate", "-", "-a", served.address, stdin="from\na file")
    assert served.service.seen[0].text == "from\na file"


def test_generate_verbose_tells_tokens_and_times_on_standard_error(served: Served) -> None:
    result = run("generate", "hi", "-a", served.address, "--verbose")
    assert result.stdout == "Hello world\n"
    assert result.stderr.startswith("prompt 3 tokens (1 cached); output 5 tokens; finish length; seed 7; TTFT ")
    assert "ITL mean " in result.stderr


def test_generate_json_is_the_whole_generation(served: Served) -> None:
    result = run("generate", "hi", "-a", served.address, "--json")
    assert json.loads(result.stdout) == {
        "text": "Hello world",
        "token_ids": [10, 11, 12, 13, 14],
        "generation_id": "g-1",
        "seed": 7,
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "output_tokens": 5, "cached_tokens": 1},
        "index": 0,
        "logprobs": [],
        "prompt_token_ids": [],
        "prompt_logprobs": [],
    }


def test_several_completions_are_printed_one_behind_the_other_however_they_come(served: Served) -> None:
    script = says(
        response("b", 5, index=1, n=2),
        response("a", 1, n=2),
        response("B", 6, offset=1, index=1, n=2, last=True),
        response("A\n", 2, offset=1, n=2, last=True),
    )
    served.service.scripts = [script]
    result = run("generate", "hi", "-a", served.address, "--n", "2", "--verbose")
    assert result.stdout == "[1 of 2]\naA\n[2 of 2]\nbB\n"
    assert result.stderr.count("finish length") == 2
    result = run("generate", "hi", "-a", served.address, "--n", "2", "--json")
    assert [(one["index"], one["text"]) for one in map(json.loads, result.stdout.splitlines())] == [
        (0, "aA\n"),
        (1, "bB"),
    ]
    assert [request.n for request in served.service.asked(pb.GenerateRequest)] == [2, 2]


def test_where_says_what_a_generation_waits_for(served: Served) -> None:
    result = run("where", "g-9", "-a", served.address)
    assert result.stdout.splitlines() == [
        "completion 0: running on worker-0; 17 tokens after 5; parked 1 time; moved 2 times; 2.5 s old",
        "completion 1: waiting, 3 before it, for want of: tenant share; 0 tokens after 5; first token in 1250 ms; "
        "0.0 s old",
    ]
    del served.service.places[0]
    assert run("where", "g-9", "-a", served.address).stdout.startswith("waiting, 3 before it")
    told = json.loads(run("where", "g-9", "-a", served.address, "--json").stdout)
    assert (told["waits_for"], told["predicted_ttft_s"], told["position"]) == ("tenant share", 1.25, 3)
    served.service.failures = [(grpc.StatusCode.NOT_FOUND, "no generation 'g-9' is running or kept")]
    assert sentence(run("where", "g-9", "-a", served.address)) == "no generation 'g-9' is running or kept"


def test_status_with_the_queue_has_a_row_for_each_generation(served: Served) -> None:
    lines = run("status", "--queue", "-a", served.address).stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("generation "))
    assert lines[at + 1].split() == ["g-0", "running", "worker-0", "acme", "0", "5", "17", "1", "2", "2.5", "s"]
    assert lines[at + 2].split()[:7] == ["g-1", "[1]", "waiting", "tenant", "share", "acme", "3"]
    told = json.loads(run("status", "--queue", "--json", "-a", served.address).stdout)
    assert [one["generation_id"] for one in told["queue"]] == ["g-0", "g-1"]
    assert "queue" not in json.loads(run("status", "--json", "-a", served.address).stdout)
    served.service.places.clear()
    assert "no generation waits or runs" in run("status", "--queue", "-a", served.address).stdout


def test_a_failure_in_mid_stream_keeps_the_text_on_its_own_line(served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.INTERNAL, "step 12 failed", after=(response("Hel", 1),))]
    result = run("generate", "hi", "-a", served.address)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "Hel\n", "microtome: step 12 failed\n")


# --- errors ---


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name not in ("OK", "UNAVAILABLE")])
def test_what_the_service_refuses_is_its_sentence_and_status_1(served: Served, code: grpc.StatusCode) -> None:
    served.service.scripts = [refuses(code, "temperature -1 is not a number of 0 or more")]
    assert sentence(run("generate", "hi", "-a", served.address)) == "temperature -1 is not a number of 0 or more"


def test_a_sentence_stays_one_line_and_cannot_write_on_the_terminal(served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.INTERNAL, "two\nlines [red]and\x1b[2J a code")]
    assert sentence(run("generate", "hi", "-a", served.address)) == "two lines [red]and[2J a code"


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",), ("down",)])
def test_no_service_is_told_with_its_address_and_what_starts_one(served: Served, command: tuple[str, ...]) -> None:
    served.stop()
    told = sentence(run(*command, "--address", served.address))
    assert told == f"no service answers at {served.address} (connection refused); `microtome serve MODEL` starts one"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--address", "nowhere"], "an address is \"host:port\" with a port from 1 to 65535, not 'nowhere'"),
        (["--seed", "-1"], "seed must be 0 to 18446744073709551615, not -1"),
        (["--timeout-s", "0"], "timeout_s must be above 0 seconds and finite, not 0"),
    ],
)
def test_what_cannot_be_sent_is_told(served: Served, options: list[str], told: str) -> None:
    assert sentence(run("generate", "hi", "-a", served.address, *options)) == told
    assert served.service.seen == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/nowhere"], "model /nowhere: no such file or directory"),
        (["/nowhere", "--port", "99999"], "port 99999 is not in 0 to 65535"),
        (["/nowhere", "--device", "tpu"], "device 'tpu' is none of cpu, cuda, cuda:N"),
        (["/nowhere", "--set", "workers.cout=2"], "no setting is named 'workers.cout'; did you mean 'workers.count'?"),
        (["/nowhere", "--set", "workers.count=two"], "workers.count 'two' is not a whole number"),
    ],
)
def test_serve_refuses_what_cannot_work_before_anything_starts(arguments: list[str], told: str) -> None:
    assert sentence(run("serve", *arguments)) == told


def test_settings_given_as_options_win_over_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("service: {port: 70001, name: 'from the file'}\n")
    assert "'from the file'" in sentence(run("serve", "/nowhere", "--config", str(file), "--port", "1"))
    environment = {"MICROTOME_SERVICE_NAME": "from the environment"}
    told = sentence(run("serve", "/nowhere", "--config", str(file), "--port", "1", **environment))
    assert "'from the environment'" in told
    told = sentence(run("serve", "/nowhere", "--config", str(file), "--name", "ours", **environment))
    assert told == "port 70001 is not in 0 to 65535"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("notes.txt", "neither a directory nor a GGUF file that can be read: it starts with b'not '"),
        (".", "the directory holds no config.json"),
        ("absent", "no such file or directory"),
    ],
)
def test_what_is_no_model_is_told_before_a_ray_or_a_model_library_is_loaded(
    tmp_path: Path, model: str, told: str
) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    heavy = "print([name for name in ('ray', 'torch', 'transformers', 'grpc') if name in sys.modules])"
    script = f"import atexit, sys; atexit.register(lambda: {heavy}); from microtome.cli import main; main()"
    serving = subprocess.run(
        [sys.executable, "-c", script, "serve", model],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=WAIT_S,
        check=False,
    )
    assert (serving.returncode, serving.stdout) == (1, "[]\n")
    assert serving.stderr.startswith("microtome: model ")
    assert told in serving.stderr
    assert serving.stderr.count("\n") == 1


def test_inspect_of_what_is_no_artifact_says_what_one_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no artifact")
    for path in (tmp_path, file):
        told = sentence(run("inspect", str(path)))
        assert told == (
            f"artifact {path}: it is none, as it holds no manifest.json; `microtome export MODEL FOLDER` makes one"
        )
    assert sentence(run("inspect", str(tmp_path / "absent"))) == f"artifact {tmp_path / 'absent'}: no such folder"


def test_an_unknown_model_name_is_told_with_the_known_ones() -> None:
    assert sentence(run("fetch", "gpt-9")) == "no model is called 'gpt-9'; known: smollm2-135m"


def test_a_command_line_that_is_wrong_has_status_2() -> None:
    for arguments in (["generate"], ["generate", "hi", "--temperature", "hot"], ["serve", "m", "--set", "no-equals"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["serve", "m"], ["fetch", "smollm2-135m"], ["demo"], ["down"]])
def test_a_client_only_installation_says_what_to_install(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(local.importlib, "import_module", missing)
    told = sentence(run(*command))
    assert told == "this needs the server parts, and ray is not installed: pip install 'microtome[server]'"


def test_a_module_of_ours_that_is_missing_is_a_defect_and_not_an_installation() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"microtome\.nothing"):
        local.server_part("nothing")


def test_down_refuses_to_take_for_one_service_another(served: Served) -> None:
    told = sentence(run("down", "--name", "other", "--address", served.address))
    assert told.startswith(f"the service at {served.address} is 'microtome', not 'other'")


def test_errors_of_the_planner_and_configuration_are_sentences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise BadConfig("the cache is not writable")

    monkeypatch.setattr(local, "server_part", fails)
    assert sentence(run("fetch", "smollm2-135m")) == "the cache is not writable"


# --- status, version ---


def test_status_names_service_workers_and_load(served: Served) -> None:
    result = run("status", "--address", served.address, COLUMNS="120")
    assert result.exit_code == 0
    assert f"microtome 0.1.0 at {served.address}, up 1 min 1 s, on Ray 127.0.0.1:6379" in result.stdout
    assert "2 running, 1 waiting" in result.stdout
    for fact in ("worker-0", "ready", "cpu", "4242", "12/4096", "321 output tokens"):
        assert fact in result.stdout


def test_status_into_a_file_is_not_folded(served: Served) -> None:
    lines = run("status", "--address", served.address).stdout.splitlines()
    assert any("321 output tokens" in line and "generations finished" in line for line in lines)
    assert any("worker-0" in line and "4242" in line and "12/4096" in line for line in lines)


def test_status_json_is_all_of_it(served: Served) -> None:
    told = json.loads(run("status", "--json", "--address", served.address).stdout)
    assert told["model"]
    assert told["workers"][0]["cells_usable"] == 4096
    assert told["counters"]["output_tokens"] == 321


def test_version_is_the_installed_one() -> None:
    assert run("version").stdout == f"microtome {microtome.__version__}\n"


def test_no_arguments_show_the_commands() -> None:
    shown = run().output
    for command in (
        *("serve", "generate", "status", "down", "drain", "update"),
        *("fetch", "demo", "solo", "export", "inspect", "replay", "version"),
    ):
        assert f" {command} " in shown


# --- replay ---


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("journals") / "day.journal"
    file.write_bytes(busy_day().journal)
    return file


def test_replay_of_what_the_planner_did_finds_no_difference(journal: Path) -> None:
    result = run("replay", str(journal))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("no difference\n")


def test_replay_of_another_answer_names_it_and_fails(journal: Path, tmp_path: Path) -> None:
    # One more life, in which the planner is said to have answered nothing to its first event.
    recorded = busy_day()
    encoder = Encoder()
    file = tmp_path / "two.journal"
    event, answered = next((event, answered) for event, answered in recorded.entries if answered)
    before = [event for event, answers in recorded.entries[: recorded.entries.index((event, answered))]]
    silent = b"".join(encoder.entry(event, []) for event in [*before, event])
    file.write_bytes(journal.read_bytes() + encoder.header(PlannerConfig()) + silent)
    result = run("replay", str(file))
    assert result.exit_code == 1
    first, second = result.stdout.split("\nlife 2: ")
    assert first.startswith("life 1: ")
    assert "no difference" in first
    assert "first difference" in second
    assert run("replay", str(file), "--life", "1").exit_code == 0
    assert sentence(run("replay", str(file), "--life", "3")) == "life 3 is not in 1 to 2"


def test_replay_leaves_out_a_torn_end_and_says_so(journal: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.journal"
    torn.write_bytes(journal.read_bytes()[:-3])
    result = run("replay", str(torn))
    assert result.exit_code == 0
    assert "bytes at the end are left out: the last record was being written" in result.stderr


def test_replay_what_if_is_a_table_and_a_json_file(journal: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = run("replay", str(journal), "--workers", "2", "--policy", "priority", "--json", str(figures))
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(figures.read_text())
    assert told["policy"] == "priority"
    assert told["what_if"]["ttft_p50_ms"] < told["simulated"]["ttft_p50_ms"]
    assert "what if" in result.stdout


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file or directory"), (b"", "it is not a journal"), (b"hello, world", "it is not a journal")],
)
def test_replay_of_what_is_no_journal_is_one_sentence(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "some.file"
    if content is not None:
        file.write_bytes(content)
    said = sentence(run("replay", str(file)))
    assert f"'{file}'" in said
    assert told in said


def test_replay_under_a_policy_that_does_not_exist_names_those_that_do(journal: Path) -> None:
    assert sentence(run("replay", str(journal), "--policy", "luck")).startswith(
        "policy 'luck' is none of decode-first, "
    )


# --- as a process ---

COMMAND = [sys.executable, "-m", "microtome"]


def test_ctrl_c_while_generating_cancels_the_generation(served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    process = subprocess.Popen(
        [*COMMAND, "generate", "hi", "--address", served.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == "xx"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (130, "")
    assert endless.cancelled.wait(WAIT_S)


def test_a_reader_that_goes_away_ends_the_generation_quietly(served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    process = subprocess.Popen(
        [*COMMAND, "generate", "hi", "--address", served.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(WAIT_S) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    assert endless.cancelled.wait(WAIT_S)


def test_text_to_a_terminal_has_no_control_characters(served: Served) -> None:
    served.service.scripts = [says(response("a\x1b[2J\x07b\tc\r\n", 1, last=True))]
    ours, theirs = os.openpty()
    try:
        subprocess.run(
            [*COMMAND, "generate", "hi", "--address", served.address], stdout=theirs, check=True, timeout=WAIT_S
        )
        shown = os.read(ours, 1000)
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown == b"a[2Jb\tc\r\n"  # the carriage return is the terminal's own
