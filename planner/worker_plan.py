"""One worker's side of the plan: its residents, its cells, its scheduler, its steps under way.

Owns what is true of one incarnation: which session lies in which sequence, what was sent and not yet answered, which
sequence operations wait for the next step. `Control` decides who comes and goes; this class keeps the books exact and
forms steps. A step is formed, then settled once: `settle` on its result, or `abort_all` when the worker refused it.

No token of a prompt is computed twice while somebody else's computation of it is planned. Chunks enter the prefix tree
as they are planned, with the cells that will hold them; every session whose prompt goes on likewise takes those cells
over, and has that much less to run, in the same step or a later one. Steps run in order, so do the inputs of one, and
each forward writes its cells before it reads any: what is shared is there when it is read. Nobody waits for anybody:
whoever's turn comes first computes, whatever its rank, and a share once taken is as good as a cell of one's own, which
its first owner's cancellation or parking does not touch. It stands and falls with a step alone: `abort_all` takes it
back, newest first, with the steps that were to write it.

The work of a step grows with the inputs in it and the cells they share, not with residents, pool or history; only
relief under pressure looks at every resident. Cells, widths and positions count tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from microtome.planner.cells import CellPlan, CellTable
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.followers import Followers
from microtome.planner.generations import Generation, Rank
from microtome.planner.policies import POLICIES
from microtome.planner.prefix import PrefixCache
from microtome.planner.pressure import by_seniority, most_junior
from microtome.planner.resident import Resident
from microtome.planner.served import Served
from microtome.planner.sessions import Session
from microtome.planner.slicing import CheapestPlanner
from microtome.planner.types import (
    Annotate,
    Capability,
    Cell,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    Input,
    InputFlag,
    Kind,
    OpenSequence,
    Position,
    SequenceId,
    SequenceOp,
    SessionId,
    SetSampling,
    StepNumber,
    StepPlan,
    StepResult,
    TruncateSequence,
    WorkerId,
)

_NARROWEST_CHUNK = 16  # tokens; narrower ones would cost more steps than they save time in each
_DECODE_FLAGS = int(InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK)
_DECODE = Kind.DECODE
_WANTS_OUTPUT = int(InputFlag.WANTS_OUTPUT)
_ASKS = int(InputFlag.PROMPT_LOGPROBS)
_STARTS_BYTES = 4 << 20  # of policies and notes in one plan, about: what comes with generations that start
_NEWEST: Rank = (2**127, 0)  # junior to every generation

Slices = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Share(NamedTuple):
    """A resident that took over cells from position `start` on, which the step or one before it is to write."""

    resident: Resident
    start: int
    op: ExtendSequence  # sent with the step or the next one


class Step:
    """A step under way: one entry per input in packed order, and what is needed to take it back."""

    __slots__ = (
        "after_pause",
        "asking",
        "cells",
        "inputs",
        "number",
        "ops",
        "outputs",
        "prefilled",
        "prompt_rows",
        "residents",
        "sent_us",
        "shares",
    )

    def __init__(
        self,
        number: StepNumber,
        inputs: Sequence[Input],
        residents: list[Resident],
        outputs: int,
        cells: CellPlan | None,
        ops: tuple[SequenceOp, ...],
        sent_us: int,
        after_pause: bool,
        prefilled: int,
        shares: list[Share],
        asking: Sequence[int],
    ) -> None:
        self.number = number
        self.inputs = inputs
        self.residents = residents
        self.outputs = outputs
        self.cells = cells  # None: a step of operations only
        self.ops = ops
        self.sent_us = sent_us
        self.prefilled = prefilled  # tokens given, not fed back
        self.shares = shares  # settled with it
        self.asking = asking  # indices of the inputs that ask how likely their prompt is
        self.prompt_rows = sum([inputs[at].width - inputs[at].wants_output for at in asking]) if asking else 0
        self.after_pause = after_pause  # before it there was nothing to do: the worker's gap is no idling


class WorkerPlan:
    """Mutable; `Control` is its one caller."""

    def __init__(
        self,
        worker: WorkerId,
        capability: Capability,
        config: PlannerConfig,
        last_step: StepNumber,
        served: Served,
    ) -> None:
        """Raises `BadConfig` or `BadInput` if the configuration or the method table cannot work on this worker."""
        self.id = worker
        self.capability = capability
        self.incarnation = capability.incarnation
        self.limits = config.limits_for(capability)
        self.max_session_tokens = min(
            capability.usable_cells, capability.max_session_tokens, config.max_session_tokens or capability.usable_cells
        )
        self.table = CellTable(capability.usable_cells, capability.max_sequences)
        self.prefix = PrefixCache(self.table) if config.prefix_cache else None
        self.slicer = CheapestPlanner(capability.table)
        if not self.slicer.plan(1):  # what can run one token can run any number
            raise BadConfig(f"worker {worker} has no method")
        if capability.max_output_rows < 1:
            raise BadConfig(f"worker {worker} has max_output_rows {capability.max_output_rows}, it needs 1 at least")
        target = self._target_tokens(config)
        if target is not None and config.max_prefill_tokens is None:
            # A chunk is to fit beside decodes that take half of the step: the scheduler never splits one.
            chunk = min(self.limits.max_prefill_tokens, max(_NARROWEST_CHUNK, target // 2))
            self.limits = replace(self.limits, max_prefill_tokens=chunk)
        self.scheduler = POLICIES[config.policy](
            max_batch_tokens=self.limits.max_batch_tokens,
            max_decodes=self.limits.max_decodes,
            max_prefill_tokens=self.limits.max_prefill_tokens,
            target_step_tokens=target,
            tenant_weights=config.weights(),
        )
        self.residents: dict[SessionId, Resident] = {}
        self.running = 0  # residents with a generation
        self._priorities: dict[int, int] = {}  # and how many there are of each priority
        self.idle: dict[SessionId, Resident] = {}  # those between generations, the one used longest ago first
        self.in_flight: deque[Step] = deque()
        self.served = served
        self.revision = 0  # of the settings it was started with
        self.joined_us = 0
        self.draining = False
        self.drain_until_us: int | None = (
            None  # while it drains: what is still on it then has to go; None: that is over
        )
        self.quiet_since_us = 0  # nothing is under way, or its last answer came then
        self.refused_steps = 0  # in a row
        self.steps = 0
        self.step_us = 0  # sum over settled steps
        self.idle_us = 0  # while work waited
        self._paused = True  # nothing is under way, and nothing was there to do
        self.undone_tokens = 0  # tokens of residents' transcripts that are still to be prefilled
        self.parked: list[Generation] = []  # lost their place while a step was formed; `Control` takes them
        self._plan_ahead = config.plan_ahead
        self._headroom_tokens = config.headroom_tokens
        self._next_step = last_step + 1
        self._refusals = 0  # of the steps under way, how many were refused; those behind them are about to be
        self._ops: list[SequenceOp] = []
        self._starts_bytes = 0  # of those that wait, policies and notes
        self._followers = Followers()
        self._forming: tuple[CellPlan, list[Share]] | None = None  # of the step that is being formed
        self.found_tokens = 0  # of prompts, shared after their start; `Control` takes them
        self._slices: dict[int, Slices] = {}

    # --- reading ---

    @property
    def cells_cached(self) -> int:
        """Cells that only the prefix cache holds."""
        return self.prefix.evictable_cells if self.prefix else 0

    @property
    def room(self) -> int:
        """Cells that nobody needs yet: free or evictable, less what residents have still to prefill."""
        return self.table.free_cells + self.cells_cached - self.undone_tokens

    @property
    def headroom(self) -> int:
        """Cells to be left for the residents' next tokens when one more starts."""
        return min(self.running * self._headroom_tokens, self.table.usable_cells // 8)

    @property
    def has_sequence(self) -> bool:
        return self.table.live_sequences < self.table.max_sequences

    @property
    def may_plan(self) -> bool:
        return len(self.in_flight) < self._plan_ahead and not self._refusals

    def prefix_key(self, session: Session) -> tuple[str, ...]:
        return (self.capability.fingerprint, session.cache_salt)

    def cached_tokens(self, session: Session) -> int:
        """How many of the transcript's first tokens lie in the prefix cache."""
        return self.prefix.peek(self.prefix_key(session), session.transcript) if self.prefix else 0

    # --- coming and going ---

    def start(self, generation: Generation, note: bytes) -> bool:
        """Give the generation's session a place, or go on with the one it has. False: no room, nothing changed."""
        session = generation.session
        weight = len(note) + generation.policy_bytes
        if self._starts_bytes and self._starts_bytes + weight > _STARTS_BYTES:
            return False  # a message holds only so much: it starts with the step after the next
        while (r := self._place(generation)) is None:
            if not self._part_with_idle(session):
                return False
        self.idle.pop(session.id, None)
        self.residents[session.id] = r
        session.resident = r
        self._ops.append(SetSampling(r.sequence, generation.sampling))
        self._ops.append(Annotate(r.sequence, note))
        self._starts_bytes += weight
        r.generation = generation
        r.ended = None
        r.feedback_at = None  # what was sampled for an earlier generation is given as a token
        if generation.runs_from is not None:
            self._trim(r, generation.runs_from)
        self._count(generation, 1)
        self.scheduler.admit(session.id, priority=generation.options.priority, tenant=generation.options.tenant)
        self._submit(r)
        return True

    def clone(self, source: Resident, twin: Session, note: bytes) -> bool:
        """Give `twin`, a clone of the resident's session, the cells of what it shares. False: no sequence is free."""
        upto = min(len(twin.transcript), self.table.committed(source.sequence))
        if upto == 0 or not self.has_sequence:
            return False
        r = self._clone(source, twin, upto)
        self.residents[twin.id] = self.idle[twin.id] = r
        twin.resident = r
        self._ops.append(Annotate(r.sequence, note))
        return True

    def adopt(self, session: Session, sequence: SequenceId, generation: Generation | None, sampled: bool) -> None:
        """A sequence of the restored table belongs to this session. `sampled`: its last token is on the device."""
        length = self.table.length(sequence)
        r = Resident(session, self.id, sequence, length)
        session.resident = r
        self.residents[session.id] = r
        if generation is None:
            self.idle[session.id] = r
            return
        r.generation = generation
        self._count(generation, 1)
        self.scheduler.admit(session.id, priority=generation.options.priority, tenant=generation.options.tenant)
        if sampled:
            r.feedback_at = length
        else:
            self._trim(r, len(session.transcript) - 1)  # the last token is run again, for the one after it
        self._submit(r)

    def disown(self, sequence: SequenceId) -> None:
        """A sequence of the restored table that belongs to nobody."""
        self.table.remove(sequence)
        self._ops.append(DropSequence(sequence))

    def make_way(self, generation: Generation) -> bool:
        """Park running sessions of lower priority, the most junior first, if `generation` can start then.

        False: nothing was changed; it cannot, or cells that are about to be free are enough. Those without a step under
        way are in `parked`.
        """
        priority = generation.options.priority
        if min(self._priorities, default=priority) >= priority:
            return False
        lacking = (generation.needed or len(generation.session.transcript)) + self.headroom - self.room
        sequences = not self.has_sequence
        junior: list[Resident] = []
        for r in self.residents.values():
            g = r.generation
            if r.leaving:
                lacking -= self.table.length(r.sequence)
                sequences = False
            elif g is not None and g.options.priority < priority and g.rank > generation.rank:
                junior.append(r)
        if lacking <= 0 and not sequences:
            return False
        junior.sort(key=self._rank)
        giving: list[Resident] = []
        while junior and (lacking > 0 or (sequences and not giving)):
            giving.append(junior.pop())
            lacking -= self.table.length(giving[-1].sequence) + self._headroom_tokens
        if lacking > 0 or not giving:
            return False
        for r in giving:
            self._park(r)
        return True

    def end(self, resident: Resident) -> None:
        """The resident's generation is over: nothing more of it is run; what is under way is void."""
        self._withdraw(resident)
        if resident.generation is not None:
            self._count(resident.generation, -1)
        resident.generation = None

    def leave(self, resident: Resident) -> None:
        """The resident gives up its cells: now, or when what is under way of it is settled."""
        if not resident.leaving:
            self._withdraw(resident)
            self.idle.pop(resident.session.id, None)
            resident.leaving = True
        if not resident.rows:
            self._remove(resident)

    def rest(self, resident: Resident, length: int, note: bytes) -> None:
        """The resident is idle, its session's committed length is `length`, and nothing of it is under way."""
        self._trim(resident, length)
        self.remember(resident)
        self._ops.append(Annotate(resident.sequence, note))
        self.idle[resident.session.id] = resident

    def remember(self, resident: Resident) -> None:
        """Let the prefix cache hold what the resident has committed of its transcript."""
        if self.prefix is None:
            return
        length = self._known(resident)
        if length > resident.inserted:
            session = resident.session
            cells = self.table.cells(resident.sequence, 0, length)
            self.prefix.insert(self.prefix_key(session), session.transcript[:length], cells)
            resident.inserted = length

    # --- steps ---

    def form_step(self, now_us: int) -> StepPlan | None:
        """The next step, if one may be sent and there is work. Sessions that gave way for it are in `parked`."""
        if not self.may_plan:
            return None
        batch, shares, cell_plan = self._form_batch()
        if not batch and not shares and (self.in_flight or not self._ops):
            self._paused = not self.in_flight
            return None  # operations alone wait for the next step, unless none is coming
        residents = self.residents
        holders = [residents[one.session] for one in batch]
        sequences = [r.sequence for r in holders]
        starts = [one.start for one in batch]
        widths = [one.width for one in batch]
        flags: list[int] = []
        tokens: list[int] = []
        decodes: list[Input] = []  # of the step after this one
        asking: list[int] = []
        next_tokens: list[int] = []
        for one, r in zip(batch, holders, strict=True):
            end = one.start + one.width
            if one.kind is _DECODE:
                r.rows += 1
                r.planned = end
                flags.append(_DECODE_FLAGS)
            else:
                tokens += r.session.transcript[one.start : end]
                flag = 0
                if self._asks(one):
                    flag = _ASKS
                    asking.append(len(flags))
                    if not one.wants_output:
                        next_tokens.append(r.session.transcript[end])
                if not one.wants_output:
                    flags.append(flag)
                    continue
                flags.append(_WANTS_OUTPUT | flag)
            r.outputs += 1
            r.feedback_at = end
            g = r.generation
            assert g is not None
            if g.delivered + r.outputs < g.limit:
                # Written out: a call and a conversion per token are a tenth of the planner's time.
                following = Input(session=one.session, kind=_DECODE, start=end, width=1, wants_output=True)  # type: ignore[arg-type]
                decodes.append(following)
        if decodes:
            accepted = self.scheduler.submit(decodes)
            assert accepted, "a decode of one token is never refused"
        total = sum(widths)
        outputs = len(flags) - flags.count(0) - flags.count(_ASKS)
        slices = self._slices.get(total) or self._plan_slices(total)
        ops = tuple(self._ops)
        self._ops.clear()
        self._starts_bytes = 0
        if not self.in_flight:
            self.quiet_since_us = now_us
        number = StepNumber(self._next_step)
        self._next_step += 1
        self.in_flight.append(
            Step(number, batch, holders, outputs, cell_plan, ops, now_us, self._paused, len(tokens), shares, asking)
        )
        self._paused = False
        return StepPlan(
            incarnation=self.incarnation,
            step=number,
            table_digest=self.capability.table.digest,
            ops=ops,
            sequences=sequences,
            starts=starts,
            widths=widths,
            flags=flags,
            cells=cell_plan.cells if cell_plan else (),
            tokens=tokens,
            slice_offsets=slices[0],
            slice_lengths=slices[1],
            slice_methods=slices[2],
            next_tokens=next_tokens,
        )

    def settle(self, result: StepResult) -> Step:
        """The oldest step was run: its cells are history. Its residents' rows and outputs are the caller's to count."""
        step = self.in_flight.popleft()
        if step.cells is not None:
            self.table.commit(step.cells)
            if self.prefix is not None:
                self.prefix.settle(step.cells.cells)
        self.refused_steps = 0
        self.steps += 1
        self.step_us += result.step_us
        self.idle_us += 0 if step.after_pause else result.idle_us
        return step

    def refused(self) -> list[Resident] | None:
        """The worker refused the step it was to answer next and touched nothing; so it will those sent behind it.

        None while their answers are to come. With the last one, all are taken back and may be planned anew; returns
        the residents that were in them.
        """
        self._refusals += 1
        if self._refusals < len(self.in_flight):
            return None
        self._refusals = 0
        self.refused_steps += 1
        return self._abort_all()

    @property
    def awaited(self) -> Step | None:
        """The step whose answer comes next."""
        return self.in_flight[self._refusals] if self.in_flight else None

    @property
    def refusing(self) -> bool:
        return self._refusals > 0

    # --- inside: places ---

    def _target_tokens(self, config: PlannerConfig) -> int | None:
        """Tokens of a step that takes `target_step_ms`, by the measured costs; None: no target, or nothing measured."""
        if config.target_step_ms is None or not self.slicer.measured:
            return None
        return max(1, self.slicer.tokens_within(int(config.target_step_ms * 1000), self.limits.max_batch_tokens))

    def _fits(self, generation: Generation, needed: int) -> bool:
        if needed + self.headroom <= self.room:
            return True
        generation.needed = min(generation.needed or needed, needed)
        return False

    def _place(self, generation: Generation) -> Resident | None:
        """The place that the generation's session has, or a new one; None: no room."""
        r = generation.session.resident
        if r is None:
            return self._clone_leader(generation) or self._open(generation)
        return r if self._fits(generation, len(generation.session.transcript) - r.planned) else None

    def _part_with_idle(self, session: Session) -> bool:
        """Let the idle session that was used longest ago give up its cells; the cache may keep them. False: none is."""
        other = next((r for name, r in self.idle.items() if name != session.id), None)
        if other is not None:
            self.leave(other)
        return other is not None

    def _open(self, generation: Generation) -> Resident | None:
        session = generation.session
        if not self.has_sequence:
            return None
        found: tuple[Cell, ...] = ()
        place, written = None, 0
        if self.prefix is not None:
            found, place = self.prefix.find(self.prefix_key(session), session.transcript)
            if generation.runs_from is not None:
                found, place = found[: generation.runs_from], None
            written = self.prefix.planned_from(found)
        # Opened before the question whether it fits: cells it shares cannot be evicted for it.
        sequence = self.table.open(found[:written])
        if not self._fits(generation, len(session.transcript) - len(found)):
            self.table.remove(sequence)
            return None
        self._ops.append(OpenSequence(sequence, found[:written]))
        r = Resident(session, self.id, sequence, written)
        r.inserted = written
        r.place = place
        if written < len(found):
            self._take_over(r, found[written:])
        return r

    def _clone_leader(self, generation: Generation) -> Resident | None:
        """One of n completions shares its leader's prompt, all but the last token, which each forwards itself."""
        leader = generation.leader.session.resident if generation.leader else None
        if leader is None or self.residents.get(leader.session.id) is not leader or not self.has_sequence:
            return None
        upto = generation.generated_from - 1
        if generation.delivered or upto < 1 or self._known(leader) < upto:
            return None
        if leader.session.transcript[:upto] != generation.session.transcript[:upto]:
            return None  # the leader was cancelled, and its session went on with something else
        if not self._fits(generation, 1):
            return None
        return self._clone(leader, generation.session, upto)

    def _clone(self, source: Resident, twin: Session, upto: int) -> Resident:
        sequence = self.table.clone(source.sequence, upto)
        self._ops.append(CloneSequence(sequence, source.sequence, Position(upto)))
        r = Resident(twin, self.id, sequence, upto)
        r.inserted = min(source.inserted, upto)
        return r

    def _known(self, resident: Resident) -> int:
        """How many of its committed cells, from the first, hold its session's transcript as it is now.

        Cells beyond may hold what was sampled and never delivered, while a generation that waits for them to be
        settled has put its prompt in the same positions of the transcript.
        """
        session = resident.session
        following = session.generation
        length = len(session.transcript)
        if following is not None and following is not resident.generation:
            length = following.base + following.had_pending
        return min(self.table.committed(resident.sequence), length)

    def _trim(self, resident: Resident, length: int) -> None:
        """Forget what the resident has from position `length` up. Nothing of it is under way."""
        if self.table.length(resident.sequence) > length:
            self.table.rewind(resident.sequence, length)
            self._ops.append(TruncateSequence(resident.sequence, Position(length)))
            resident.planned = length
            resident.feedback_at = None
            resident.inserted = min(resident.inserted, length)

    def _submit(self, r: Resident) -> None:
        """Let the scheduler hold what the resident has to run, from its planned length on."""
        self._follow(r)
        inputs = r.next_inputs(self.limits.max_prefill_tokens, self.capability.max_output_rows)
        if not inputs:
            return
        accepted = self.scheduler.submit(inputs)
        assert accepted, "inputs are cut to the scheduler's limits"
        if inputs[0].kind is Kind.PREFILL:
            r.undone = sum(one.width for one in inputs)
            self.undone_tokens += r.undone

    def _withdraw(self, r: Resident) -> None:
        self._part(r)
        self.scheduler.dismiss(r.session.id)
        self.undone_tokens -= r.undone
        r.undone = 0

    def _remove(self, r: Resident) -> None:
        self.remember(r)
        self.table.remove(r.sequence)
        self._ops.append(DropSequence(r.sequence))
        del self.residents[r.session.id]
        r.session.resident = None
        if r.generation is not None:
            self._count(r.generation, -1)

    def _count(self, generation: Generation, change: int) -> None:
        self.running += change
        priority = generation.options.priority
        self._priorities[priority] = self._priorities.get(priority, 0) + change
        if not self._priorities[priority]:
            del self._priorities[priority]

    # --- inside: what prompts have in common ---

    def _follow(self, r: Resident) -> None:
        """A prompt is about to be prefilled: it takes over what is planned of it already, and whatever comes."""
        g = r.generation
        if self.prefix is None or g is None or r.leaving or r.feedback_at == r.planned or g.runs_from is not None:
            return
        if r.place is None:
            key, transcript = self.prefix_key(r.session), r.session.transcript
            r.place = self.prefix.place(key, transcript, r.planned)
            if r.place is None and not r.rows:
                self.remember(r)
                r.place = self.prefix.place(key, transcript, r.planned)
        self._extend(r)

    def _extend(self, r: Resident) -> None:
        """Let a resident take over what others have planned, or computed, of the tokens that come next in its prompt.

        Costs one look-up where that is nothing, else the tokens.
        """
        if self.prefix is None or r.place is None:
            return
        cells = self.prefix.follow(r.place, r.session.transcript)
        if cells:
            self._take_over(r, cells)
        self._wait(r)

    def _leads_on(self, r: Resident) -> bool:
        """Whether others have planned the next token of its prompt."""
        return self.prefix is not None and r.place is not None and self.prefix.leads_on(r.place, r.session.transcript)

    def _take_over(self, r: Resident, cells: Sequence[Cell]) -> None:
        """Lengthen a resident by cells that hold, or are to hold, the next tokens of its prompt."""
        assert self.prefix is not None
        start = r.planned
        op = ExtendSequence(r.sequence, tuple(cells))
        self._ops.append(op)
        if r.rows or self.prefix.planned_from(cells) < len(cells):
            plan, shares = self._newest()
            self.table.share(plan, r.sequence, cells)
            shares.append(Share(r, start, op))
            r.rows += 1
        else:
            self.table.extend(r.sequence, cells)
        r.planned = start + len(cells)
        if r.undone:
            r.undone -= len(cells)
            self.undone_tokens -= len(cells)
            self.scheduler.skip(r.session.id, r.planned)
        self._count_found(r, start, len(cells))

    def _newest(self) -> tuple[CellPlan, list[Share]]:
        """What cells are shared with that are not written yet: the newest step."""
        if self._forming is not None:
            return self._forming
        step = next(step for step in reversed(self.in_flight) if step.cells is not None)
        assert step.cells is not None
        return step.cells, step.shares

    def _wait(self, r: Resident) -> None:
        """Let a resident be found by whoever plans the next token of its prompt."""
        assert self.prefix is not None
        assert r.place is not None
        frontier = self.prefix.frontier(r.place, r.session.transcript)
        if frontier is None or r.place.position != r.planned:
            self._part(r)  # the tree was cut in front of it
        else:
            self._followers.wait(r, frontier, r.session.transcript[r.planned])

    def _part(self, r: Resident) -> None:
        """It has no more to prefill, or no place in the tree."""
        if r.place is not None:
            r.place = None
            self._followers.leave(r.session.id)

    def _count_found(self, r: Resident, start: int, tokens: int) -> None:
        """So many tokens from `start` on need not be computed; below 0: they have to be, after all."""
        g = r.generation
        if g is not None and r.prompt_from is not None:
            found = max(0, abs(tokens) - max(0, r.prompt_from - start))
            g.cached_tokens += found if tokens > 0 else -found
            self.found_tokens += found if tokens > 0 else 0

    # --- inside: steps ---

    def _form_batch(self) -> tuple[Sequence[Input], list[Share], CellPlan | None]:
        """The inputs of the next step, with their cells; what it shares."""
        shares: list[Share] = []
        batch: Sequence[Input] = self.scheduler.next_batch()
        if not batch:
            return batch, shares, None
        batch = self._within_output_rows(batch, self.capability.max_output_rows)
        short = sum([one.width for one in batch]) - self.table.free_cells
        if short > self.cells_cached:
            if self.prefix is not None:
                self.prefix.evict(short)
            batch = self._relieve(batch)
        decodes = batch
        if batch and batch[-1].kind is not _DECODE:
            decodes = [one for one in batch if one.kind is _DECODE]
        if decodes:
            self._evict_for(len(decodes))
            residents = self.residents
            plan = self.table.plan([(residents[one.session].sequence, one.start, 1) for one in decodes])
        if len(decodes) == len(batch):
            return batch, shares, plan if decodes else None
        if not decodes:
            plan = self.table.begin()
        self._forming = (plan, shares)
        prefills = self._plan_prefills(batch[len(decodes) :], self._rows_left(decodes))
        self._forming = None
        if not (decodes or prefills or shares):
            self.table.abort(plan)
            return (), shares, None
        return [*decodes, *prefills], shares, plan

    def _plan_prefills(self, chunks: Sequence[Input], rows: int) -> list[Input]:
        """Give chunks their cells, in turn, less what somebody else plans; where that leaves room, further ones.

        `rows`: of output that the step can still have. What finds no cell goes back to the scheduler.
        """
        planned: list[Input] = []
        later: list[Input] = []
        in_step: set[SessionId] = set()
        while chunks:
            unused: list[tuple[SessionId, int]] = []
            for at, one in enumerate(chunks):
                r = self.residents[one.session]
                if one.session not in in_step:
                    self._extend(r)
                elif one.start > r.planned or self._leads_on(r):
                    later.append(one)  # somebody else runs these tokens in this step: they are taken over in the next
                    continue
                shared = min(r.planned, one.end) - one.start
                if shared:
                    unused.append((one.session, shared))
                    if shared == one.width:
                        continue
                    one = replace(one, start=Position(one.start + shared), width=one.width - shared)
                if not self._evict_for(one.width):
                    self.scheduler.put_back([*later, one, *self._left_of(chunks[at + 1 :])])
                    return planned
                in_step.add(one.session)
                planned.append(one)
                rows -= self._logits_rows(one)
                self._plan_chunk(r, one, in_step)
            chunks = self._within_output_rows(self.scheduler.more(unused), rows) if unused else ()
        self.scheduler.put_back(later)
        return planned

    def _plan_chunk(self, r: Resident, one: Input, in_step: set[SessionId]) -> None:
        """Give a chunk its cells, and share them with those whose prompts go on with the same tokens.

        A session that has a chunk in this step before this one takes them over later: its operations come first.
        """
        assert self._forming is not None
        cells = self.table.grow(self._forming[0], r.sequence, one.start, one.width)
        r.rows += 1
        r.planned = one.end
        r.undone -= one.width
        self.undone_tokens -= one.width
        if self.prefix is None or r.place is None:
            return
        grown = self.prefix.grow(r.place, r.session.transcript, cells)
        if r.undone:
            self._wait(r)
        else:
            self._part(r)
        if grown is not None:
            at, frontier = grown
            for follower in self._followers.of(frontier, r.session.transcript[at]):
                if follower.session.id not in in_step:
                    self._extend(follower)

    def _left_of(self, chunks: Sequence[Input]) -> list[Input]:
        """Chunks that were handed out, less what their sessions share by now."""
        left = []
        for one in chunks:
            start = max(one.start, min(self.residents[one.session].planned, one.end))
            if start < one.end:
                left.append(replace(one, start=Position(start), width=one.end - start))
        return left

    def _evict_for(self, needed: int) -> bool:
        """Whether so many cells are free, after cached ones were given up for them."""
        short = needed - self.table.free_cells
        return short <= 0 or (self.prefix is not None and self.prefix.evict(short) >= short)

    def _rows_left(self, decodes: Sequence[Input]) -> int:
        return self.capability.max_output_rows - sum([one.wants_output for one in decodes])

    def _within_output_rows(self, batch: Sequence[Input], limit: int) -> Sequence[Input]:
        """What the worker can sample in one step; inputs beyond wait for the next, and their sessions' behind them."""
        if len(batch) <= limit and (not batch or batch[-1].kind is _DECODE):
            return batch
        kept: list[Input] = []
        later: list[Input] = []
        blocked: set[SessionId] = set()
        for one in batch:
            rows = self._logits_rows(one)
            if one.session in blocked:
                later.append(one)
                continue
            if rows > limit:
                blocked.add(one.session)
            if rows > limit and rows > 1 and limit:
                # Of a prompt that is asked about, as much as there are rows left for.
                kept.append(replace(one, width=limit, wants_output=False))
                later.append(replace(one, start=Position(one.start + limit), width=one.width - limit))
                limit = 0
            elif rows > limit:
                later.append(one)
            else:
                limit -= rows
                kept.append(one)
        self.scheduler.put_back(later)
        return kept

    def _relieve(self, batch: Sequence[Input]) -> Sequence[Input]:
        """Make room as `pressure` says; what finds no cell goes back to the scheduler."""
        later: list[Input] = []
        kept: set[tuple[SessionId, int]] = set()
        while batch:
            ranks = {one.session: self._rank(self.residents[one.session]) for one in batch}
            blocked: set[SessionId] = set()
            taken = 0
            for one in by_seniority(batch, ranks):
                r = self.residents.get(one.session)
                if r is None or r.leaving:
                    continue  # parked for a more senior one of this very batch
                if one.session in blocked or not self._make_room(taken + one.width, ranks[one.session]):
                    blocked.add(one.session)
                    later.append(one)
                else:
                    kept.add((one.session, one.start))
                    taken += one.width
            if kept or self.in_flight:
                break
            # Nothing fits and no step under way will free a cell: a more senior session's input was not handed out yet.
            batch = self._within_output_rows(self.scheduler.next_batch(), self.capability.max_output_rows)
        # Of those that found no cell some may have given way to one that was handed out after them.
        self.scheduler.put_back([one for one in later if self._stays(one.session)])
        return [one for one in batch if (one.session, one.start) in kept and self._stays(one.session)]

    def _asks(self, one: Input) -> bool:
        """Whether it is to be reported how likely the tokens behind those of this input are."""
        g = self.residents[one.session].generation
        asked_from = g.runs_from if g is not None and one.kind is not _DECODE else None
        return asked_from is not None and one.start >= asked_from

    def _logits_rows(self, one: Input) -> int:
        return one.width if self._asks(one) else int(one.wants_output)

    def _stays(self, session: SessionId) -> bool:
        r = self.residents.get(session)
        return r is not None and not r.leaving

    def _rank(self, r: Resident) -> Rank:
        return r.generation.rank if r.generation else _NEWEST

    def _make_room(self, needed: int, rank: Rank) -> bool:
        """Whether `needed` cells are free, after sessions junior to `rank` gave way."""
        coming = 0
        while needed > self.table.free_cells:
            if self.prefix is not None and self.prefix.evict(needed - self.table.free_cells):
                continue
            if needed <= self.table.free_cells + coming:
                return False  # enough is about to be free: nobody else has to give way
            victim = next(iter(self.idle.values()), None) or most_junior(self.residents.values(), rank)
            if victim is None:
                return False
            coming += self._park(victim)
        return True

    def _park(self, victim: Resident) -> int:
        """Cells that will be free once what is under way of the victim is settled; 0: they are free, or cached, now."""
        g = victim.generation
        cells = self.table.length(victim.sequence)
        self.leave(victim)
        if victim.rows:
            return cells
        if g is not None:
            self.parked.append(g)
        return 0

    def _abort_all(self) -> list[Resident]:
        """Take back every step under way, newest first, as if none had been formed. Returns who was in them."""
        touched: dict[SessionId, Resident] = {}
        ops: list[SequenceOp] = []
        void: set[int] = set()  # operations that share what will not be written
        if self.prefix is not None:
            self.prefix.forget_planned()
        while self.in_flight:
            step = self.in_flight.pop()
            if step.cells is not None:
                self.table.abort(step.cells)
            for one, r in zip(reversed(step.inputs), reversed(step.residents), strict=True):
                r.rows -= 1
                r.outputs -= one.wants_output
                r.planned = min(r.planned, one.start)
                r.feedback_at = one.start if one.kind is Kind.DECODE else None
                touched[one.session] = r
            for share in step.shares:
                r = share.resident
                r.rows -= 1
                r.planned = min(r.planned, share.start)
                touched[r.session.id] = r
                void.add(id(share.op))
                self._count_found(r, share.start, -len(share.op.cells))
            ops = [*step.ops, *ops]
            self._next_step = step.number
        self._ops = [op for op in ops + self._ops if id(op) not in void]
        again: list[Input] = []
        for session, r in touched.items():
            if self.residents.get(session) is r and r.generation is not None and not r.leaving:
                self.scheduler.cancel(session)
                self.undone_tokens -= r.undone
                r.undone = 0
                self._part(r)
                self._follow(r)
                inputs = r.next_inputs(self.limits.max_prefill_tokens, self.capability.max_output_rows)
                if inputs and inputs[0].kind is Kind.PREFILL:
                    r.undone = sum(one.width for one in inputs)
                    self.undone_tokens += r.undone
                again += inputs
        self.scheduler.put_back(again)
        return list(touched.values())

    def _plan_slices(self, total: int) -> Slices:
        forwards = self.slicer.plan(total)
        slices = (
            tuple(f.offset for f in forwards),
            tuple(f.length for f in forwards),
            tuple(f.method for f in forwards),
        )
        self._slices[total] = slices
        return slices
