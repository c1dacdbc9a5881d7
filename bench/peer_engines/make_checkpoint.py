"""A GGUF file as a Hugging Face directory in bfloat16, which every other engine can load or convert.

`python make_checkpoint.py FILE.gguf DIRECTORY`. Runs in an environment of transformers' own. The file's quantised
weights are widened, so all engines start from the same numbers. Beside what the library writes, the directory gets what
older readers look for: the rotary base and dtype under their former names, and a tokenizer description with the chat
template in it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

ROTARY_BASE = 100_000.0
NORM_EPSILON = 1e-5
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def convert(source: Path, target: Path) -> None:
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    widened = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=widened)
    model.hf_quantizer = None  # they are plain weights now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = NORM_EPSILON
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

    config = _read(target / "config.json")
    config.pop("_name_or_path", None)
    _write(
        target / "config.json", config | {"rope_theta": ROTARY_BASE, "rope_scaling": None, "torch_dtype": "bfloat16"}
    )
    _write(target / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    said = _read(target / "tokenizer_config.json")
    described = {
        **{name: said[name] for name in TOKEN_NAMES},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": (target / "chat_template.jinja").read_text(),
    }
    _write(target / "tokenizer_config.json", described)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
