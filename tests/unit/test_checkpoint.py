"""What a checkpoint says of itself, and one clear sentence for each that cannot serve."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from microtome.cuda_runtime.checkpoint import (
    SUPPORTED_ARCHITECTURES,
    Checkpoint,
    end_token_ids,
    find_checkpoint,
    fingerprint,
    load_tokenizer,
)
from microtome.cuda_runtime.model import load_model
from microtome.planner.errors import BadConfig
from tests.support.toy_model import VOCABULARY, toy_directory


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture
def toy(pristine: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "toy"))


def edit_config(toy: Path, **changes: object) -> None:
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(config | changes))


def test_a_directory_is_described_without_its_weights(toy: Path) -> None:
    (toy / "model.safetensors").write_bytes(b"never read")
    checkpoint = find_checkpoint(str(toy))
    assert (checkpoint.architecture, checkpoint.context_length) == ("llama", 1024)
    assert checkpoint.model_class == "LlamaForCausalLM"
    assert (checkpoint.vocab_size, checkpoint.name, checkpoint.path) == (VOCABULARY, "toy", toy.resolve())


@pytest.mark.parametrize("architecture", sorted(SUPPORTED_ARCHITECTURES))
def test_every_supported_architecture_has_the_name_of_the_class_that_the_library_builds(architecture: str) -> None:
    config = AutoConfig.for_model(architecture)
    checkpoint = Checkpoint(
        path=Path("/m"), name="m", architecture=architecture, context_length=8, vocab_size=8, config=config
    )
    assert checkpoint.model_class == AutoModelForCausalLM._model_mapping[type(config)].__name__


def test_the_tokenizer_round_trips_and_has_a_chat_template(toy: Path) -> None:
    tokenizer = load_tokenizer(find_checkpoint(str(toy)))
    text = "A thin slice; naïve 漢字."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(2, [2, 0], (0, 2)), (2, None, (2,)), ([5, 2], [7], (2, 5, 7)), (None, None, ())],
)
def test_end_tokens_come_from_both_configurations(
    toy: Path, in_config: object, in_generation_config: object, expected: tuple[int, ...]
) -> None:
    edit_config(toy, eos_token_id=in_config)
    if in_generation_config is None:
        (toy / "generation_config.json").unlink()
    else:
        (toy / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert end_token_ids(find_checkpoint(str(toy))) == expected


def test_the_fingerprint_follows_content_and_not_place(pristine: Path, toy: Path) -> None:
    before = fingerprint(find_checkpoint(str(toy)))
    assert before == fingerprint(find_checkpoint(str(pristine)))
    with (toy / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert fingerprint(find_checkpoint(str(toy))) != before


def break_nothing_there(toy: Path) -> Path:
    return toy / "absent"


def break_no_config(toy: Path) -> Path:
    (toy / "config.json").unlink()
    return toy


def break_config_is_no_json(toy: Path) -> Path:
    (toy / "config.json").write_text("{")
    return toy


def break_no_model_type(toy: Path) -> Path:
    (toy / "config.json").write_text("{}")
    return toy


def break_unsupported(toy: Path) -> Path:
    edit_config(toy, model_type="bert")
    return toy


def break_unheard_of(toy: Path) -> Path:
    edit_config(toy, model_type="perceptron9")
    return toy


def break_no_weights(toy: Path) -> Path:
    (toy / "model.safetensors").unlink()
    return toy


def break_not_gguf(toy: Path) -> Path:
    return toy / "tokenizer.json"


def break_short_gguf(toy: Path) -> Path:
    (toy / "short.gguf").write_bytes(b"GGUF\x03\x00")
    return toy / "short.gguf"


def break_nonsense_values(toy: Path) -> Path:
    edit_config(toy, hidden_size="wide")
    return toy


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (break_nothing_there, "no such file or directory"),
        (break_no_config, "holds no config.json"),
        (break_config_is_no_json, "config.json is not JSON"),
        (break_no_model_type, "names no model_type"),
        (break_unsupported, "architecture 'bert' is not supported; supported are arcee, cohere"),
        (break_unheard_of, "architecture 'perceptron9' is not supported"),
        (break_no_weights, "holds no weights"),
        (break_not_gguf, "neither a directory nor a GGUF file"),
        (break_short_gguf, "a GGUF file that can be read: it ends before its header does"),
        (break_nonsense_values, "configuration cannot be read"),
    ],
)
def test_what_cannot_serve_is_one_sentence_that_names_the_path(toy: Path, break_it: object, words: str) -> None:
    path = break_it(toy)  # type: ignore[operator]
    with pytest.raises(BadConfig, match=words) as caught:
        find_checkpoint(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_read_are_one_sentence(toy: Path) -> None:
    import torch

    (toy / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(BadConfig, match="weights cannot be loaded") as caught:
        load_model(find_checkpoint(str(toy)), device=torch.device("cpu"), dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_one_sentence(toy: Path) -> None:
    (toy / "tokenizer.json").write_text("{}")
    with pytest.raises(BadConfig, match="tokenizer cannot be read"):
        load_tokenizer(find_checkpoint(str(toy)))
