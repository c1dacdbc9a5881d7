"""Every family's logits over cells against the library's own eager attention over whole sequences, in float32.

Compared are the logits of every token, by the largest difference relative to the largest logit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from microtome.cuda_runtime.attention.registry import default_attention, get_attention
from microtome.cuda_runtime.checkpoint import SUPPORTED_ARCHITECTURES, find_checkpoint
from microtome.cuda_runtime.model import CellModel, LayerGeometry, load_model, read_geometry
from tests.support.cell_runner import CPU, CellRunner
from tests.support.families import FAMILIES, VOCABULARY, Family, family_directory

TOLERANCE = 1e-4

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
    chunks = [runner.forward((0, FIRST[begin:end]))[0] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
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


def test_every_supported_architecture_is_in_the_table() -> None:
    assert {family.architecture for family in FAMILIES.values()} == SUPPORTED_ARCHITECTURES
