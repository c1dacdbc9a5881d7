"""Random ragged batches for attention over cells, and what they must come to.

A batch is made from histories, one list of K and V per sequence, and scattered into a pool afterwards; the expected
output comes from the histories in float64 and never sees a cell. What nobody may read is poisoned: NaN in every cell
that no token sees, numbers far outside the pool in every entry of a row beyond what is written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

POISON_CELL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the batch looks. `inputs` holds (positions already in cells, new tokens) per sequence, in packed order."""

    inputs: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    padding: int = 0  # tokens at the end that belong to the scratch cell
    clones: bool = False  # every second sequence starts as a clone of the one before it
    followers: bool = False  # every second sequence goes on behind the new tokens of the one before it
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None  # None: as the tokens
    ordered_cells: bool = False  # ascending neighbours, as a fresh pool hands them out


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """The tensors of one call, and the expected output of its real tokens in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pool: Tensor
    v_pool: Tensor
    rows: Tensor
    token_rows: Tensor
    positions: Tensor
    cells: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    real_tokens: int
    expected: Tensor


def make_ragged(shape: Shape, seed: int) -> Ragged:
    """The same shape and seed give the same batch."""
    generator = torch.Generator().manual_seed(seed)
    pool_dtype = shape.pool_dtype or shape.dtype
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
    group = heads // kv_heads

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, dtype=torch.float64)

    def stored(values: Tensor) -> Tensor:
        """As the pool gives it back: through the token's dtype, then the pool's."""
        return values.to(shape.dtype).to(pool_dtype).to(torch.float64)

    longest = max((held + new for held, new in shape.inputs), default=1)
    needed = sum(held + new for held, new in shape.inputs)
    usable = needed + 7
    order = torch.arange(usable) if shape.ordered_cells else torch.randperm(usable, generator=generator)
    free = order.tolist()[::-1]
    scratch = usable
    sequences = len(shape.inputs)
    row_of = torch.randperm(sequences + 2, generator=generator)[:sequences].tolist()
    padding_row = sequences + 2
    rows = torch.full((sequences + 3, longest + 5), POISON_CELL, dtype=torch.int32)
    rows[1::2] = -7
    rows[padding_row, 0] = scratch
    k_pool = torch.full((usable + 1, kv_heads, size), float("nan"), dtype=torch.float64)
    v_pool = k_pool.clone()
    sinks = normal(heads) if shape.sinks else None
    scale = size**-0.5

    q_parts, k_parts, v_parts, expected, token_rows, positions, cells_of = [], [], [], [], [], [], []
    before: tuple[Tensor, Tensor, list[int]] | None = None
    written: set[int] = set()  # cells, by this very call
    for index, (held, new) in enumerate(shape.inputs):
        total = held + new
        q = normal(new, heads, size)
        k, v = normal(total, kv_heads, size), normal(total, kv_heads, size)
        shared: list[int] = []
        if (shape.clones or shape.followers) and index % 2 and before is not None:
            shared = before[2][: min(held, len(before[2]))]
            k[: len(shared)], v[: len(shared)] = before[0][: len(shared)], before[1][: len(shared)]
        cells = shared + [free.pop() for _ in range(total - len(shared))]
        before = (k, v, cells if shape.followers else cells[:held])
        row = row_of[index]
        rows[row, :total] = torch.tensor(cells, dtype=torch.int32)
        lowest_seen = max(0, held + 1 - shape.window) if shape.window else 0
        there = [at for at in range(lowest_seen, held) if cells[at] not in written]
        seen = [cells[at] for at in there]
        k_pool[seen], v_pool[seen] = stored(k[there]), stored(v[there])
        written.update(cells[held:])
        q_parts.append(q)
        k_parts.append(k[held:])
        v_parts.append(v[held:])
        expected.append(
            _attend_history(q.to(shape.dtype).double(), stored(k), stored(v), held, scale, group, shape, sinks)
        )
        token_rows += [row] * new
        positions += list(range(held, total))
        cells_of += cells[held:]
    real_tokens = len(token_rows)
    q_parts.append(normal(shape.padding, heads, size))
    k_parts.append(normal(shape.padding, kv_heads, size))
    v_parts.append(normal(shape.padding, kv_heads, size))
    token_rows += [padding_row] * shape.padding
    positions += [0] * shape.padding
    cells_of += [scratch] * shape.padding
    return Ragged(
        q=torch.cat(q_parts).to(shape.dtype),
        k=torch.cat(k_parts).to(shape.dtype),
        v=torch.cat(v_parts).to(shape.dtype),
        k_pool=k_pool.to(pool_dtype),
        v_pool=v_pool.to(pool_dtype),
        rows=rows,
        token_rows=torch.tensor(token_rows, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        cells=torch.tensor(cells_of, dtype=torch.int32),
        scale=scale,
        window=shape.window,
        softcap=shape.softcap,
        sinks=None if sinks is None else sinks.to(shape.dtype),
        real_tokens=real_tokens,
        expected=torch.cat(expected) if expected else torch.empty(0, heads, size, dtype=torch.float64),
    )


def _attend_history(
    q: Tensor, k: Tensor, v: Tensor, held: int, scale: float, group: int, shape: Shape, sinks: Tensor | None
) -> Tensor:
    """Softmax attention written out over one whole history, [new, heads, size] in float64."""
    out = torch.empty_like(q)
    for token in range(q.shape[0]):
        position = held + token
        first = max(0, position - shape.window + 1) if shape.window else 0
        for head in range(q.shape[1]):
            logits = (k[first : position + 1, head // group] @ q[token, head]) * scale
            if shape.softcap:
                logits = torch.tanh(logits / shape.softcap) * shape.softcap
            weights = torch.exp(logits - logits.max())
            total = weights.sum()
            if sinks is not None:
                total += torch.exp(sinks[head].to(shape.dtype).double() - logits.max())
            out[token, head] = (weights[:, None] * v[first : position + 1, head // group]).sum(dim=0) / total
    return out
