"""Rotary frequencies that hold still, so that a token's rotation depends on its position and on nothing else.

Two of the library's scalings, "longrope" and "dynamic", choose frequencies anew in every forward, by its largest
position. Tokens of other sequences in the forward would then turn this one's, keys in the pool would have been turned
by other frequencies than the query that meets them, and the host would have to read a position back. Here the choice
is made once, for the longest session that may come, which is what the library chooses for a sequence that long.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FROZEN = "frozen"  # stands in for a scaling's name once its frequencies are chosen


@torch.no_grad()
def freeze_rotary(model: nn.Module, *, session_tokens: int) -> None:
    """Choose every rotary embedding's frequencies for sessions of up to `session_tokens`."""
    for module in model.modules():
        scaling: Any = getattr(module, "rope_type", None)
        if isinstance(scaling, str):
            if _moves(scaling):
                _choose(module, "", scaling, session_tokens)
                module.rope_type = FROZEN  # type: ignore[assignment]
        elif isinstance(scaling, dict):  # per type of layer
            for layer_type, name in scaling.items():
                if _moves(name):
                    _choose(module, f"{layer_type}_", name, session_tokens, layer_type=layer_type)
                    scaling[layer_type] = FROZEN


def _moves(scaling: str) -> bool:
    return scaling == "longrope" or "dynamic" in scaling


def _choose(module: Any, prefix: str, scaling: str, session_tokens: int, **layer: str) -> None:
    frequencies = getattr(module, f"{prefix}inv_freq")
    chosen, attention_scaling = ROPE_INIT_FUNCTIONS[scaling](
        module.config, frequencies.device, seq_len=session_tokens, **layer
    )
    frequencies.copy_(chosen)
    setattr(module, f"{prefix}attention_scaling", attention_scaling)
