"""Compiled programs on a toy model: the same tokens as the library's code, made once, kept, and checked when read."""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from microtome.artifact_view import artifact_view
from microtome.cuda_runtime import artifact, build, ready_model
from microtome.cuda_runtime.checkpoint import end_token_ids, find_checkpoint, fingerprint, load_tokenizer
from microtome.cuda_runtime.executor import Executor, build_executor
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.planner.errors import BadConfig
from microtome.planner.types import SamplingParams
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

COUNT = 10
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def toy(folder: Path) -> Path:
    return toy_directory(folder)


def executor(model: Path, folder: Path, **options: object) -> Executor:
    defaults: dict[str, object] = {
        "model": str(model),
        "methods": "compiled",
        "artifact_folder": str(folder / "artifacts"),
        "kv_tokens": 1024,
        "max_step_tokens": 64,
        "widths": (1, 2, 4, 8),
        "max_sequences": 24,
    }
    return build_executor(RuntimeOptions(**(defaults | options)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(toy: Path, folder: Path) -> Path:
    """The artifact in the cache, made by the first start."""
    executor(toy, folder)
    (found,) = [path for path in (folder / "artifacts").iterdir() if path.is_dir()]
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(3)
    return [[random.randrange(3, VOCABULARY) for _ in range(width)] for width in (1, 2, 3, 9, 31, 90)]


def tokens_of(built: Executor, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone in chunks, then all of them in shared steps; half of them drawn."""
    driver = StepDriver(built)
    policies = [SamplingParams(), SamplingParams(temperature=1.0, seed=7)]
    alone = [
        driver.generate(driver.open(policies[index % 2]), prompt, COUNT, chunk=40)
        for index, prompt in enumerate(prompts)
    ]
    sequences = [driver.open(policies[index % 2]) for index in range(len(prompts))]
    together = [
        [token] for token in driver.step(*(Work(seq, prompt) for seq, prompt in zip(sequences, prompts, strict=True)))
    ]
    for _ in range(COUNT - 1):
        for tokens, token in zip(together, driver.step(*map(Work, sequences)), strict=True):
            tokens.append(token)
    assert together == alone
    return alone


def test_compiled_programs_give_the_tokens_of_the_librarys_code(
    made: Path, toy: Path, folder: Path, prompts: list[list[int]]
) -> None:
    eager = tokens_of(executor(toy, folder, methods="eager"), prompts)
    assert tokens_of(executor(toy, folder), prompts) == eager


def test_a_second_start_compiles_nothing_and_any_pool_fits(
    made: Path, toy: Path, folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_programs(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(ready_model, "compile_programs", compile_programs)
    first = tokens_of(executor(toy, folder), prompts)
    assert tokens_of(executor(toy, folder, kv_tokens=700, max_sequences=13), prompts) == first
    assert tokens_of(executor(toy, folder, widths=(1, 16)), prompts) == first  # a ladder is not part of a program
    with pytest.raises(AssertionError, match="compiled again"):
        executor(toy, folder, max_step_tokens=65)


def test_an_artifact_serves_by_its_path_without_its_checkpoint(
    made: Path, toy: Path, folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(made, tmp_path / "moved"))
    by_path, by_name = executor(moved, folder), executor(toy, folder)
    assert tokens_of(by_path, prompts) == tokens_of(by_name, prompts)
    assert by_path.describe().fingerprint == by_name.describe().fingerprint
    assert by_path.describe().model == toy.name
    checkpoint = find_checkpoint(str(moved))
    assert end_token_ids(checkpoint) == end_token_ids(find_checkpoint(str(toy)))
    assert (
        load_tokenizer(checkpoint)("the fox").input_ids
        == load_tokenizer(find_checkpoint(str(toy)))("the fox").input_ids
    )


@pytest.mark.parametrize("methods", ["compiled", "eager"])
def test_a_step_takes_no_copy_of_the_pool(made: Path, toy: Path, folder: Path, methods: str) -> None:
    """What is mutated through a compiler may be copied by it; the pool's untouched cells take no memory until then."""
    built = executor(toy, folder, methods=methods, kv_tokens=1_000_000)  # 128 MB in each of four tensors
    driver = StepDriver(built, scattered=False)  # a large page a cell would be a copy of its own
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before_kb = status_kb("VmHWM")
    driver.generate(driver.open(), list(range(3, 80)), 5)
    assert status_kb("VmHWM") - before_kb < 64_000


def status_kb(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def test_weights_are_held_once_for_all_methods(
    made: Path, toy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ready_model.ReadyModel] = []
    original = build.ready_model

    def watched(*arguments: object, **keywords: object) -> ready_model.ReadyModel:
        seen.append(original(*arguments, **keywords))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(build, "ready_model", watched)
    executor(toy, folder)
    decode, prefill = seen[0].decode.weights, seen[0].prefill.weights  # type: ignore[attr-defined]
    assert {name: weight.data_ptr() for name, weight in decode.items()} == {
        name: weight.data_ptr() for name, weight in prefill.items()
    }
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in decode.values()}
    parameters = sum(weight.nbytes for weight in decode.values())
    assert sum(storages.values()) <= parameters + 64 * len(decode) + (4 << 20)  # one arena, on whole large pages


def test_inspect_shows_geometry_files_and_what_each_method_costs(made: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(artifact_view(made, threads=1))
    shown = console.export_text()
    for words in ("2 x 2 key/value heads x 16, no window", "decode.pt2", "weights.safetensors", "max_step_tokens  64"):
        assert words in shown
    assert re.search(r"forward_1 +1 +\d+", shown)
    assert re.search(r"forward_others +2 to 64 +[\d,]+ \+ \d+\.\d a token", shown)


def altered(found: Path) -> None:
    with (found / "prefill.pt2").open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))


def truncated(found: Path) -> None:
    with (found / "weights.safetensors").open("r+b") as stream:
        stream.truncate(5000)


def incomplete(found: Path) -> None:
    (found / "decode.pt2").unlink()


def not_json(found: Path) -> None:
    (found / "manifest.json").write_text("{")


def edited(found: Path, **changes: object) -> None:
    """Changed by somebody who knows how to sign it."""
    fields = json.loads((found / "manifest.json").read_text())
    fields.pop("digest")
    fields |= changes
    (found / "manifest.json").write_text(json.dumps(fields | {"digest": artifact._digest_of(fields)}))


def unsigned(found: Path) -> None:
    text = (found / "manifest.json").read_text()
    (found / "manifest.json").write_text(text.replace('"vocab_size": 320', '"vocab_size": 321'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (altered, "check 'content': prefill.pt2 was altered"),
        (truncated, "check 'size': weights.safetensors has 5000 bytes"),
        (incomplete, "check 'files': decode.pt2 is missing"),
        (not_json, "check 'manifest': it is not JSON"),
        (unsigned, "check 'manifest': its digest does not match"),
        (lambda found: edited(found, format=3), "check 'format': it is of format 3, this reads 2"),
        (lambda found: edited(found, torch="1.0"), "check 'torch version': it was made for 1.0"),
        (lambda found: edited(found, machine="cpu vax"), "check 'machine': it was made for cpu vax"),
        (lambda found: edited(found, quantize="int3"), "check 'quantize': int3 cannot be"),
        (lambda found: edited(found, vocab_size=0), "check 'vocab_size'"),
        (lambda found: edited(found, layers=[]), "check 'layers'"),
        (lambda found: edited(found, max_step_tokens=1), "check 'max_step_tokens'"),
        (lambda found: edited(found, session_tokens=99999), "check 'session_tokens'"),
    ],
)
def test_a_damaged_or_foreign_artifact_is_refused_by_the_check_that_failed(
    made: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    broken = Path(shutil.copytree(made, tmp_path / "broken"))
    artifact.read(broken, CPU)  # sound until now
    damage(broken)
    with pytest.raises(BadConfig, match=words):
        artifact.read(broken, CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "it is of dtype float32, not bfloat16"),
        ({"quantize": "int8"}, "its weights are of quantize none, not int8"),
        ({"max_step_tokens": 65}, "it takes steps of 64 tokens, not of 65"),
    ],
)
def test_options_that_do_not_fit_a_named_artifact_are_refused(
    made: Path, folder: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadConfig, match=words):
        executor(made, folder, **options)


def test_weights_of_8_bits_are_kept_as_such_and_give_the_tokens_of_eager_code(
    toy: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    options = RuntimeOptions(model=str(toy), quantize="int8", max_step_tokens=64, widths=(1, 2, 4, 8))
    made = tmp_path / "rounded"
    build.export(options, made)
    with safe_open(made / artifact.WEIGHTS, framework="pt") as stored:
        kept = {name: stored.get_slice(name).get_dtype() for name in list(stored.keys())}
    numbers = [dtype for name, dtype in kept.items() if name.endswith("_proj.numbers")]
    assert numbers == ["I8"] * 14  # seven layers of two blocks
    assert not [name for name in kept if name.endswith("_proj.weight")]
    compiled = executor(made, tmp_path)
    assert tokens_of(compiled, prompts) == tokens_of(executor(toy, tmp_path, quantize="int8", methods="eager"), prompts)
    assert compiled.describe().fingerprint != fingerprint(find_checkpoint(str(toy)))
    with pytest.raises(BadConfig, match="its weights are of quantize int8, not none"):
        executor(made, tmp_path, quantize="none")


def test_nothing_half_is_left_where_compilation_fails(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_programs(request: object, folder: Path) -> None:
        (folder / "decode.pt2").write_bytes(b"half")
        raise BadConfig("no compiler")

    monkeypatch.setattr(ready_model, "compile_programs", compile_programs)
    with pytest.raises(BadConfig, match="no compiler"):
        executor(toy, tmp_path)
    assert [path for path in (tmp_path / "artifacts").rglob("*") if path.suffix != ".lock"] == []
