"""Attention over cells in plain torch, token by token: slow, on any device, what the others are compared with.

Promises `seam.Attention`. Computes in float32 (float64 for float64 tokens), sums in the row's order.
"""

import torch
from torch import Tensor


def to_pool_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast for storage. An fp8 cast turns what is out of range into NaN, so that is clamped first."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def write_cells(k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
    """Store K and V of each token in its cell, in place."""
    cells = cells_T.long()
    k_pool[cells] = to_pool_dtype(k_TKH, k_pool.dtype)
    v_pool[cells] = to_pool_dtype(v_TKH, v_pool.dtype)


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
    """One softmax per token over exactly the cells it sees."""
    wide = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
    group = q_TNH.shape[1] // k_pool.shape[1]
    for token, (row, position) in enumerate(zip(token_rows_T.tolist(), positions_T.tolist(), strict=True)):
        first = max(0, position + 1 - window) if window > 0 else 0
        cells = rows_SL[row, first : position + 1].long()
        k_PNH = k_pool[cells].to(wide).repeat_interleave(group, dim=1)
        v_PNH = v_pool[cells].to(wide).repeat_interleave(group, dim=1)
        logits_NP = torch.einsum("nh,pnh->np", q_TNH[token].to(wide), k_PNH) * scale
        if softcap > 0:
            logits_NP = softcap * torch.tanh(logits_NP / softcap)
        if sinks_N is not None:
            logits_NP = torch.cat((logits_NP, sinks_N.to(wide)[:, None]), dim=1)
        weights_NP = torch.softmax(logits_NP, dim=1)[:, : len(cells)]
        out_TNH[token] = torch.einsum("np,pnh->nh", weights_NP, v_PNH).to(out_TNH.dtype)
