"""What has to hold after every event, whatever happened: read from the planner's own books.

`check(control)` raises `AssertionError` with one sentence. It recomputes from scratch what the planner keeps
incrementally, so it costs the whole state: for tests only.
"""

from collections import Counter

from microtome.planner.control import Control
from microtome.planner.generations import State
from microtome.planner.types import Kind
from microtome.planner.worker_plan import WorkerPlan


def check(control: Control) -> None:
    for w in control._roster:
        check_cells(w)
        check_residents(w)
        check_prefixes(w)
        check_steps(w, control._config.plan_ahead)
    check_generations(control)
    check_bounds(control)


def check_cells(w: WorkerPlan) -> None:
    """No cell is owned by nobody, leaked, or counted wrong."""
    table = w.table
    expected = [0] * table.usable_cells
    for history in table._histories.values():
        assert len(set(history.cells)) == len(history.cells), "a sequence holds a cell twice"
        for cell in history.cells:
            expected[cell] += 1
    for cell in table._held:
        expected[cell] += 1
    counted = table._references + [0] * (table.usable_cells - len(table._references))
    assert counted == expected, "a cell has a wrong count of references"
    assert table.free_cells == expected.count(0), "the count of free cells is wrong"
    idle = sum(1 for cell in table._held if expected[cell] == 1)
    assert table.idle_cells == idle, "the count of cells that only the prefix cache holds is wrong"
    assert set(table._histories) == {r.sequence for r in w.residents.values()}, "a live sequence belongs to nobody"
    if w.prefix is not None:
        cached = sorted(_cached_cells(w))
        assert cached == sorted(table._held), "the prefix cache and the table disagree"


def _cached_cells(w: WorkerPlan) -> list[int]:
    assert w.prefix is not None
    cells: list[int] = []
    nodes = list(w.prefix._roots.values())
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        cells += node.cells
    return cells


def check_residents(w: WorkerPlan) -> None:
    rows: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    for step in w.in_flight:
        for one, r in zip(step.inputs, step.residents, strict=True):
            rows[one.session] += 1
            outputs[one.session] += one.wants_output
            assert w.residents.get(one.session) is r, f"session {one.session} left with a step under way"
        for r, _, _ in step.shares:
            rows[r.session.id] += 1
            assert w.residents.get(r.session.id) is r, f"session {r.session.id} left and waits for what it shares"
    running = 0
    for session, r in w.residents.items():
        assert r.session.id == session
        assert r.session.resident is r, f"session {session} does not know its place"
        assert r.rows == rows[session], f"session {session} has {r.rows} rows, {rows[session]} are under way"
        assert r.outputs == outputs[session], f"session {session} awaits {r.outputs}, {outputs[session]} are under way"
        assert r.planned == w.table.length(r.sequence), f"session {session} is planned to {r.planned}"
        assert r.rows or not r.leaving, f"session {session} stays though nothing of it is under way"
        g = r.generation
        running += g is not None
        if g is not None:
            assert g.state is State.RUNNING, f"generation {g.id} is {g.state} and has a place"
            assert g.delivered + r.outputs <= g.limit, f"generation {g.id} is overshot by count"
            standing = w.scheduler.standing(r.session.id)
            idle = not r.rows and standing is None
            assert not idle or r.leaving, f"generation {g.id} runs and nothing of it is under way or waits"
    assert w.running == running, f"{w.running} sessions run, {running} were counted"
    assert w.undone_tokens == sum(r.undone for r in w.residents.values()), "tokens to prefill are counted wrong"
    assert w.undone_tokens >= 0


def check_prefixes(w: WorkerPlan) -> None:
    """What prompts have in common is in the tree, under the cells that hold it, and known to those that wait."""
    if w.prefix is None:
        return
    under_way = {cell for step in w.in_flight if step.cells for cell in step.cells.cells}
    assert w.prefix._planned <= under_way & w.table._held, "a cell counts as planned and no step is to write it"
    for session, r in w.residents.items():
        waits = session in w._followers
        assert waits == (r.place is not None), f"session {session} has a place in the tree and cannot be found, or not"
        if r.place is not None:
            assert r.undone, f"session {session} follows others and has nothing to prefill"
            assert r.place.position == r.planned, f"session {session} is planned to {r.planned}, not {r.place.position}"
    assert set(w._followers._spots) <= set(w.residents), "somebody who is gone follows others"


def check_steps(w: WorkerPlan, plan_ahead: int) -> None:
    assert len(w.in_flight) <= plan_ahead, f"{len(w.in_flight)} steps are under way"
    for step in w.in_flight:
        tokens = sum(one.width for one in step.inputs)
        assert tokens <= w.limits.max_batch_tokens, f"a step of {tokens} tokens is over the budget"
        assert sum(one.kind is Kind.DECODE for one in step.inputs) <= w.limits.max_decodes
        assert step.outputs <= w.capability.max_output_rows
        chunks = [one.width for one in step.inputs if one.kind is Kind.PREFILL]
        assert max(chunks, default=0) <= w.limits.max_prefill_tokens
    if not w.in_flight:
        assert not w.scheduler.has_work, "work waits and no step is under way"


def check_generations(control: Control) -> None:
    """Every generation is in exactly one place."""
    lines = [served.line for served in (control._models.served, *control._models.replaced)]
    in_line = [g.id for line in lines for g in line.in_order()]
    assert len(in_line) == len(set(in_line)), "a generation stands in line twice"
    waiting = sum(g.state in (State.WAITING, State.SETTLING) for g in control._generations.values())
    assert sum(line.waiting for line in lines) == waiting, "those that wait are counted wrong"
    placeless = sum(g.state is not State.RUNNING for g in control._generations.values())
    assert sum(len(line) for line in lines) == placeless, "those without a place are counted wrong"
    for name, g in control._generations.items():
        r = g.session.resident
        placed = r is not None and r.generation is g
        match g.state:
            case State.RUNNING:
                assert placed, f"generation {name} runs nowhere"
                assert name not in in_line
            case State.WAITING | State.RETURNING:
                assert not placed
                assert name in in_line, f"generation {name} waits in no line"
            case State.SETTLING:
                assert not placed
                assert name not in in_line
                if g.leader is not None:
                    assert g in g.leader.followers, f"generation {name} waits for nobody"
                else:
                    assert r is not None, f"generation {name} waits for nothing"
                    assert r.rows or r.leaving, f"generation {name} waits for nothing"
            case State.ENDED:
                raise AssertionError(f"generation {name} has ended and is remembered")
        assert g.session.generation is g
        assert g.session.model in (control._models.served, *control._models.replaced), "its model is forgotten"
        worker = control._roster.get(r.worker) if placed and r is not None else None
        assert worker is None or worker.served is g.session.model, f"generation {name} runs on another model"
        assert len(g.session.transcript) == g.generated_from + g.delivered


def check_bounds(control: Control) -> None:
    config = control._config
    assert control._models.served.line.waiting <= config.max_waiting, f"{control._models.served.line.waiting} wait"
    idle = {s for w in control._roster for s, r in w.residents.items() if r.generation is None and not r.rows}
    assert idle == {s for w in control._roster for s in w.idle}, "the idle sessions are listed wrong"
    hidden = {g.session.id for g in control._generations.values() if not g.session.opened}
    opened = {s.id for s in control._sessions._by_id.values() if s.opened}
    assert set(control._sessions._by_id) == hidden | opened, "a session that nobody can reach is kept"
    assert control._sessions.opened == len(opened) <= config.max_sessions
    assert len(control._roster._fenced) <= 1024
