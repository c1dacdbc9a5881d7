"""Writes a tiny model of `families` as a GGUF file, the way llama.cpp's converter lays them out, in float32."""

from pathlib import Path

import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{
        f"self_attn.{name}_proj.{part}": f"attn_{name}.{part}"
        for name in ("q", "k", "v")
        for part in ("weight", "bias")
    },
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_file(directory: Path, *, architecture: str | None = None, scaling: str | None = None) -> Path:
    """`directory`/model.gguf beside the Hugging Face files it is made from; `architecture` may claim another one."""
    config = AutoConfig.from_pretrained(directory)
    name = architecture or config.model_type
    path = directory / "model.gguf"
    writer = GGUFWriter(path, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    if scaling is not None:
        writer.add_string(f"{name}.rope.scaling.type", scaling)
    for key, tensor in load_file(directory / "model.safetensors").items():
        if config.model_type == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            tensor = _interleaved(tensor, heads)
        writer.add_tensor(_named(key), tensor.to(torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _named(key: str) -> str:
    if key in _OUTSIDE:
        return _OUTSIDE[key]
    _, _, layer, rest = key.split(".", 3)  # model.layers.<layer>.<rest>
    return f"blk.{layer}.{_BLOCK[rest]}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rotary halves side by side become neighbours, as GGUF keeps Llama's q and k."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
