"""Attention over cells on a GPU: the Triton kernels alone; `triton_attention` launches them.

Shapes as in `seam`; every grid follows from T, the heads and the pool's shape, so a captured launch is valid for any
later rows, positions and lengths. Rows and positions are read on the device.

- `write_cells`: one program per token.
- `attend_alone`: split-KV. A program takes one split of one token's positions, for the query heads of one key/value
  head, and leaves a partial softmax. With ONLY_LONE a token that has a neighbour of its own row is left to the tiles.
- `combine`: one program per token and query head joins the splits and the sink.
- `attend_tiles`: a program takes a tile of neighbouring tokens under one key/value head. Tokens of one row in it form a
  segment; segments are done one after the other, each over the positions of its own row only.

Logits are kept in units of log 2. A running maximum starts at LOWEST, below every logit and above what masks.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
MASKED = tl.constexpr(-3.0e38)
LOG2E = tl.constexpr(1.4426950408889634)
FP8_LIMIT = tl.constexpr(448.0)


@triton.jit
def _to_pool(values, pool_type: tl.constexpr):
    """Cast for storage; what an fp8 pool cannot hold is clamped."""
    if pool_type.primitive_bitwidth == 8:
        values = tl.clamp(values.to(tl.float32), -FP8_LIMIT, FP8_LIMIT)
    return values.to(pool_type)


@triton.jit
def _to_logits(dots, scale, softcap, CAPPED: tl.constexpr):
    if CAPPED:  # c * tanh(x / c) = c * (1 - 2 / (e^(2x/c) + 1)), which is right at both ends
        e = tl.exp2(dots * (scale * 2.0 * LOG2E / softcap))
        return (softcap * LOG2E) * (1.0 - 2.0 / (e + 1.0))
    return dots * (scale * LOG2E)


@triton.jit
def _first_seen(position, window, WINDOWED: tl.constexpr):
    if WINDOWED:
        return tl.maximum(position + 1 - window, 0)
    return position * 0


@triton.jit
def _split(position, low, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Positions per split, a multiple of BLOCK_P, so that short histories use few splits."""
    seen = position + 1 - low
    return tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_P) * BLOCK_P


@triton.jit(do_not_specialize=["tokens"])
def write_cells(
    k,
    v,
    k_pool,
    v_pool,
    cells,
    rows,
    token_rows,
    positions,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    row_stride,
    tokens,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FROM_ROWS: tl.constexpr,
):
    """Grid [T]. The cell is `cells[t]`, or with FROM_ROWS `rows[token_rows[t], positions[t]]`."""
    token = tl.program_id(0).to(tl.int64)
    if FROM_ROWS:
        row = tl.load(token_rows + token).to(tl.int64)
        cell = tl.load(rows + row * row_stride + tl.load(positions + token)).to(tl.int64)
    else:
        cell = tl.load(cells + token).to(tl.int64)
    head = tl.arange(0, BLOCK_K)[:, None]
    at = tl.arange(0, BLOCK_H)[None, :]
    there = (head < KV_HEADS) & (at < SIZE)
    to = (cell * KV_HEADS + head) * SIZE + at
    new_k = tl.load(k + token * k_token_stride + head * k_head_stride + at, mask=there)
    tl.store(k_pool + to, _to_pool(new_k, k_pool.dtype.element_ty), mask=there)
    new_v = tl.load(v + token * v_token_stride + head * v_head_stride + at, mask=there)
    tl.store(v_pool + to, _to_pool(new_v, v_pool.dtype.element_ty), mask=there)


@triton.jit
def _is_lone(token_rows, token, tokens):
    """Whether neither neighbour is of the token's row."""
    row = tl.load(token_rows + token)
    before = tl.load(token_rows + token - 1, mask=token > 0, other=-1)
    after = tl.load(token_rows + token + 1, mask=token + 1 < tokens, other=-1)
    return (row != before) & (row != after)


