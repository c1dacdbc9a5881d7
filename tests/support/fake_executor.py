"""An executor without a device: keeps every promise of `Executor`, checks more than a real one can, computes integers.

Whatever a plan gets wrong is refused with `StalePlan` before anything changes: tiling, counts, rows that are not
contiguous, a feedback without a sampled token, a cell written while another sequence holds it, a cell read that was
never written. `fail_at`, `refuse_at` and `die_at` script faults by step number; `seen` keeps the plans that were run.

`build_executor(options)` is what a worker's configuration names. `options.model` may carry settings:
"fake:step_ms=5,vocab=500,fail_at=7".
"""

import os
import time
from collections.abc import Iterable, Sequence

from microtome.planner.errors import BadConfig, StalePlan, StepError
from microtome.planner.types import (
    Annotate,
    Capability,
    Cell,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    Incarnation,
    InputFlag,
    MethodSpec,
    MethodTable,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SequenceSnapshot,
    SetSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TruncateSequence,
)
from tests.support.fake_model import content, draw, logprobs_of


def method_table(widths: Sequence[int], max_step_tokens: int, min_prefill_tokens: int = 2) -> MethodTable:
    """A ladder of static widths and, when `max_step_tokens` is wider, one dynamic method above them.

    Each costs 1 ms and 20 us a token, padding included.
    """
    methods = [
        MethodSpec(name=f"forward_{n}", max_tokens=n, static=True, cost_us=1000 + 20 * n)
        for n in sorted(set(widths))
        if n <= max_step_tokens
    ]
    widest = methods[-1].max_tokens if methods else 0
    if max_step_tokens > widest:
        lowest = min(max(min_prefill_tokens, 1), widest + 1)
        methods.append(
            MethodSpec(
                name="forward_others",
                min_tokens=lowest,
                max_tokens=max_step_tokens,
                static=False,
                cost_us=1000,
                cost_ns_per_token=20_000,
            )
        )
    return MethodTable(tuple(methods))


class _Sequence:
    __slots__ = ("awaited", "cells", "last_sampled", "note", "reported", "sampling")

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells
        self.awaited: set[int] = set()  # cells it took over that the step in hand is to write
        self.last_sampled: int | None = None
        self.sampling: SamplingParams | None = None
        self.note = b""
        self.reported: dict[int, TokenLogprobs] = {}  # by position

    def copy(self) -> "_Sequence":
        twin = _Sequence(self.cells.copy())
        twin.last_sampled, twin.sampling, twin.note = self.last_sampled, self.sampling, self.note
        twin.reported = self.reported.copy()
        return twin


