"""The solo command's prompts and what it says of their answers, over a toy model."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from microtome.errors import InvalidRequest
from microtome.local import configuration
from microtome.sampling import request_of
from microtome.solo_run import Solo, read_prompts
from microtome.v1 import generation_pb2 as pb
from tests.support.toy_model import toy_directory


def prompts_file(folder: Path, text: str) -> Path:
    file = folder / "prompts.txt"
    file.write_text(text)
    return file


def test_a_line_is_a_prompt_and_an_empty_one_is_none(tmp_path: Path) -> None:
    asked = read_prompts(prompts_file(tmp_path, "one\n\ntwo words\n"), {"max_new_tokens": 5, "seed": None})
    assert asked == [pb.GenerateRequest(text=text, max_new_tokens=5) for text in ("one", "two words")]


def test_a_json_line_says_what_it_wants_and_takes_the_rest_from_the_options(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "max_new_tokens": 2},
        {"messages": [{"role": "user", "content": "two"}], "temperature": 0.5},
        {"token_ids": [1, 2]},
    ]
    file = prompts_file(tmp_path, "\n".join(map(json.dumps, lines)))
    one, two, three = read_prompts(file, {"max_new_tokens": 5, "seed": 7})
    assert one == pb.GenerateRequest(text="one", max_new_tokens=2, seed=7)
    assert (two.chat.messages[0].content, two.temperature, two.max_new_tokens) == ("two", 0.5, 5)
    assert three.token_ids.ids == [1, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('one\n{"prompt": "two"', "line 2 is not JSON: "),
        (
            '{"prompt": "a", "token_ids": [1]}',
            "line 1: give one of prompt, messages and token_ids, not prompt",
        ),
        ('{"prompt": "a", "max_tokens": 1}', "line 1: there is no option 'max_tokens'"),
        ('{"prompt": "a", "seed": -1}', "line 1: seed must be 0 to"),
        ("\n\n", "hold no line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(prompts_file(tmp_path, text), {})
    assert told in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts '.*nothing\.txt' cannot be read"):
        read_prompts(tmp_path / "nothing.txt", {})


def test_without_a_file_the_demos_chats_are_asked() -> None:
    asked = read_prompts(None, {"temperature": 0.5, "max_new_tokens": None})
    assert len(asked) == 8
    assert {request.temperature for request in asked} == {0.5}
    assert len({request.max_new_tokens for request in asked}) > 1


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    model = toy_directory(tmp_path_factory.mktemp("models"))
    settings: dict[str, Any] = {
        "model": str(model),
        "runtime.kv_tokens": 512,
        "runtime.max_step_tokens": 64,
        "runtime.widths": (1, 8),
        "runtime.threads": 1,
    }
    return Solo(configuration(settings))


def test_each_prompt_is_answered_and_a_bad_one_has_its_error(solo: Solo) -> None:
    asked = [
        request_of("the quick brown", None, None, {"max_new_tokens": 5, "ignore_eos": True}),
        request_of("x", None, None, {"temperature": -1}),
        request_of(None, None, [1, 2, 3], {"max_new_tokens": 2, "ignore_eos": True}),
    ]
    report = solo.answer(asked)
    good, bad, ids = report.said
    assert (len(good.token_ids), good.finish, good.error, good.prompt) == (5, "length", "", "the quick brown")
    assert good.ttft_ms is not None
    assert good.ttft_ms > 0
    assert (bad.token_ids, bad.finish, bad.error) == ([], "failed", "temperature -1 is not a number of 0 or more")
    assert (ids.prompt_tokens, len(ids.token_ids), ids.prompt) == (3, 2, "1 2 3")
    assert report.output_tokens == 7
    assert sum(report.engine.forwards.values()) > 0
    assert report.engine.tokens_run >= 9 + 3 + 7 - 2  # both prompts, and every output but the last of each


def test_answers_are_the_same_alone_and_together(solo: Solo) -> None:
    asked = [request_of(f"once upon {n}", None, None, {"max_new_tokens": 6, "ignore_eos": True}) for n in range(5)]
    together = [said.token_ids for said in solo.answer(asked).said]
    one_by_one = [said.token_ids for said in solo.answer(asked, concurrency=1).said]
    assert together == one_by_one


def test_the_report_shows_everything_and_is_the_same_as_json(solo: Solo) -> None:
    asked = [request_of("hello\x1b[2J", None, None, {"max_new_tokens": 3, "ignore_eos": True, "seed": 9})]
    report = solo.answer(asked)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(report.view())
    shown = captured.get()
    for fact in ("1  hello[2J", "length", "3 output tokens in", "tokens/s", "steps of", "forwards: "):
        assert fact in shown
    assert "\x1b[2J" not in shown
    told = json.loads(json.dumps(report.as_dict()))
    assert told["generations"][0]["token_ids"] == report.said[0].token_ids
    assert told["generations"][0]["seed"] == 9
    assert told["engine"]["steps"] == report.engine.steps
