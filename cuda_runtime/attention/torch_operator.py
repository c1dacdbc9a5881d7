"""Makes a realisation out of two functions: one torch operator that writes, then attends.

`build` defines `microtome::update_and_attend_<name>` with a fake for tracing, so that torch.compile and torch.export
keep the call whole and know that it mutates the two pools and nothing else. Inference only: there is no backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microtome.cuda_runtime.attention.seam import Attention

# Keeps what is registered below alive.
LIBRARY = torch.library.Library("microtome", "FRAGMENT")  # type: ignore[no-untyped-call]

WriteCells = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
AttendInto = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, float, Tensor | None, Tensor],
    None,
]

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor rows, Tensor token_rows, "
    "Tensor positions, float scale, int window, float softcap, Tensor? sinks) -> Tensor"
)


@dataclass(frozen=True, slots=True)
class OperatorAttention:
    """`seam.Attention` over two functions and the operator that joins them."""

    name: str
    write: WriteCells
    attend_into: AttendInto
    operator: Callable[..., Any]

    def write_cells(self, k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
        self.write(k_TKH, v_TKH, k_pool, v_pool, cells_T)

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
        out = q_TNH.new_empty(q_TNH.shape) if out_TNH is None else out_TNH
        self.attend_into(
            q_TNH, k_pool, v_pool, rows_SL, token_rows_T, positions_T, scale, window, softcap, sinks_N, out
        )
        return out

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
        result: Tensor = self.operator(
            q_TNH,
            k_TKH,
            v_TKH,
            k_pool,
            v_pool,
            rows_SL,
            token_rows_T,
            positions_T,
            scale,
            window,
            softcap,
            sinks_N,
        )
        return result


def define(name: str) -> str:
    """Define the operator of realisation `name`, with its fake; returns the operator's qualified name."""
    qualified = f"microtome::update_and_attend_{name}"
    LIBRARY.define(f"update_and_attend_{name}{_SCHEMA}", tags=(torch.Tag.needs_fixed_stride_order,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, _fake, lib=LIBRARY)
    return qualified


def build(name: str, write: WriteCells, attend_into: AttendInto) -> Attention:
    """The realisation `name` from its two functions. Once per name and process."""

    def update_and_attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        rows: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        write(k, v, k_pool, v_pool, rows[token_rows.long(), positions.long()])
        out = q.new_empty(q.shape)
        attend_into(q, k_pool, v_pool, rows, token_rows, positions, scale, window, softcap, sinks, out)
        return out

    define(name)
    LIBRARY.impl(  # type: ignore[no-untyped-call]
        f"update_and_attend_{name}", update_and_attend, "CompositeExplicitAutograd"
    )
    operator = getattr(torch.ops.microtome, f"update_and_attend_{name}").default
    return OperatorAttention(name, write, attend_into, operator)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    return q.new_empty(q.shape)
