"""A tiny Llama with random weights, as an ordinary Hugging Face directory: configuration, weights, tokenizer.

It loads in about a second, and its tokens depend on the whole history: attention is sharp, and the logits are spread so
widely that the gap between the two largest exceeds float32 rounding by orders of magnitude. So two correct ways of
computing the same tokens give the same tokens, and a wrong one soon does not.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 2, 64, 4, 2, 16, 128
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
VOCABULARY = 3 + 256 + 61  # specials, bytes, merges

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = [
    "the quick brown fox jumps over the lazy dog while the other dog watches from the shade of the old oak tree",
    "a thin slice shows the whole sample when the light shines through it and the lens is clean",
    "once upon a time there was a small machine that could count every token it had ever been given",
]


def toy_directory(parent: Path | str, *, seed: int = 0, context_length: int = 1024) -> Path:
    """`parent`/toy-llama-<seed>-<context_length>, written unless it is there. Equal arguments give equal files."""
    directory = Path(parent) / f"toy-llama-{seed}-{context_length}"
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "pad_token_id": 0}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))  # last: its presence says that all is there
    return directory


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain * columns**-0.5)

    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN, gain=HIDDEN**0.5)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_SIZE, HIDDEN, gain=1.5),  # sharp attention
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN, gain=1.5),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_SIZE, gain=2.0),  # history weighs in
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = random(VOCABULARY, HIDDEN, gain=2.5)  # logits with a standard deviation of 2.5
    return weights


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in (END_OF_TEXT, START_OF_TURN, END_OF_TURN)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer
