"""Cuts a packed batch into slices that the exported methods can run.

Three planners over the same promise: slices tile `[0, total)` in order, without gap or overlap, and depend on the total
and the methods alone, never on sessions, kinds of input or history. Equal arguments give equal plans.

- `plan_slices`: two methods, decode (one token) and prefill (a range); the simplest form.
- `plan_ladder`: static widths and at most one dynamic method, greedily from the left; the reference.
- `plan_cheapest` and `CheapestPlanner`: the cover of least cost by the table's measured costs, padding included; the
  reference where the table has no costs. Never costlier than the reference.

Widths count tokens; costs are integers in nanoseconds, so sums are exact. Pure functions of their arguments but for the
planner's memo, which grows with the totals it was asked for; one thread calls a planner.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from microtome.planner.errors import BadInput
from microtome.planner.types import MethodSpec, MethodTable


class Method(Enum):
    DECODE = "decode"  # one token
    PREFILL = "prefill"  # min_prefill_tokens to max_step_tokens


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [offset, offset + length) of a packed batch, run by one method."""

    offset: int
    length: int
    method: Method


@dataclass(frozen=True, slots=True)
class Forward:
    """A slice on a ladder: `length` real tokens in a forward of `width`, by the table's method number `method`."""

    offset: int
    length: int
    width: int  # the method's own on a static method, `length` on a dynamic one
    method: int


def plan_slices(total: int, max_step_tokens: int, min_prefill_tokens: int) -> list[Slice]:
    """Cut greedily by `max_step_tokens`; a cut prefill cannot take becomes decodes. A total below 1 plans nothing.

    Raises `BadInput` if `max_step_tokens` is below 1, whatever the total: no slice would advance.
    """
    if max_step_tokens <= 0:
        raise BadInput(f"max_step_tokens {max_step_tokens} is below 1")
    slices: list[Slice] = []
    offset = 0
    while offset < total:
        length = min(max_step_tokens, total - offset)
        if length >= 2 and length >= min_prefill_tokens:
            slices.append(Slice(offset, length, Method.PREFILL))
        else:
            slices.extend(Slice(at, 1, Method.DECODE) for at in range(offset, offset + length))
        offset += length
    return slices


def check_table(table: MethodTable) -> None:
    """Raise `BadInput` unless a batch can be planned on `table`: ascending widths, one dynamic method at most."""
    widest = 0
    seen_static: set[int] = set()
    dynamic: MethodSpec | None = None
    for method in table.methods:
        if method.max_tokens < 1:
            raise BadInput(f"method {method.name} takes {method.max_tokens} tokens, a method takes 1 at least")
        if method.max_tokens < widest:
            raise BadInput(f"method {method.name} takes {method.max_tokens} tokens and stands behind one of {widest}")
        if method.cost_us < 0 or method.cost_ns_per_token < 0:
            cost = f"{method.cost_us} us + {method.cost_ns_per_token} ns per token"
            raise BadInput(f"method {method.name} costs {cost}, a cost is 0 at least")
        widest = method.max_tokens
        if method.static:
            if method.max_tokens in seen_static:
                raise BadInput(f"method {method.name} is the second static one of width {method.max_tokens}")
            seen_static.add(method.max_tokens)
        elif dynamic is not None:
            raise BadInput(f"methods {dynamic.name} and {method.name} are both dynamic, a table has one at most")
        elif not 1 <= method.min_tokens <= method.max_tokens:
            bounds = f"{method.min_tokens} to {method.max_tokens}"
            raise BadInput(f"method {method.name} takes {bounds} tokens, which is no range from 1 up")
        else:
            dynamic = method


def plan_ladder(total: int, table: MethodTable) -> list[Forward]:
    """Cut greedily by the widest method; each cut runs on the narrowest static method that holds it, else dynamic.

    A cut that is too wide for every static method and too narrow for the dynamic one is cut again by the widest static
    width, as `plan_slices` falls back to decodes. An empty table or a total below 1 plans nothing.

    Raises `BadInput` for a table that `check_table` refuses, whatever the total, and for a cut no method can run.
    """
    check_table(table)
    statics = [(method.max_tokens, index) for index, method in enumerate(table.methods) if method.static]
    dynamic = next((index for index, method in enumerate(table.methods) if not method.static), None)
    forwards: list[Forward] = []
    offset = 0
    while table.methods and offset < total:
        cut = min(table.widest, total - offset)
        fitting = next(((width, index) for width, index in statics if width >= cut), None)
        if fitting is not None:
            forwards.append(Forward(offset, cut, *fitting))
        elif dynamic is not None and table.methods[dynamic].min_tokens <= cut <= table.methods[dynamic].max_tokens:
            forwards.append(Forward(offset, cut, cut, dynamic))
        elif statics:
            cut = statics[-1][0]
            forwards.append(Forward(offset, cut, *statics[-1]))
        else:
            raise BadInput(_uncovered(cut, table))
        offset += cut
    return forwards


def plan_cheapest(total: int, table: MethodTable) -> list[Forward]:
    """The cover of least cost, for one total; `CheapestPlanner` keeps what it works out, and says which cover it is.

    Raises `BadInput` for a table that `check_table` refuses, and for a total that its methods cannot tile.
    """
    return list(CheapestPlanner(table).plan(total))


def forward_cost_ns(method: MethodSpec, length: int) -> int:
    """What a forward of `length` real tokens costs; a static method's padding is in its price."""
    return method.cost_us * 1000 + (0 if method.static else length * method.cost_ns_per_token)


def plan_cost_ns(forwards: tuple[Forward, ...] | list[Forward], table: MethodTable) -> int:
    """The sum over a plan, by the table's costs."""
    return sum(forward_cost_ns(table.methods[forward.method], forward.length) for forward in forwards)


def is_measured(table: MethodTable) -> bool:
    """Whether every method has a cost. Costs of some only cannot be compared, so they count as none."""
    return bool(table.methods) and all(method.cost_us or method.cost_ns_per_token for method in table.methods)


def _uncovered(total: int, table: MethodTable) -> str:
    narrowest = min(method.min_tokens for method in table.methods if not method.static)
    return f"{total} tokens cannot be tiled by methods of which each takes {narrowest} at least"


# A cost and a number of forwards as one integer, so that a comparison settles both: cheaper first, then fewer.
_COUNT_BITS = 32
_ONE_FORWARD = 1
_NO_COVER = 1 << 200


class CheapestPlanner:
    """Plans of least cost for one method table.

    A plan is dynamic forwards first, then static ones, each wider first, so that only the last forward is padded.
    Among plans of least cost it is the one with the fewest forwards, then the one whose widths come first in
    descending lexicographic order, then the one that is static earlier. On a table without costs it is `plan_ladder`'s.

    Why that order loses nothing: a cost does not depend on where a forward stands, and in a cheapest cover the padding
    of all static forwards together is less than the narrowest of them is wide (else that one could be left out), so
    the last can carry all of it.

    The first plan of a new largest total costs time proportional to that total times the methods; any other new total
    costs time proportional to its forwards; a total asked for before, one dictionary lookup.
    """

    def __init__(self, table: MethodTable) -> None:
        """Raises `BadInput` for a table that `check_table` refuses."""
        check_table(table)
        self.table = table
        self.measured = is_measured(table)
        self._plans: dict[int, tuple[Forward, ...]] = {}

        statics = [(method, index) for index, method in enumerate(table.methods) if method.static]
        # Widest first: of equally good forwards the first one found stays.
        self._statics = [
            (method.max_tokens, _packed(method.cost_us * 1000), index) for method, index in reversed(statics)
        ]
        dynamic = next((index for index, method in enumerate(table.methods) if not method.static), None)
        self._dynamic = dynamic
        if dynamic is not None:
            method = table.methods[dynamic]
            self._least, self._most = method.min_tokens, method.max_tokens
            self._base = _packed(method.cost_us * 1000)
            self._per_token = method.cost_ns_per_token << _COUNT_BITS
        # By total: the cheapest static cover and its first forward (an index in _statics); the cheapest cover and the
        # length of its first forward where that is dynamic, else 0.
        self._static_best = [0]
        self._static_first = [0]
        self._best = [0]
        self._first_dynamic = [0]
        # Candidates for what is left after a dynamic forward, cheapest first: (cost of the rest less its share of the
        # cost per token, the rest). The oldest of equals stays in front: the smallest rest, hence the widest forward.
        self._rests: deque[tuple[int, int]] = deque()

    def plan(self, total: int) -> tuple[Forward, ...]:
        """Cover `[0, total)`.

        A total below 1, or an empty table, plans nothing. Raises `BadInput` if no cover exists.
        """
        plan = self._plans.get(total)
        if plan is None:
            plan = self._plans[total] = self._make_plan(total)
        return plan

    def cost_ns(self, total: int) -> int:
        """What the plan of `total` costs; 0 on a table without costs."""
        return plan_cost_ns(self.plan(total), self.table) if self.measured else 0

    def tokens_within(self, budget_us: int, limit: int) -> int:
        """The largest total up to `limit` that costs at most `budget_us`; `limit` on a table without costs."""
        if not self.measured:
            return limit
        self._extend(limit)
        budget = _packed(budget_us * 1000 + 1)  # costs below it, whatever the number of forwards
        return next((total for total in range(limit, 0, -1) if self._best[total] < budget), 0)

    def _make_plan(self, total: int) -> tuple[Forward, ...]:
        if not self.measured or total <= 0:
            return tuple(plan_ladder(total, self.table))
        self._extend(total)
        if self._best[total] >= _NO_COVER:
            raise BadInput(_uncovered(total, self.table))
        forwards: list[Forward] = []
        offset = 0
        while offset < total and (length := self._first_dynamic[total - offset]):
            assert self._dynamic is not None
            forwards.append(Forward(offset, length, length, self._dynamic))
            offset += length
        while offset < total:
            width, _, method = self._statics[self._static_first[total - offset]]
            length = min(width, total - offset)
            forwards.append(Forward(offset, length, width, method))
            offset += length
        return tuple(forwards)

    def _extend(self, total: int) -> None:
        """Fill the tables up to `total`."""
        static_best, static_first, best, first_dynamic = (
            self._static_best,
            self._static_first,
            self._best,
            self._first_dynamic,
        )
        choices = [(width, cost, first) for first, (width, cost, _) in enumerate(self._statics)]
        rests = self._rests
        for n in range(len(best), total + 1):
            cheapest, choice = _NO_COVER, 0
            for width, cost, first in choices:
                rest_cost = static_best[n - width] + cost if n > width else cost
                if rest_cost < cheapest:
                    cheapest, choice = rest_cost, first
            static_best.append(cheapest)
            static_first.append(choice)
            length = 0
            if self._dynamic is not None and n >= self._least:
                # n admits one more rest and outgrows one.
                rest = n - self._least
                if best[rest] < _NO_COVER:
                    key = best[rest] - rest * self._per_token
                    while rests and rests[-1][0] > key:
                        rests.pop()
                    rests.append((key, rest))
                while rests and rests[0][1] < n - self._most:
                    rests.popleft()
                if rests:
                    key, rest = rests[0]
                    dynamic_cost = key + n * self._per_token + self._base
                    width = choices[choice][0] if choices else 0
                    if dynamic_cost < cheapest or (dynamic_cost == cheapest and n - rest > width):
                        cheapest, length = dynamic_cost, n - rest
            best.append(cheapest)
            first_dynamic.append(length)


def _packed(cost_ns: int) -> int:
    return (cost_ns << _COUNT_BITS) + _ONE_FORWARD
