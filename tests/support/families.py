"""Tiny models with random weights, one per family the runtime serves, as ordinary Hugging Face directories.

Weights are spread so that what distinguishes a family is felt in its logits: norms away from one, biases away from
zero, attention sharp enough for a window, a cap or a sink to move it. A model has a few layers of 64 and 97 tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from microtome.cuda_runtime.checkpoint import Checkpoint

VOCABULARY = 97
CONTEXT = 256  # tokens

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
)
_DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}


@dataclass(frozen=True)
class Family:
    """What one configuration asks of attention, layer by layer, and the fields that say so."""

    architecture: str  # transformers' model type
    windows: tuple[int, ...] = (0, 0)  # per layer; 0: none
    scale: float = 0.25  # the logits' factor
    softcap: float = 0.0
    sinks: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, beside the common ones


def _fields(**fields: Any) -> Mapping[str, Any]:
    return MappingProxyType(fields)


_SLIDING, _FULL = "sliding_attention", "full_attention"

# A window below 9 is shorter than any sequence of the tests, one of 200 longer than all.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("llama"),
        "llama, head size of its own, biases": Family(
            "llama",
            scale=32**-0.5,
            fields=_fields(head_dim=32, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
        ),
        "llama, llama3 positions": Family("llama", fields=_fields(rope_parameters=_LLAMA3)),
        "llama, yarn positions": Family("llama", fields=_fields(rope_parameters=_YARN)),
        "llama, linear positions": Family(
            "llama", fields=_fields(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
        ),
        "llama, dynamic positions": Family(
            "llama", fields=_fields(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0})
        ),
        "smollm2": Family("llama", fields=_fields(tie_word_embeddings=True, num_key_value_heads=4)),
        "smollm3": Family("smollm3", fields=_fields(no_rope_layers=[1, 0], tie_word_embeddings=True)),
        "qwen2": Family("qwen2"),
        "qwen2, windows": Family(
            "qwen2",
            windows=(0, 7),
            fields=_fields(use_sliding_window=True, sliding_window=7, max_window_layers=1),
        ),
        "qwen3": Family("qwen3", scale=32**-0.5, fields=_fields(head_dim=32)),
        "qwen3, GGUF's head size": Family("qwen3", scale=128**-0.5, fields=_fields(head_dim=128)),
        "qwen3, windows": Family(
            "qwen3",
            windows=(0, 7),
            fields=_fields(head_dim=16, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        ),
        "mistral": Family("mistral", fields=_fields(head_dim=16, sliding_window=None)),
        "mistral, short window": Family("mistral", windows=(8, 8), fields=_fields(head_dim=16, sliding_window=8)),
        "mistral, long window": Family("mistral", windows=(200, 200), fields=_fields(sliding_window=200)),
        "gemma2": Family(
            "gemma2",
            windows=(6, 0),
            scale=24**-0.5,
            softcap=2.0,
            fields=_fields(
                head_dim=16,
                query_pre_attn_scalar=24,
                sliding_window=6,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=5.0,
            ),
        ),
        "gemma2, long window": Family(
            "gemma2",
            windows=(200, 0),
            softcap=50.0,
            fields=_fields(head_dim=16, query_pre_attn_scalar=16, sliding_window=200),
        ),
        "gemma3": Family(
            "gemma3_text",
            windows=(5, 0, 5),
            scale=24**-0.5,
            fields=_fields(
                head_dim=16,
                num_hidden_layers=3,
                num_key_value_heads=1,
                query_pre_attn_scalar=24,
                sliding_window=5,
                layer_types=[_SLIDING, _FULL, _SLIDING],
                final_logit_softcapping=5.0,
                rope_parameters={
                    _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                    _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                },
            ),
        ),
        "gemma3, long window": Family(
            "gemma3_text",
            windows=(200, 0),
            fields=_fields(head_dim=16, query_pre_attn_scalar=16, sliding_window=200, layer_types=[_SLIDING, _FULL]),
        ),
        "phi3": Family("phi3", fields=_fields(sliding_window=None)),
        "phi3, window, partial rotary": Family(
            "phi3",
            windows=(8, 8),
            fields=_fields(
                sliding_window=8,
                rope_parameters=_DEFAULT | {"partial_rotary_factor": 0.75},
            ),
        ),
        "phi3, long positions": Family(
            "phi3",
            fields=_fields(
                sliding_window=None,
                original_max_position_embeddings=16,
                rope_parameters=_LONGROPE | {"partial_rotary_factor": 0.75},
            ),
        ),
        "gpt_neox": Family(
            "gpt_neox",
            fields=_fields(
                rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
            ),
        ),
        "gpt_neox, sequential, whole rotary": Family(
            "gpt_neox",
            fields=_fields(
                use_parallel_residual=False,
                attention_bias=False,
                rope_parameters=_DEFAULT | {"partial_rotary_factor": 1.0},
            ),
        ),
        "olmo2": Family("olmo2"),
        "gpt_oss": Family(
            "gpt_oss",
            windows=(8, 0),
            sinks=True,
            scale=32**-0.5,
            fields=_fields(
                head_dim=32, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN
            ),
        ),
        "gpt_oss, long window": Family(
            "gpt_oss",
            windows=(200, 0),
            sinks=True,
            fields=_fields(
                head_dim=16, sliding_window=200, num_local_experts=3, num_experts_per_tok=1, rope_parameters=_YARN
            ),
        ),
        "arcee": Family("arcee"),
        "cohere": Family("cohere", fields=_fields(logit_scale=0.5, use_qk_norm=True)),
        "cohere2": Family("cohere2", windows=(7, 0), fields=_fields(sliding_window=7, layer_types=[_SLIDING, _FULL])),
        "ernie4_5": Family("ernie4_5", fields=_fields(head_dim=16, use_bias=True)),
        "exaone4": Family("exaone4", windows=(7, 0), fields=_fields(sliding_window=7, layer_types=[_SLIDING, _FULL])),
        "gemma": Family("gemma", scale=32**-0.5, fields=_fields(head_dim=32)),
        "glm": Family("glm", fields=_fields(head_dim=16)),
        "glm4": Family("glm4", fields=_fields(head_dim=16, attention_bias=True)),
        "gpt2": Family("gpt2", fields=_fields(n_inner=96)),
        "granite": Family(
            "granite",
            scale=0.4,
            fields=_fields(
                attention_multiplier=0.4, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0
            ),
        ),
        "granitemoe": Family(
            "granitemoe",
            scale=0.4,
            fields=_fields(attention_multiplier=0.4, num_local_experts=4, num_experts_per_tok=2),
        ),
        "helium": Family("helium", fields=_fields(head_dim=16)),
        "ministral": Family(
            "ministral",
            windows=(7, 0),
            fields=_fields(head_dim=16, sliding_window=7, layer_types=[_SLIDING, _FULL]),
        ),
        "mixtral": Family(
            "mixtral", windows=(8, 8), fields=_fields(sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
        ),
        "olmo": Family("olmo", fields=_fields(clip_qkv=1.5)),
        "olmo3": Family("olmo3", windows=(7, 0), fields=_fields(sliding_window=7, layer_types=[_SLIDING, _FULL])),
        "phi": Family("phi", fields=_fields(rope_parameters=_DEFAULT | {"partial_rotary_factor": 0.5})),
        "qwen3_moe": Family(
            "qwen3_moe", fields=_fields(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        ),
        "qwen3_moe, windows": Family(
            "qwen3_moe",
            windows=(7, 7),
            fields=_fields(
                head_dim=16,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                use_sliding_window=True,
                sliding_window=7,
                max_window_layers=1,
            ),
        ),
        "seed_oss": Family("seed_oss", fields=_fields(head_dim=16)),
        "starcoder2": Family("starcoder2", windows=(7, 7), fields=_fields(sliding_window=7)),
    }
)


def checkpoint_of(name: str) -> Checkpoint:
    """FAMILIES[name] without files: its configuration only."""
    family, config = FAMILIES[name], _config(name)
    return Checkpoint(
        path=Path(name),
        name=name,
        architecture=family.architecture,
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        config=config,
    )


def _config(name: str) -> Any:
    family = FAMILIES[name]
    return AutoConfig.for_model(family.architecture, **{**_COMMON, **family.fields})


def family_directory(parent: Path, name: str, *, seed: int = 0) -> Path:
    """`parent`/<name>, written anew: configuration and weights of FAMILIES[name]."""
    model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    _spread(model, seed)
    directory = parent / re.sub("[^a-z0-9_]+", "-", name)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def _spread(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name:
            parameter.copy_(noise)
        elif parameter.ndim == 1:  # a norm's weight (around one or around zero), a bias, a sink
            parameter.add_(noise * 0.3)
        elif parameter.ndim == 3:  # experts
            parameter.copy_(noise * parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(noise * (1.5 * parameter.shape[-1] ** -0.5))
