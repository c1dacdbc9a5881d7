"""Every family's logits over cells against the library's own eager attention over whole sequences, in float32.

Compared are the logits of every token, by the largest difference relative to the largest logit.
"""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.checkpoint import SUPPORTED_ARCHITECTURES, SUPPORTED_GGUF_ARCHITECTURES, find_checkpoint
from microtome.cuda_runtime.model import CellModel, LayerGeometry, attend_over_cells, load_model, read_geometry
from microtome.planner.errors import BadConfig
from tests.support.cell_runner import CPU, CellRunner
from tests.support.families import FAMILIES, VOCABULARY, Family, family_directory
from tests.support.gguf_family import gguf_file
from tests.support.stubs import ROOT

TOLERANCE = 2e-5

_random = Random(11)
FIRST, SECOND, THIRD = ([_random.randrange(2, VOCABULARY) for _ in range(length)] for length in (41, 23, 30))


@dataclass(frozen=True)
class Subject:
    """One family, loaded twice: by us, and by the library with its own attention."""

    family: Family
    causal_lm: nn.Module
    layers: tuple[LayerGeometry, ...]
    library: nn.Module

    def runner(self) -> CellRunner:
        return CellRunner(CellModel(self.causal_lm, get_attention(default_attention(CPU))), self.layers)

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int]) -> Tensor:
        """[T, V]"""
        logits: Tensor = self.library(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = family_directory(tmp_path_factory.mktemp("families"), request.param)
    causal_lm = load_model(find_checkpoint(str(directory)), device=CPU, dtype=torch.float32)
    library = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    return Subject(FAMILIES[request.param], causal_lm, read_geometry(causal_lm, CPU), library)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())  # NaN where anything is


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert error(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("bounds", [(0, 41), (0, 5, 30, 41)], ids=["one chunk", "three chunks"])
def test_a_prompts_logits_are_the_librarys(subject: Subject, bounds: tuple[int, ...]) -> None:
    runner = subject.runner()
    chunks = [runner.forward((0, FIRST[begin:end]))[0] for begin, end in pairwise(bounds)]
    assert_equal(torch.cat(chunks), subject.expected(FIRST))


def test_decoded_tokens_logits_are_the_librarys(subject: Subject) -> None:
    runner = subject.runner()
    runner.forward((0, FIRST[:20]))
    decoded = [runner.forward((0, [token]))[0] for token in FIRST[20:]]
    assert_equal(torch.cat(decoded), subject.expected(FIRST)[20:])


def test_sequences_in_one_forward_have_the_logits_they_have_alone(subject: Subject) -> None:
    """Decodes, a chunk and the start of a prompt, in an order in which none is next to what it was next to before."""
    runner = subject.runner()
    runner.forward((0, FIRST[:33]), (1, SECOND[:4]))
    chunk, start, decode = runner.forward((1, SECOND[4:22]), (2, THIRD[:9]), (0, FIRST[33:34]))
    rest, last, end = runner.forward((0, FIRST[34:35]), (1, SECOND[22:]), (2, THIRD[9:]))
    first, second, third = map(subject.expected, (FIRST, SECOND, THIRD))
    assert_equal(torch.cat((decode, rest)), first[33:35])
    assert_equal(torch.cat((chunk, last)), second[4:])
    assert_equal(torch.cat((start, end)), third)


def test_a_clone_goes_on_from_what_it_shares(subject: Subject) -> None:
    runner = subject.runner()
    runner.forward((0, FIRST[:30]))
    runner.clone(0, 3, 17)
    child = FIRST[:17] + THIRD[:12]
    ours, source = runner.forward((3, THIRD[:11]), (0, FIRST[30:33]))
    decoded, after = runner.forward((3, THIRD[11:12]), (0, FIRST[33:34]))
    assert_equal(torch.cat((ours, decoded)), subject.expected(child)[17:])
    assert_equal(torch.cat((source, after)), subject.expected(FIRST[:34])[30:])


def test_a_rewound_sequence_goes_on_as_if_it_had_never_held_more(subject: Subject) -> None:
    runner = subject.runner()
    runner.forward((0, FIRST[:25]))
    runner.truncate(0, 13)
    again = [runner.forward((0, SECOND[:8]))[0], *(runner.forward((0, [token]))[0] for token in SECOND[8:12])]
    assert_equal(torch.cat(again), subject.expected(FIRST[:13] + SECOND[:12])[13:])


class Watched:
    """Notes what a model's layers ask of attention."""

    name = "watched"

    def __init__(self) -> None:
        self.asked: list[tuple[int, float, float, bool]] = []
        self._attention = get_attention("reference")

    def update_and_attend(self, *tensors: Tensor, **how: Any) -> Tensor:
        self.asked.append((how["window"], how["scale"], how["softcap"], how["sinks_N"] is not None))
        return self._attention.update_and_attend(*tensors, **how)


def test_every_layer_asks_for_its_familys_window_scale_cap_and_sinks(subject: Subject) -> None:
    watched = Watched()
    CellRunner(CellModel(subject.causal_lm, watched), subject.layers).forward((0, FIRST[:2]))  # type: ignore[arg-type]
    family = subject.family
    assert watched.asked == [
        (window, pytest.approx(family.scale), family.softcap, family.sinks) for window in family.windows
    ]
    assert tuple(layer.window for layer in subject.layers) == family.windows


def test_every_supported_architecture_is_tested_and_on_its_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| [^|]+ \| `(\w+)` \|", page, re.MULTILINE)
    assert {family.architecture for family in FAMILIES.values()} == SUPPORTED_ARCHITECTURES
    assert sorted(listed) == sorted(SUPPORTED_ARCHITECTURES)
    assert re.findall(r"GGUF: `(\w+)`, `(\w+)`, `(\w+)`", page) == [tuple(sorted(SUPPORTED_GGUF_ARCHITECTURES))]


def test_tokens_turn_by_their_own_position_whatever_shares_the_forward(tmp_path: Path) -> None:
    """Scaled for long texts, the library turns by other frequencies where any position of a forward is large."""
    checkpoint = find_checkpoint(str(family_directory(tmp_path, "phi3, long positions")))
    library = AutoModelForCausalLM.from_pretrained(checkpoint.path, attn_implementation="eager").eval()

    def subject_for(session_tokens: int | None) -> Subject:
        causal_lm = load_model(checkpoint, device=CPU, dtype=torch.float32, session_tokens=session_tokens)
        return Subject(FAMILIES["phi3, long positions"], causal_lm, read_geometry(causal_lm, CPU), library)

    short, long = subject_for(16), subject_for(None)
    assert_equal(short.runner().forward((0, FIRST[:16]))[0], short.expected(FIRST[:16]))  # sixteen is its short range
    alone = long.runner().forward((0, FIRST[:16]))[0]
    in_company = long.runner().forward((0, FIRST[:16]), (1, THIRD))[0]
    assert_equal(in_company, alone)
    assert error(alone, short.expected(FIRST[:16])) > 1e-2  # of a session that may grow: as it would be when grown


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning:torch.*")  # torch's own
@pytest.mark.parametrize(
    "name", ["llama, dynamic positions", "phi3, long positions", "gemma3", "gpt_oss", "granitemoe", "qwen3_moe", "gpt2"]
)
def test_a_familys_forward_is_one_program_that_reads_nothing_back(tmp_path: Path, name: str) -> None:
    """Those whose code chooses: by position, by layer, by expert. A choice made on the host could not be captured."""
    causal_lm = load_model(find_checkpoint(str(family_directory(tmp_path, name))), device=CPU, dtype=torch.float32)
    model = CellModel(causal_lm, get_attention("reference"))
    runner = CellRunner(model, read_geometry(causal_lm, CPU))
    arguments = (*runner.columns((0, FIRST[:5])), runner.rows.device, runner.pool.k, runner.pool.v)
    with torch.no_grad():
        program = torch.export.export(model, arguments)  # raises where a shape or a branch depends on numbers
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("microtome.update_and_attend_reference.default") == len(FAMILIES[name].windows)
    assert [target for target in called if "_local_scalar_dense" in target or "nonzero" in target] == []


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen2", "qwen3, GGUF's head size"])
def test_a_gguf_file_has_the_logits_of_the_directory_it_was_made_from(tmp_path: Path, name: str) -> None:
    directory = family_directory(tmp_path, name)
    library = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    checkpoint = find_checkpoint(str(gguf_file(directory)))
    causal_lm = load_model(checkpoint, device=CPU, dtype=torch.float32)
    subject = Subject(FAMILIES[name], causal_lm, read_geometry(causal_lm, CPU), library)
    assert_equal(subject.runner().forward((0, FIRST))[0], subject.expected(FIRST))


# What is not here, by what it is, and the words that say so.
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "architecture 't5' is not supported"),  # encoder and decoder
        ({"model_type": "whisper"}, "architecture 'whisper' is not supported"),
        ({"model_type": "mamba2"}, "architecture 'mamba2' is not supported"),  # a state instead of keys and values
        ({"model_type": "jamba"}, "architecture 'jamba' is not supported"),  # half and half
        ({"model_type": "qwen3_next"}, "architecture 'qwen3_next' is not supported"),
        ({"model_type": "gemma3"}, "architecture 'gemma3' is not supported"),  # with pictures
        ({"model_type": "llava"}, "architecture 'llava' is not supported"),
        ({"model_type": "deepseek_v3"}, "architecture 'deepseek_v3' is not supported"),  # latent attention
        ({"model_type": "bloom"}, "architecture 'bloom' is not supported"),  # past the attention interface
        ({"model_type": "phimoe"}, "architecture 'phimoe' is not supported"),  # windows in its mask alone
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification",
        ),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, "its class Qwen3Model does not continue text"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attend to what follows them"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "attends to an encoder's output"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_cannot_serve_is_refused_by_name_before_weights_are_read(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(BadConfig, match=words) as caught:
        find_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_gguf_file_of_what_the_library_misreads_is_refused_by_name(tmp_path: Path) -> None:
    directory = family_directory(tmp_path, "llama")
    for architecture in ("mamba", "gemma2", "phi3", "deepseek2"):
        with pytest.raises(
            BadConfig, match=f"GGUF architecture '{architecture}' is not supported; supported are llama"
        ):
            find_checkpoint(str(gguf_file(directory, architecture=architecture)))
    with pytest.raises(BadConfig, match="its rotary positions are scaled"):
        find_checkpoint(str(gguf_file(directory, scaling="yarn")))


