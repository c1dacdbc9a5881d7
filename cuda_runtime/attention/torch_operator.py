"""Makes torch operators out of a realisation: `microtome::{write_cells,attend,update_and_attend}_<name>`.

Each has a fake for tracing, so that torch.compile and torch.export keep the call whole and know what it mutates: the
two pools, or `out`, and nothing else. Inference only: there is no backward.
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

_SCHEMAS = {
    "write_cells": "(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor cells) -> ()",
    "attend": (
        "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor rows, Tensor token_rows, Tensor positions, float scale, "
        "int window, float softcap, Tensor? sinks, Tensor(a!) out) -> ()"
    ),
    "update_and_attend": (
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor rows, Tensor token_rows, "
        "Tensor positions, float scale, int window, float softcap, Tensor? sinks) -> Tensor"
    ),
}


@dataclass(frozen=True, slots=True)
class OperatorAttention:
    """`seam.Attention` over the three operators of one realisation."""

    name: str
    write_operator: Callable[..., Any]
    attend_operator: Callable[..., Any]
    operator: Callable[..., Any]

    def write_cells(self, k_TKH: Tensor, v_TKH: Tensor, k_pool: Tensor, v_pool: Tensor, cells_T: Tensor) -> None:
        self.write_operator(k_TKH, v_TKH, k_pool, v_pool, cells_T)

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
        self.attend_operator(
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


def define(name: str) -> None:
    """Define the operators of realisation `name`, with their fakes. Once per name and process."""
    for what, schema in _SCHEMAS.items():
        tags = (torch.Tag.needs_exact_strides,)  # strides are part of the contract; nothing is copied for layout's sake
        LIBRARY.define(f"{what}_{name}{schema}", tags=tags)  # type: ignore[no-untyped-call]
        fake = _fake_output if what == "update_and_attend" else _fake_nothing
        torch.library.register_fake(f"microtome::{what}_{name}", fake, lib=LIBRARY)


def collect(name: str) -> Attention:
    """The realisation `name`, once its operators are defined and implemented."""
    operators = [getattr(torch.ops.microtome, f"{what}_{name}").default for what in _SCHEMAS]
    return OperatorAttention(name, *operators)


def build(
    name: str, write: WriteCells, attend_into: AttendInto, write_and_attend: Callable[..., Tensor] | None = None
) -> Attention:
    """The realisation `name` from functions in Python, for every device they run on.

    `write_and_attend` does both at once where that is better than one after the other.
    """

    def one_after_the_other(
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
    both = write_and_attend or one_after_the_other
    for what, function in (("write_cells", write), ("attend", attend_into), ("update_and_attend", both)):
        LIBRARY.impl(f"{what}_{name}", function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return collect(name)


def _fake_output(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape)


def _fake_nothing(*arguments: object) -> None:
    return None
