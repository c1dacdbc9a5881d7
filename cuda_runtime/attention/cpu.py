"""Attention over cells on a CPU with stock torch operators: where there is no compiler for the native one.

Promises `seam.Attention`. Each run of tokens of one row gathers just the cells it sees and hands them to torch's fused
attention; soft-capping and sinks, which that lacks, are spelled out. A mask is at most [width of a run, what it sees].
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from microtome.cuda_runtime.attention.reference import to_pool_dtype


def write_cells(k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
    """Store K and V of each token in its cell, in place."""
    cells = cells_T.long()
    if k_pool.dtype.itemsize == 1:  # index_copy_ has no fp8 kernel; its bytes are copied instead
        k_pool.view(torch.uint8).index_copy_(0, cells, to_pool_dtype(k_TKH, k_pool.dtype).view(torch.uint8))
        v_pool.view(torch.uint8).index_copy_(0, cells, to_pool_dtype(v_TKH, v_pool.dtype).view(torch.uint8))
    else:
        k_pool.index_copy_(0, cells, k_TKH.to(k_pool.dtype))
        v_pool.index_copy_(0, cells, v_TKH.to(v_pool.dtype))


def attend(
    q_TNH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows_SL: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_N: Tensor | None,
    out_TNH: Tensor,
) -> None:
    """One gather and one fused attention per run of tokens."""
    heads, kv_heads = q_TNH.shape[1], k_pool.shape[1]
    group = heads // kv_heads
    spelled_out = softcap > 0 or sinks_N is not None
    sinks_KG11 = None if sinks_N is None else sinks_N.float().view(kv_heads, group, 1, 1)
    for begin, end, row, first, last, ascending in _runs(token_rows_T.tolist(), positions_T.tolist()):
        width = end - begin
        low = max(0, first + 1 - window) if window > 0 else 0
        cells = rows_SL[row, low : last + 1]
        # [K, P, H]: one batch entry per key/value head.
        k_KPH = _gather(k_pool, cells).to(q_TNH.dtype).transpose(0, 1)
        v_KPH = _gather(v_pool, cells).to(q_TNH.dtype).transpose(0, 1)
        q_WKGH = q_TNH[begin:end].view(width, kv_heads, group, -1)
        whole = width > 1 and low == 0 and not spelled_out and ascending and last + 1 == width <= (window or width)
        mask_WP = None
        if width > 1 and not whole:
            query_W1 = positions_T[begin:end, None]
            key_P = torch.arange(low, last + 1, dtype=torch.int32, device=q_TNH.device)
            mask_WP = key_P <= query_W1
            if window > 0:
                mask_WP &= key_P > query_W1 - window
        out_WKGH = out_TNH[begin:end].view(width, kv_heads, group, -1)
        if spelled_out:
            out_KGWH = _spelled_out(
                q_WKGH.permute(1, 2, 0, 3), k_KPH[:, None], v_KPH[:, None], mask_WP, scale, softcap, sinks_KG11
            )
            out_WKGH.copy_(out_KGWH.permute(2, 0, 1, 3))
        elif width == 1:  # the group's heads are queries of one batch entry: nothing is repeated, no mask is needed
            out_1KGH = scaled_dot_product_attention(q_WKGH, k_KPH[None], v_KPH[None], scale=scale)
            out_WKGH.copy_(out_1KGH)
        else:
            out_1NWH = scaled_dot_product_attention(
                q_TNH[begin:end].transpose(0, 1)[None],
                k_KPH[None],
                v_KPH[None],
                attn_mask=mask_WP,
                is_causal=whole,
                scale=scale,
                enable_gqa=group > 1,
            )
            out_TNH[begin:end].copy_(out_1NWH[0].transpose(0, 1))


def _runs(token_rows: list[int], positions: list[int]) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """Runs of neighbours in one row: (begin, end, row, lowest and highest position, whether they rise by one)."""
    begin = 0
    for index in range(1, len(token_rows) + 1):
        if index == len(token_rows) or token_rows[index] != token_rows[begin]:
            run = positions[begin:index]
            ascending = run == list(range(run[0], run[0] + len(run)))
            yield begin, index, token_rows[begin], min(run), max(run), ascending
            begin = index


def _gather(pool: Tensor, cells_P: Tensor) -> Tensor:
    if pool.dtype.itemsize == 1:
        return pool.view(torch.uint8).index_select(0, cells_P).view(pool.dtype)
    return pool.index_select(0, cells_P)


def _spelled_out(
    q_KGWH: Tensor,
    k_K1PH: Tensor,
    v_K1PH: Tensor,
    mask_WP: Tensor | None,
    scale: float,
    softcap: float,
    sinks_KG11: Tensor | None,
) -> Tensor:
    wide = torch.float64 if q_KGWH.dtype == torch.float64 else torch.float32
    logits_KGWP = (q_KGWH.to(wide) @ k_K1PH.to(wide).transpose(-1, -2)) * scale
    if softcap > 0:
        logits_KGWP = softcap * torch.tanh(logits_KGWP / softcap)
    if mask_WP is not None:
        logits_KGWP = logits_KGWP.masked_fill(~mask_WP, float("-inf"))
    seen = logits_KGWP.shape[-1]
    if sinks_KG11 is not None:
        logits_KGWP = torch.cat((logits_KGWP, sinks_KG11.to(wide).expand(*logits_KGWP.shape[:3], 1)), dim=-1)
    return torch.softmax(logits_KGWP, dim=-1)[..., :seen] @ v_K1PH.to(wide)