@triton.jit(do_not_specialize=["tokens"])
def attend_alone(
    q,
    k_pool,
    v_pool,
    rows,
    token_rows,
    positions,
    partial_acc,
    partial_stats,
    q_token_stride,
    q_head_stride,
    row_stride,
    tokens,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONLY_LONE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid [ceil(T / TOKENS), K, SPLITS]. Leaves `partial_acc` [T, N, SPLITS, H] and `partial_stats` [.., 2] (maximum
    and sum of weights) for the splits in use, nothing for the others."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, BLOCK_G)
    h = tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)
    head = kv_head * group + g
    for index in range(TOKENS):
        token = (tl.program_id(0) * TOKENS + index).to(tl.int64)
        mine = token < tokens
        if ONLY_LONE and mine:
            mine = _is_lone(token_rows, token, tokens)
        if mine:
            position = tl.load(positions + token)
            low = _first_seen(position, window, WINDOWED)
            chunk = _split(position, low, SPLITS, BLOCK_P)
            begin = low + split * chunk
            end = tl.minimum(begin + chunk, position + 1)
            if begin < end:
                row = rows + tl.load(token_rows + token).to(tl.int64) * row_stride
                q_there = (g[:, None] < group) & (h[None, :] < SIZE)
                q_at = token * q_token_stride + head[:, None] * q_head_stride + h[None, :]
                q_GH = tl.load(q + q_at, mask=q_there, other=0.0)
                maximum_G = tl.full([BLOCK_G], LOWEST, tl.float32)
                sum_G = tl.zeros([BLOCK_G], tl.float32)
                acc_GH = tl.zeros([BLOCK_G, BLOCK_H], tl.float32)
                for at in range(begin, end, BLOCK_P):
                    seen = at + p < end
                    cell = tl.load(row + at + p, mask=seen, other=0).to(tl.int64)
                    kv_at = (cell[:, None] * KV_HEADS + kv_head) * SIZE + h[None, :]
                    kv_there = seen[:, None] & (h[None, :] < SIZE)
                    k_PH = tl.load(k_pool + kv_at, mask=kv_there, other=0.0).to(q_GH.dtype)
                    dots_GP = tl.dot(q_GH, tl.trans(k_PH), input_precision=PRECISION)
                    logits_GP = _to_logits(dots_GP, scale, softcap, CAPPED)
                    logits_GP = tl.where(seen[None, :], logits_GP, MASKED)
                    best_G = tl.maximum(maximum_G, tl.max(logits_GP, 1))
                    keep_G = tl.exp2(maximum_G - best_G)
                    weights_GP = tl.exp2(logits_GP - best_G[:, None])
                    v_PH = tl.load(v_pool + kv_at, mask=kv_there, other=0.0).to(q_GH.dtype)
                    sum_G = sum_G * keep_G + tl.sum(weights_GP, 1)
                    acc_GH = acc_GH * keep_G[:, None]
                    acc_GH = tl.dot(weights_GP.to(q_GH.dtype), v_PH, acc_GH, input_precision=PRECISION)
                    maximum_G = best_G
                slot_G = (token * HEADS + head) * SPLITS + split
                tl.store(partial_acc + slot_G[:, None] * SIZE + h[None, :], acc_GH, mask=q_there)
                tl.store(partial_stats + slot_G * 2, maximum_G, mask=g < group)
                tl.store(partial_stats + slot_G * 2 + 1, sum_G, mask=g < group)


