"""What every realisation of attention over cells promises. Values and a protocol only: no tensor is made here.

T tokens of one forward, N query heads, K key/value heads (N is a multiple of K), H head size, C+1 cells of the pool
(the last one is the scratch cell), S rows of the row table, L entries of a row.

The row table `rows_SL` (int32) holds, per sequence, the cell of each of its positions: the token at position p of row r
lives in cell `rows_SL[r, p]`. Token t of the forward belongs to row `token_rows_T[t]` and stands at `positions_T[t]`
(both int32). It attends to entries [0, position] of its row; on a layer with window w > 0 to the last w of those.

- Visibility depends on rows and positions alone, never on a cell's index. Rows may share cells (clones), also those
  that tokens of another row write in this very forward: all are written before any is read.
- Nothing else is read: entries of a row beyond a token's position may hold any number, and cells that no token sees
  may hold NaN. No mask over the pool is ever built; the work of a token grows with what it sees.
- Several tokens of one row may ride in one forward. Tokens of one input lie next to each other with ascending
  positions; kernels find such runs by comparing neighbours in `token_rows_T`, so a forward needs no further metadata
  and every shape is fixed by T alone. That a run is unbroken is a matter of speed, not of correctness.
- Padding tokens carry a row of their own whose entry 0 is the scratch cell, and position 0. Several may collide there.
- Shapes and launch grids depend on T, S, L and the pool's shape, never on the numbers inside: a captured call is valid
  for any later lengths.

Accumulation is in float32 whatever the dtypes (float64 for float64). The pool's dtype may be narrower than the
tokens'; values too large for an fp8 pool are clamped to its range on writing. One thread calls, in stream order.
"""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """One realisation: how K and V get into cells, and how tokens attend over them.

    Heads may be strided in `q_TNH`, `k_TKH` and `v_TKH` (any stride over T and heads; the last axis is dense), so
    that a model's `[1, heads, T, H]` needs no copy. The pool, the row table and the index tensors are contiguous.
    """

    @property
    def name(self) -> str:
        """Its name in the registry."""

    def write_cells(self, k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
        """Store token t's K and V in cell `cells_T[t]` (int32) of `k_pool` and `v_pool` [C+1, K, H], in place."""

    def attend(
        self,
        q_TNH: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        rows_SL: Tensor,
        token_rows_T: Tensor,
        positions_T: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_N: Tensor | None = None,
        out_TNH: Tensor | None = None,
    ) -> Tensor:
        """Softmax-weighted V of what each token sees, [T, N, H] in q's dtype; into `out_TNH` where given.

        The logit of a seen cell is `scale * (q · k)`, then, with softcap c > 0, `c * tanh(logit / c)`. `window` counts
        tokens, 0 is no limit. `sinks_N` adds one logit per query head to the softmax's denominator only.
        """

    def update_and_attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        rows_SL: Tensor,
        token_rows_T: Tensor,
        positions_T: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Write every token's K and V to cell `rows_SL[token_rows_T[t], positions_T[t]]`, then attend.

        What a model's layer calls: one operator under torch.compile and torch.export, which mutates the two pools.
        """
