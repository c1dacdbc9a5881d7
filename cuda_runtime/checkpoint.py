"""Finds a model on disk and says what it is, without reading its weights.

A checkpoint is a Hugging Face directory (config.json, weights, tokenizer) or one GGUF file. Reading configuration and
tokenizer is the transformers library's work; whatever it or the disk says against it becomes one `BadConfig` sentence.
Nothing here touches the network.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microtome.cuda_runtime.gguf_header import read_gguf_header
from microtome.planner.errors import BadConfig

# transformers' model types whose attention goes through its attention interface, and for which the tests compare our
# logits with the library's own.
SUPPORTED_ARCHITECTURES = frozenset({
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "helium",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
})  # fmt: skip

# GGUF's architectures whose files the library turns into the model they were made from; of the others it drops what
# attention needs (windows, factors), and of all of them the scaling of rotary positions.
SUPPORTED_GGUF_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is known of a model before its weights are read."""

    path: Path  # absolute: the directory, or the .gguf file
    name: str  # how it is shown to users: the path's last part
    architecture: str  # transformers' model type, such as "llama"
    context_length: int  # tokens
    vocab_size: int
    config: Any  # transformers.PretrainedConfig of the text model

    @property
    def model_class(self) -> str:
        """Name of the library's class for it, such as "LlamaForCausalLM". No class is loaded."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.architecture]
        return name if isinstance(name, str) else str(name[0])

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def source(self) -> tuple[str, dict[str, Any]]:
        """The first argument and the keywords of transformers' `from_pretrained`."""
        if self.is_gguf:
            return str(self.path.parent), {"gguf_file": self.path.name}
        return str(self.path), {"local_files_only": True}


def find_checkpoint(model: str) -> Checkpoint:
    """The checkpoint at path `model`. Raises `BadConfig`: missing, unreadable, or of an unsupported architecture."""
    path = check_files(model)
    source: tuple[str, dict[str, Any]] = (str(path), {"local_files_only": True})
    if path.is_file():
        source = (str(path.parent), {"gguf_file": path.name})
    config = _config(path, source)
    _check_architecture(path, config.model_type)
    context_length = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_length, int) or context_length < 1:
        raise BadConfig(f"model {path}: its configuration names no context length (max_position_embeddings)")
    return Checkpoint(
        path=path,
        name=path.name,
        architecture=config.model_type,
        context_length=context_length,
        vocab_size=config.vocab_size,
        config=config,
    )


def check_files(model: str) -> Path:
    """The absolute path of a directory or GGUF file that looks like a model to serve; in milliseconds, no library.

    Raises `BadConfig`, as `find_checkpoint` would.
    """
    path = Path(model).expanduser()
    try:
        path = path.resolve()
        exists, is_file = path.exists(), path.is_file()
    except OSError as error:
        raise BadConfig(f"model {model}: {error.strerror or error}") from error
    if not exists:
        raise BadConfig(f"model {model}: no such file or directory")
    if is_file:
        _check_gguf(path)
    else:
        _check_directory(path)
    return path


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's transformers tokenizer. Raises `BadConfig` when it has none that can be read."""
    from transformers import AutoTokenizer

    where, keywords = checkpoint.source
    try:
        return AutoTokenizer.from_pretrained(where, **keywords)
    except Exception as error:  # the library raises whatever its parsers raise
        raise BadConfig(f"model {checkpoint.path}: its tokenizer cannot be read: {_first_line(error)}") from error


def end_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The tokens that end a text, ascending: of the configuration and of generation_config.json. May be empty."""
    from transformers import GenerationConfig

    found: set[int] = set()
    sources = [checkpoint.config]
    if not checkpoint.is_gguf and (checkpoint.path / "generation_config.json").is_file():
        try:
            sources.append(GenerationConfig.from_pretrained(str(checkpoint.path), local_files_only=True))
        except Exception as error:
            raise BadConfig(
                f"model {checkpoint.path}: generation_config.json cannot be read: {_first_line(error)}"
            ) from error
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


def fingerprint(checkpoint: Checkpoint) -> str:
    """64 hex digits over configuration and weights, read whole: equal means interchangeable."""
    digest = hashlib.sha256()
    try:
        for file in _content(checkpoint.path):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise BadConfig(f"model {checkpoint.path}: {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _content(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [path / "config.json", *_weight_files(path)]


def _weight_files(path: Path) -> list[Path]:
    """Of the first pattern that has any: what transformers would load."""
    for pattern in WEIGHT_PATTERNS:
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _check_gguf(path: Path) -> None:
    try:
        header = read_gguf_header(path)
    except OSError as error:
        raise BadConfig(f"model {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadConfig(f"model {path}: neither a directory nor a GGUF file that can be read: {error}") from error
    architecture = header.architecture
    _check_architecture(path, architecture, SUPPORTED_GGUF_ARCHITECTURES, "GGUF architecture")
    scaling = header.fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise BadConfig(
            f"model {path}: its rotary positions are scaled, which the library does not read from GGUF; "
            "use the model's Hugging Face directory"
        )


def _check_directory(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise BadConfig(f"model {path}: the directory holds no config.json") from error
    except OSError as error:
        raise BadConfig(f"model {path}: config.json: {error.strerror}") from error
    except ValueError as error:
        raise BadConfig(f"model {path}: config.json is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadConfig(f"model {path}: config.json names no model_type")
    _check_architecture(path, config["model_type"])  # before the library, whose own message is a paragraph
    _check_purpose(path, config)
    if not _weight_files(path):
        raise BadConfig(f"model {path}: the directory holds no weights ({' or '.join(WEIGHT_PATTERNS)})")


def _check_architecture(
    path: Path, architecture: str, supported: frozenset[str] = SUPPORTED_ARCHITECTURES, what: str = "architecture"
) -> None:
    if architecture not in supported:
        names = ", ".join(sorted(supported))
        raise BadConfig(f"model {path}: {what} {architecture!r} is not supported; supported are {names}")


def _check_purpose(path: Path, config: dict[str, Any]) -> None:
    """A supported architecture may be put to another use, which its tensors do not show."""
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and not any(str(name).endswith(CAUSAL_CLASSES) for name in classes):
        raise BadConfig(f"model {path}: its class {classes[0]} does not continue text; one of …ForCausalLM does")
    if config.get("use_bidirectional_attention"):
        raise BadConfig(f"model {path}: its tokens attend to what follows them (use_bidirectional_attention)")
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise BadConfig(f"model {path}: its decoder attends to an encoder's output, and there is no encoder here")


def _config(path: Path, source: tuple[str, dict[str, Any]]) -> Any:
    from transformers import AutoConfig

    where, keywords = source
    try:
        return AutoConfig.from_pretrained(where, **keywords)
    except Exception as error:  # the library raises whatever its parsers raise; an unknown architecture is named there
        raise BadConfig(f"model {path}: its configuration cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