class FakeExecutor:
    def __init__(
        self,
        *,
        incarnation: str | None = None,
        usable_cells: int = 4096,
        max_sequences: int = 64,
        max_session_tokens: int | None = None,
        table: MethodTable | None = None,
        vocab_size: int = 1000,
        step_s: float = 0.0,
        model: str = "fake",
        fingerprint: str = "fa4e",
        fail_at: int | None = None,
        refuse_at: int | None = None,
        die_at: int | None = None,
        keep_plans: bool = False,
    ) -> None:
        self._capability = Capability(
            incarnation=Incarnation(incarnation or os.urandom(16).hex()),
            device="cpu",
            device_uuid="",
            model=model,
            fingerprint=fingerprint * 16,
            vocab_size=vocab_size,
            usable_cells=usable_cells,
            scratch_cell=Cell(usable_cells),
            max_sequences=max_sequences,
            max_session_tokens=min(max_session_tokens or usable_cells, usable_cells),
            windows=(0,),
            table=table or method_table((1, 2, 4, 8, 16, 32), 512),
            max_output_rows=max_sequences,
        )
        self._step_s = step_s
        self._content: list[int | None] = [None] * usable_cells
        self._token: list[int] = [0] * usable_cells
        self._holders = [0] * usable_cells  # sequences whose row names the cell
        self._sequences: dict[int, _Sequence] = {}
        self._last_step = 0
        self.fail_at, self.refuse_at, self.die_at = fail_at, refuse_at, die_at
        self.fail_probe = False
        self.seen: list[StepPlan] | None = [] if keep_plans else None

    # --- the promises of `Executor` ---

    def describe(self) -> Capability:
        return self._capability

    def run(self, plan: StepPlan) -> StepResult:
        self._check_addressed(plan)
        if self.refuse_at == plan.step:
            self.refuse_at = None
            raise StalePlan(f"step {plan.step} is refused as scripted")
        sequences = self._apply_ops(plan)
        given = self._check_inputs(plan, sequences)
        self._check_slices(plan)
        if self.die_at == plan.step:
            os._exit(70)
        if self.fail_at == plan.step:
            raise StepError(f"step {plan.step} fails as scripted")
        if self._step_s:
            time.sleep(self._step_s)
        self._take(sequences)
        if self.seen is not None:
            self.seen.append(plan)
        self._last_step = plan.step
        return self._compute(plan, given)

    def snapshot(self) -> tuple[SequenceSnapshot, ...]:
        return tuple(
            SequenceSnapshot(
                sequence=SequenceId(number),
                cells=tuple(Cell(c) for c in s.cells),
                tokens=tuple(self._token[c] for c in s.cells),
                last_sampled=s.last_sampled,
                sampling=s.sampling,
                note=s.note,
                logprobs=tuple(s.reported.get(at) for at in range(1, len(s.cells) + 1)) if s.reported else (),
                logprobs_from=1,
            )
            for number, s in sorted(self._sequences.items())
        )

    def probe(self) -> None:
        if self.fail_probe:
            raise StepError("the probe fails as scripted")

    # --- what tests look at, and do ---

    @property
    def last_step(self) -> int:
        return self._last_step

    @property
    def held_cells(self) -> int:
        """Cells named by any sequence."""
        return sum(1 for holders in self._holders if holders)

    def token_of(self, cell: int) -> int:
        """The token that the cell was written for last."""
        return self._token[cell]

    def poison(self, cells: Iterable[int]) -> None:
        """Forget what these cells hold: nobody may read them before they are written again."""
        for cell in cells:
            assert not self._holders[cell], f"cell {cell} is free in the planner's table and held by a sequence"
            self._content[cell] = None

    # --- checks: nothing is changed ---

    def _check_addressed(self, plan: StepPlan) -> None:
        own = self._capability
        if plan.incarnation != own.incarnation:
            raise StalePlan(f"the plan is for incarnation {plan.incarnation}, this is {own.incarnation}")
        if plan.table_digest != own.table.digest:
            raise StalePlan(f"the plan names method table {plan.table_digest}, this worker's is {own.table.digest}")
        if plan.step != self._last_step + 1:
            raise StalePlan(f"step {plan.step} cannot follow step {self._last_step}")

    def _apply_ops(self, plan: StepPlan) -> dict[int, _Sequence]:
        sequences = dict(self._sequences)
        fresh: set[int] = set()

        def known(number: int) -> _Sequence:
            if number not in sequences:
                raise StalePlan(f"no sequence {number}")
            if number not in fresh:
                sequences[number] = sequences[number].copy()
                fresh.add(number)
            return sequences[number]

        def create(number: int, cells: list[int]) -> None:
            if number in sequences:
                raise StalePlan(f"sequence {number} is live already")
            if not 0 <= number < self._capability.max_sequences:
                raise StalePlan(f"sequence {number} is not below max_sequences {self._capability.max_sequences}")
            sequences[number] = _Sequence(cells)
            fresh.add(number)

        to_write = set(plan.cells)

        def take_over(number: int, cells: Sequence[int]) -> None:
            s = known(number)
            for cell in cells:
                self._check_cell(cell)
                if cell in to_write:
                    s.awaited.add(cell)
                elif self._content[cell] is None:
                    raise StalePlan(f"cell {cell} is shared with sequence {number} and was never written")
                elif cell in s.cells:
                    raise StalePlan(f"sequence {number} would hold cell {cell} twice")
            s.cells += cells

        for op in plan.ops:
            match op:
                case OpenSequence(number, cells):
                    create(number, [])
                    take_over(number, [int(c) for c in cells])
                case ExtendSequence(number, cells):
                    take_over(number, [int(c) for c in cells])
                case CloneSequence(number, source, upto):
                    origin = known(source)
                    if not 0 <= upto <= len(origin.cells):
                        raise StalePlan(
                            f"a clone of {upto} positions of sequence {source}, which has {len(origin.cells)}"
                        )
                    create(number, origin.cells[:upto])
                case TruncateSequence(number, length):
                    s = known(number)
                    if not 0 <= length <= len(s.cells):
                        raise StalePlan(f"sequence {number} has {len(s.cells)} positions and cannot be cut to {length}")
                    if length < len(s.cells):
                        s.last_sampled = None
                    del s.cells[length:]
                    s.reported = {at: one for at, one in s.reported.items() if at < length}
                case DropSequence(number):
                    known(number)
                    del sequences[number]
                    fresh.discard(number)
                case SetSampling(number, sampling):
                    known(number).sampling = sampling
                case Annotate(number, note):
                    known(number).note = note
        return sequences

    def _check_inputs(self, plan: StepPlan, sequences: dict[int, _Sequence]) -> list[Sequence[int] | None]:
        """Per input: its tokens, or None for a feedback."""
        inputs = len(plan.sequences)
        if not len(plan.starts) == len(plan.widths) == len(plan.flags) == inputs:
            raise StalePlan("the columns of inputs differ in length")
        total = sum(plan.widths)
        if len(plan.cells) != total:
            raise StalePlan(f"{len(plan.cells)} cells for {total} tokens")
        if len(set(plan.cells)) != total:
            raise StalePlan("a cell is written twice in one step")
        held: set[int] = set()
        if plan.ops:
            held = {cell for s in sequences.values() for cell in s.cells if cell not in s.awaited}
        for cell in plan.cells:
            self._check_cell(cell)
            if cell in held or (not plan.ops and self._holders[cell]):
                raise StalePlan(f"cell {cell} is written while a sequence holds it")
        given: list[Sequence[int] | None] = []
        lengths: dict[int, int] = {}
        sampled: dict[int, bool] = {}
        at = rows = written = followed = 0
        unwritten = set(plan.cells) if any(s.awaited for s in sequences.values()) else set()
        for number, start, width, flags in zip(plan.sequences, plan.starts, plan.widths, plan.flags, strict=True):
            s = sequences.get(number)
            if s is None:
                raise StalePlan(f"no sequence {number}")
            length = lengths.get(number, len(s.cells))
            if start != length:
                raise StalePlan(f"sequence {number} has {length} positions, the input starts at {start}")
            if early := s.awaited & unwritten:
                raise StalePlan(f"sequence {number} reads cell {min(early)} before the step has written it")
            unwritten.difference_update(plan.cells[written : written + width])
            written += width
            if width < 1 or start + width > self._capability.max_session_tokens:
                raise StalePlan(
                    f"positions {start} to {start + width} do not fit a row of {self._capability.max_session_tokens}"
                )
            if flags & InputFlag.FEEDBACK:
                if width != 1 or not sampled.get(number, s.last_sampled is not None):
                    raise StalePlan(f"sequence {number} has no sampled token to feed back")
                given.append(None)
            else:
                tokens = plan.tokens[at : at + width]
                if len(tokens) != width:
                    raise StalePlan(f"{len(plan.tokens)} tokens are given, more are needed")
                if not all(0 <= t < self._capability.vocab_size for t in tokens):
                    raise StalePlan(f"a token is not below the vocabulary size {self._capability.vocab_size}")
                given.append(tokens)
                at += width
            wants = bool(flags & InputFlag.WANTS_OUTPUT)
            if wants and s.sampling is None:
                raise StalePlan(f"sequence {number} has no sampling policy")
            asks = bool(flags & InputFlag.PROMPT_LOGPROBS)
            if asks and (s.sampling is None or s.sampling.prompt_logprobs is None):
                raise StalePlan(f"sequence {number} does not ask about its prompt")
            followed += asks and not wants
            rows += width if asks else wants
            sampled[number] = wants
            lengths[number] = start + width
        if at != len(plan.tokens):
            raise StalePlan(f"{len(plan.tokens)} tokens are given, {at} are needed")
        if len(plan.next_tokens) != followed:
            raise StalePlan(f"{len(plan.next_tokens)} next tokens are given, {followed} are needed")
        if rows > self._capability.max_output_rows:
            raise StalePlan(f"{rows} outputs are wanted, {self._capability.max_output_rows} is the limit")
        return given

    def _check_slices(self, plan: StepPlan) -> None:
        if not len(plan.slice_offsets) == len(plan.slice_lengths) == len(plan.slice_methods):
            raise StalePlan("the columns of slices differ in length")
        methods = self._capability.table.methods
        end = 0
        for offset, length, method in zip(plan.slice_offsets, plan.slice_lengths, plan.slice_methods, strict=True):
            if offset != end:
                raise StalePlan(f"a slice starts at {offset}, the one before ends at {end}")
            if not 0 <= method < len(methods):
                raise StalePlan(f"no method {method}")
            least = 1 if methods[method].static else methods[method].min_tokens
            if not least <= length <= methods[method].max_tokens:
                raise StalePlan(f"{length} tokens do not fit method {methods[method].name}")
            end += length
        if end != len(plan.cells):
            raise StalePlan(f"the slices cover {end} of {len(plan.cells)} tokens")

    def _check_cell(self, cell: int) -> None:
        if not 0 <= cell < self._capability.usable_cells:
            raise StalePlan(f"no cell {cell}: {self._capability.usable_cells} are usable")

    # --- the step itself ---

    def _take(self, sequences: dict[int, _Sequence]) -> None:
        if sequences != self._sequences:
            for s in sequences.values():
                s.awaited = set()
            holders = [0] * len(self._holders)
            for s in sequences.values():
                for cell in s.cells:
                    holders[cell] += 1
            self._holders = holders
        self._sequences = sequences

    def _compute(self, plan: StepPlan, given: list[Sequence[int] | None]) -> StepResult:
        vocab_size = self._capability.vocab_size
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        of_prompts: list[TokenLogprobs] = []
        next_tokens = iter(plan.next_tokens)
        at = 0
        for number, width, flags, tokens in zip(plan.sequences, plan.widths, plan.flags, given, strict=True):
            s = self._sequences[number]
            if tokens is None:
                assert s.last_sampled is not None
                tokens = (s.last_sampled,)
            attended = 0
            for cell in s.cells:
                held = self._content[cell]
                if held is None:
                    raise StepError(f"sequence {number} reads cell {cell}, which holds nothing")
                attended += held
            asks = flags & InputFlag.PROMPT_LOGPROBS
            for index, (token, cell) in enumerate(zip(tokens, plan.cells[at : at + width], strict=True)):
                held = content(token, len(s.cells), attended)
                self._content[cell], self._token[cell] = held, token
                self._holders[cell] += 1
                attended += held
                s.cells.append(cell)
                if asks and (index + 1 < width or not flags & InputFlag.WANTS_OUTPUT):
                    assert s.sampling is not None
                    follows = tokens[index + 1] if index + 1 < width else next(next_tokens)
                    one = logprobs_of(follows, len(s.cells), attended, s.sampling.prompt_logprobs)
                    assert one is not None
                    of_prompts.append(one)
                    s.reported[len(s.cells)] = one
            at += width
            s.last_sampled = None
            if flags & InputFlag.WANTS_OUTPUT:
                assert s.sampling is not None
                position = len(s.cells)
                generated = position - s.sampling.prompt_tokens
                s.last_sampled = draw(attended, position, s.sampling, generated, vocab_size)
                sampled.append(s.last_sampled)
                one = logprobs_of(s.last_sampled, position, attended, s.sampling.logprobs)
                logprobs.append(one)
                if one is not None:
                    s.reported[position] = one
        forwards = [0] * len(self._capability.table.methods)
        step_us = 0
        for length, method in zip(plan.slice_lengths, plan.slice_methods, strict=True):
            forwards[method] += 1
            spec = self._capability.table.methods[method]
            step_us += spec.cost_us + (0 if spec.static else length * spec.cost_ns_per_token // 1000)
        return StepResult(
            incarnation=plan.incarnation,
            step=plan.step,
            tokens=tuple(sampled),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            step_us=step_us,
            forwards=tuple(forwards),
            prompt_logprobs=tuple(of_prompts),
        )


def build_executor(options: object) -> FakeExecutor:
    """An executor from anything with (some of) a worker's runtime options as attributes."""
    model = str(getattr(options, "model", "fake"))
    name, _, text = model.partition(":")
    if name != "fake":
        raise BadConfig(f"model {model!r} is not 'fake' or 'fake:setting=value,…'")
    settings: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        settings[key] = value
    script = {key: int(settings.pop(key)) for key in ("fail_at", "refuse_at", "die_at") if key in settings}
    step_s = float(settings.pop("step_ms", "0")) / 1000
    vocab_size = int(settings.pop("vocab", "1000"))
    fingerprint = settings.pop("fingerprint", "fa4e")  # the first four digits; another model has others
    if settings:
        raise BadConfig(f"model {model!r} has unknown settings: {', '.join(sorted(settings))}")
    widths = getattr(options, "widths", None) or (1, 2, 4, 8, 16, 32)
    max_step_tokens = getattr(options, "max_step_tokens", None) or 512
    return FakeExecutor(
        usable_cells=getattr(options, "kv_tokens", None) or 4096,
        max_sequences=getattr(options, "max_sequences", None) or 64,
        max_session_tokens=getattr(options, "max_session_tokens", None),
        table=method_table(widths, max_step_tokens, getattr(options, "min_prefill_tokens", None) or 2),
        vocab_size=vocab_size,
        step_s=step_s,
        model=model,
        fingerprint=fingerprint,
        **script,
    )