def test_a_gguf_file_with_tensors_that_the_library_drops_is_refused(tmp_path: Path) -> None:
    directory = family_directory(tmp_path, "smollm2")
    biases = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(64) for layer in range(2)}
    save_file(load_file(directory / "model.safetensors") | biases, directory / "model.safetensors")
    checkpoint = find_checkpoint(str(gguf_file(directory)))
    with pytest.raises(BadConfig, match="it holds 22 tensors, of which the library takes 20"):
        load_model(checkpoint, device=CPU, dtype=torch.float32)


def test_models_are_built_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library exchanges methods of its own classes meanwhile."""
    checkpoint = find_checkpoint(str(family_directory(tmp_path, "smollm2")))
    build, tie = AutoModelForCausalLM.from_pretrained, PreTrainedModel.tie_weights
    meeting = Barrier(2)

    def slow_build(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(BrokenBarrierError):  # nobody else comes while this one is building
            meeting.wait(timeout=0.2)
        meeting.reset()
        return build(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow_build)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load_model, checkpoint, device=CPU, dtype=torch.float32) for _ in range(2)]
    for load in loads:
        assert load.result().lm_head.weight is load.result().model.embed_tokens.weight
    assert PreTrainedModel.tie_weights is tie


def test_a_gguf_file_whose_head_size_the_library_cannot_know_is_refused(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(str(gguf_file(family_directory(tmp_path, "qwen3"))))
    with pytest.raises(BadConfig, match="its weights cannot be loaded"):
        load_model(checkpoint, device=CPU, dtype=torch.float32)


def test_weights_that_a_checkpoint_lacks_are_not_made_up(tmp_path: Path) -> None:
    directory = family_directory(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadConfig, match=r"1 of its weights are missing, such as lm_head\.weight"):
        load_model(find_checkpoint(str(directory)), device=CPU, dtype=torch.float32)


class Bypassing(nn.Module):
    """Attention of its own making."""

    def forward(self, input_ids: Tensor, **keywords: Any) -> Tensor:
        return input_ids


class Latent(nn.Module):
    """Values narrower than keys."""

    layer_idx = 0

    def forward(self, input_ids: Tensor, **keywords: Any) -> Tensor:
        wide, narrow = torch.zeros(1, 2, 1, 24), torch.zeros(1, 2, 1, 16)
        return attend_over_cells(self, wide, wide, narrow, None, **keywords)[0]


@pytest.mark.parametrize(
    ("model", "words"),
    [(Bypassing(), "Bypassing computes attention without the library's"), (Latent(), "K and V differ in shape")],
)
def test_a_model_whose_layers_fit_no_pool_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        read_geometry(model, CPU)