@triton.jit(do_not_specialize=["tokens"])
def combine(
    partial_acc,
    partial_stats,
    sinks,
    out,
    token_rows,
    positions,
    out_token_stride,
    out_head_stride,
    tokens,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONLY_LONE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid [ceil(T / TOKENS), N]. BLOCK_P as `attend_alone` had it."""
    head = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    s = tl.arange(0, SPLITS)
    for index in range(TOKENS):
        token = (tl.program_id(0) * TOKENS + index).to(tl.int64)
        mine = token < tokens
        if ONLY_LONE and mine:
            mine = _is_lone(token_rows, token, tokens)
        if mine:
            position = tl.load(positions + token)
            low = _first_seen(position, window, WINDOWED)
            used = tl.cdiv(position + 1 - low, _split(position, low, SPLITS, BLOCK_P))
            slot_S = (token * HEADS + head) * SPLITS + s
            maximum_S = tl.load(partial_stats + slot_S * 2, mask=s < used, other=LOWEST)
            sum_S = tl.load(partial_stats + slot_S * 2 + 1, mask=s < used, other=0.0)
            there_SH = (s[:, None] < used) & (h[None, :] < SIZE)
            acc_SH = tl.load(partial_acc + slot_S[:, None] * SIZE + h[None, :], mask=there_SH, other=0.0)
            maximum = tl.max(maximum_S, 0)
            if SINKS:
                sink = tl.load(sinks + head).to(tl.float32) * LOG2E
                maximum = tl.maximum(maximum, sink)
            share_S = tl.exp2(maximum_S - maximum)
            total = tl.sum(sum_S * share_S, 0)
            if SINKS:
                total += tl.exp2(sink - maximum)
            result_H = tl.sum(acc_SH * share_S[:, None], 0) / total
            out_at = token * out_token_stride + head * out_head_stride + h
            tl.store(out + out_at, result_H.to(out.dtype.element_ty), mask=h < SIZE)


@triton.jit(do_not_specialize=["tokens"])
def attend_tiles(
    q,
    k_pool,
    v_pool,
    rows,
    token_rows,
    positions,
    sinks,
    out,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    row_stride,
    tokens,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid [ceil(T / BLOCK_T), K]. Query i of a tile is token i // BLOCK_G, head i % BLOCK_G of the group. Writes the
    tokens that have a neighbour of their own row, and no others."""
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_T * BLOCK_G
    first_token = tl.program_id(0) * BLOCK_T
    h = tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)

    # Segments: numbered from 1 in the order of the tile; 0 for tokens that are not this kernel's.
    t = first_token + tl.arange(0, BLOCK_T)
    row_T = tl.load(token_rows + t, mask=t < tokens, other=-1)
    before_T = tl.load(token_rows + t - 1, mask=(t > 0) & (t < tokens), other=-1)
    after_T = tl.load(token_rows + t + 1, mask=t + 1 < tokens, other=-1)
    mine_T = (t < tokens) & ((row_T == before_T) | (row_T == after_T))
    opens_T = mine_T & ((row_T != before_T) | (t == first_token))
    segment_T = tl.where(mine_T, tl.cumsum(opens_T.to(tl.int32), 0), 0)
    position_T = tl.load(positions + t, mask=mine_T, other=0)
    segments = tl.max(segment_T, 0)
    if segments == 0:
        return

    i = tl.arange(0, BLOCK_Q)
    token_Q = (first_token + i // BLOCK_G).to(tl.int64)
    head_Q = kv_head * group + i % BLOCK_G
    segment_Q = tl.reshape(tl.broadcast_to(segment_T[:, None], [BLOCK_T, BLOCK_G]), [BLOCK_Q])
    position_Q = tl.reshape(tl.broadcast_to(position_T[:, None], [BLOCK_T, BLOCK_G]), [BLOCK_Q])
    there_Q = (segment_Q > 0) & (i % BLOCK_G < group)
    there_QH = there_Q[:, None] & (h[None, :] < SIZE)
    q_QH = tl.load(
        q + token_Q[:, None] * q_token_stride + head_Q[:, None] * q_head_stride + h[None, :], mask=there_QH, other=0.0
    )
    if SINKS:
        maximum_Q = tl.load(sinks + head_Q, mask=there_Q, other=0.0).to(tl.float32) * LOG2E
        sum_Q = tl.full([BLOCK_Q], 1.0, tl.float32)
    else:
        maximum_Q = tl.full([BLOCK_Q], LOWEST, tl.float32)
        sum_Q = tl.zeros([BLOCK_Q], tl.float32)
    acc_QH = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)

    for segment in range(1, segments + 1):
        in_T = segment_T == segment
        row = rows + tl.max(tl.where(in_T, row_T, 0), 0).to(tl.int64) * row_stride
        end = tl.max(tl.where(in_T, position_T, 0), 0) + 1
        lowest = tl.min(tl.where(in_T, position_T, 2147483646), 0)
        begin = _first_seen(lowest, window, WINDOWED)
        # A query of another segment sees nothing here.
        last_Q = tl.where(segment_Q == segment, position_Q, -1)
        for at in range(begin, end, BLOCK_P):
            key_P = at + p
            cell = tl.load(row + key_P, mask=key_P < end, other=0).to(tl.int64)
            kv_at = (cell[:, None] * KV_HEADS + kv_head) * SIZE + h[None, :]
            kv_there = (key_P < end)[:, None] & (h[None, :] < SIZE)
            k_PH = tl.load(k_pool + kv_at, mask=kv_there, other=0.0).to(q_QH.dtype)
            dots_QP = tl.dot(q_QH, tl.trans(k_PH), input_precision=PRECISION)
            logits_QP = _to_logits(dots_QP, scale, softcap, CAPPED)
            seen_QP = key_P[None, :] <= last_Q[:, None]
            if WINDOWED:
                seen_QP = seen_QP & (key_P[None, :] > last_Q[:, None] - window)
            logits_QP = tl.where(seen_QP, logits_QP, MASKED)
            best_Q = tl.maximum(maximum_Q, tl.max(logits_QP, 1))
            keep_Q = tl.exp2(maximum_Q - best_Q)
            weights_QP = tl.exp2(logits_QP - best_Q[:, None])
            v_PH = tl.load(v_pool + kv_at, mask=kv_there, other=0.0).to(q_QH.dtype)
            sum_Q = sum_Q * keep_Q + tl.sum(weights_QP, 1)
            acc_QH = acc_QH * keep_Q[:, None]
            acc_QH = tl.dot(weights_QP.to(q_QH.dtype), v_PH, acc_QH, input_precision=PRECISION)
            maximum_Q = best_Q

    result_QH = acc_QH / tl.where(there_Q, sum_Q, 1.0)[:, None]
    out_at = token_Q[:, None] * out_token_stride + head_Q[:, None] * out_head_stride + h[None, :]
    tl.store(out + out_at, result_QH.to(out.dtype.element_ty), mask=there_QH)
