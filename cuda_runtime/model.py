"""A checkpoint as one module whose attention is ours: K/V live in cells, outside the graph and the library's caches.

The decoder itself is transformers' own. It calls attention through the library's attention interface, where
`attend_over_cells` is registered under `ATTENTION_NAME`; what a forward needs (pools, rows, whose tokens these are)
rides beside the tokens as an argument, down to every layer. No mask is ever built.

T tokens of one forward, R selected rows, V vocabulary, N query heads, K key/value heads, H head size, S sequences'
rows of L entries.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from microtome.cuda_runtime.attention.seam import Attention
from microtome.cuda_runtime.checkpoint import Checkpoint
from microtome.cuda_runtime.gguf_header import read_gguf_header
from microtome.cuda_runtime.rotary import freeze_rotary
from microtome.planner.errors import BadConfig

ATTENTION_NAME = "microtome"  # in transformers' attention interface
_CONTEXT = "microtome_cells"  # the keyword under which a forward's context reaches each layer
# The library exchanges methods of its classes while it builds a model, and puts back what it found: two that are built
# at once in one process can leave a stranger's there, and every tied weight after that untied.
_BUILDING: Final = Lock()


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer keeps per token: K and V of `kv_heads` x `head_size`; `window` tokens are seen, 0: all."""

    kv_heads: int
    head_size: int
    window: int


class LayerContext(Protocol):
    """What a forward's attention layers are given."""

    def attend(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Attention's output of the layer, [T, N, H]."""


@dataclass(frozen=True, slots=True)
class CellContext:
    """One forward over the pool: writes the tokens' K/V to their cells and attends over their rows."""

    attention: Attention
    k_pools: list[Tensor]  # per layer [cells + 1, K, H]
    v_pools: list[Tensor]
    rows_SL: Tensor  # int32
    token_rows_T: Tensor  # int32
    positions_T: Tensor  # int32

    def attend(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_N: Tensor | None,
    ) -> Tensor:
        return self.attention.update_and_attend(
            q_TNH,
            k_TKH,
            v_TKH,
            self.k_pools[layer],
            self.v_pools[layer],
            self.rows_SL,
            self.token_rows_T,
            self.positions_T,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_N=sinks_N,
        )


@dataclass(frozen=True, slots=True)
class GeometryProbe:
    """One forward that computes no attention and notes what each layer would keep."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks_N: Tensor | None,
    ) -> Tensor:
        if k_TKH.shape != v_TKH.shape:
            raise BadConfig(f"layer {layer}: K and V differ in shape ({tuple(k_TKH.shape)}, {tuple(v_TKH.shape)})")
        self.layers[layer] = LayerGeometry(kv_heads=k_TKH.shape[1], head_size=k_TKH.shape[2], window=window)
        return torch.zeros_like(q_TNH)


def attend_over_cells(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query, key, value [1, heads, T, H] to [1, T, N, H]."""
    assert getattr(module, "is_causal", True), "a token sees what follows it"  # such models are refused by name
    context: LayerContext = keywords[_CONTEXT]
    out_TNH = context.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks_N=s_aux,
    )
    return out_TNH[None], None


AttentionInterface.register(ATTENTION_NAME, attend_over_cells)


class CellModel(nn.Module):
    """The forward that methods run."""

    def __init__(self, causal_lm: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        for module in causal_lm.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                # It would read tokens on the host, at every forward: a wait for the device, which no capture survives.
                module.warn_if_padding_and_no_attention_mask = _warn_of_nothing  # type: ignore[assignment]

    def forward(
        self,
        tokens_1T: Tensor,
        positions_1T: Tensor,
        token_rows_T: Tensor,
        selector_R: Tensor,
        rows_SL: Tensor,
        k_pools: list[Tensor],
        v_pools: list[Tensor],
    ) -> Tensor:
        """Logits [R, V] of the tokens at indices `selector_R`; all index tensors but the rows are int64."""
        context = CellContext(
            self.attention, k_pools, v_pools, rows_SL, token_rows_T.to(torch.int32), positions_1T[0].to(torch.int32)
        )
        output = self.causal_lm(
            input_ids=tokens_1T,
            position_ids=positions_1T,
            use_cache=False,
            logits_to_keep=selector_R,
            **{_CONTEXT: context},
        )
        logits_RV: Tensor = output.logits[0]
        return logits_RV


def _warn_of_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """No forward of ours is padded in a way that a mask would have to hide."""


def load_model(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, session_tokens: int | None = None
) -> nn.Module:
    """The checkpoint's decoder on `device`, for inference, with our attention. Raises `BadConfig`.

    `session_tokens` is the longest session that may come (None: the context length), for `freeze_rotary`.
    """
    where, keywords = checkpoint.source
    try:
        with _BUILDING:
            model, report = AutoModelForCausalLM.from_pretrained(
                where, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True, **keywords
            )
    except Exception as error:  # the library raises whatever its parsers raise
        sentence = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadConfig(f"model {checkpoint.path}: its weights cannot be loaded: {sentence}") from error
    if missing := sorted(report["missing_keys"]):  # the library fills them with random numbers
        raise BadConfig(f"model {checkpoint.path}: {len(missing)} of its weights are missing, such as {missing[0]}")
    context_length = checkpoint.context_length
    freeze_rotary(model, session_tokens=min(session_tokens or context_length, context_length))
    if checkpoint.is_gguf:
        _check_all_used(checkpoint, model)
    loaded: nn.Module = model.to(device).eval().requires_grad_(False)
    return loaded


def _check_all_used(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The library drops tensors of a GGUF file that its model has no place for, such as biases, without a word."""
    held, taken = len(read_gguf_header(checkpoint.path).tensors), len(list(model.parameters()))
    if held > taken:
        raise BadConfig(f"model {checkpoint.path}: it holds {held} tensors, of which the library takes {taken}")


def skeleton(checkpoint: Checkpoint, *, dtype: torch.dtype, session_tokens: int | None = None) -> nn.Module:
    """The module that `load_model` would give, with its weights on the meta device: every shape, no number.

    Buffers that follow from the configuration, such as rotary frequencies, are there.
    """
    context_length = checkpoint.context_length
    with _BUILDING, init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(
            checkpoint.config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    freeze_rotary(model, session_tokens=min(session_tokens or context_length, context_length))
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def read_geometry(causal_lm: nn.Module, device: torch.device) -> tuple[LayerGeometry, ...]:
    """Per layer what a token keeps, found by one forward of one token."""
    probe = GeometryProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    causal_lm(input_ids=zero, position_ids=zero, use_cache=False, **{_CONTEXT: probe})
    if not probe.layers:
        raise BadConfig(f"{type(causal_lm).__name__} computes attention without the library's attention interface")
    if sorted(probe.layers) != list(range(len(probe.layers))):
        raise BadConfig(f"attention was called for layers {sorted(probe.layers)}: not one each from 0")
    return tuple(probe.layers[layer] for layer in range(len(probe.layers)))
