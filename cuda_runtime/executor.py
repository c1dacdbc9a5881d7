"""Runs one planned step on one device: rows, forwards, sampling, one answer.

Owns the bytes: weights, pool, methods, row table, last sampled tokens. One thread calls it, one call at a time. `run`
checks all that can be checked on the host before it touches anything (`StalePlan`); what goes wrong after that is a
`StepError`, and the executor refuses every later step, since nobody knows what its cells hold.

A step costs one upload of its columns, its forwards, one call of the sampler, and one wait for the sampled tokens. A
token sampled here stays on the device for the decode that feeds it back.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microtome.cuda_runtime.kv_pool import KvPool
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.cuda_runtime.method import FEEDBACK, LINES, POSITIONS, ROWS, SELECTOR, TOKENS, Method, on_device
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.prompt_rows import PromptRows
from microtome.cuda_runtime.rows import RowTable
from microtome.cuda_runtime.sampler import Sampled, sample
from microtome.cuda_runtime.sequences import Prospect, Sequences, SequenceState
from microtome.cuda_runtime.upload import upload
from microtome.planner.errors import StalePlan, StepError
from microtome.planner.types import (
    Capability,
    InputFlag,
    SequenceSnapshot,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

Int64Array = NDArray[np.int64]


def build_executor(options: RuntimeOptions) -> "Executor":
    """An executor over an empty pool, warmed up and measured: seconds to minutes. Raises `BadConfig`."""
    from microtome.cuda_runtime.build import build  # it imports this module

    return build(options)


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A plan's columns as arrays, found sound."""

    sequences: Int64Array  # per input
    starts: Int64Array
    widths: Int64Array
    feedback: NDArray[np.bool_]
    wants_output: NDArray[np.bool_]
    asks: NDArray[np.bool_]  # how likely the tokens behind its own are
    asked: Int64Array  # per input: likeliest tokens to report beside each of those; 0 where it does not ask
    cells: Int64Array  # per token
    tokens: Int64Array  # of inputs without feedback
    next_tokens: Int64Array  # behind inputs that ask and want no output


@dataclass(frozen=True, slots=True)
class Forward:
    """One slice laid out for its method: `width` columns from `column` on; `outputs` of its logits rows are wanted."""

    method: int
    column: int
    width: int
    outputs: int


class Executor:
    """Promises `microtome.planner.protocols.Executor`."""

    def __init__(self, *, capability: Capability, methods: Sequence[Method], rows: RowTable, pool: KvPool) -> None:
        self._capability = capability
        self.methods = tuple(methods)
        self.rows = self._rows = rows
        self.pool = pool
        self._sequences = Sequences(
            rows,
            max_sequences=capability.max_sequences,
            max_length=capability.max_session_tokens,
            usable_cells=capability.usable_cells,
        )
        self._cell_tokens: Int64Array = np.zeros(pool.usable_cells + 1, dtype=np.int64)
        # On a CPU the host's copy of a token is the token itself.
        self._feeds_back_on_device = rows.device.device.type != "cpu"
        self._last_sampled = torch.zeros(capability.max_sequences + 1, dtype=torch.int64, device=rows.device.device)
        self._step = StepNumber(0)
        self._result_ns: int | None = None  # when the step before was answered
        self._failure: str | None = None

    def describe(self) -> Capability:
        return self._capability

    def snapshot(self) -> tuple[SequenceSnapshot, ...]:
        return self._sequences.snapshot(self._cell_tokens)

    def probe(self) -> None:
        if self._failure is not None:
            raise StepError(f"an earlier step failed, and this device's cells are unknown: {self._failure}")
        try:
            self._last_sampled[-1].add(1).item()  # one kernel and one copy: both must come back
        except Exception as error:
            raise StepError(f"the device does not answer: {type(error).__name__}: {error}") from error

    def run(self, plan: StepPlan) -> StepResult:
        started_ns = time.perf_counter_ns()
        if self._failure is not None:
            raise StepError(f"an earlier step failed, and this device's cells are unknown: {self._failure}")
        step = self._check(plan)
        try:
            with on_device(self._rows.device.device):
                sampled, forwards, prompt_logprobs = self._run(plan, step)
        except Exception as error:
            self._failure = f"step {plan.step}: {type(error).__name__}: {error}"
            raise StepError(self._failure) from error
        self._step = plan.step
        done_ns = time.perf_counter_ns()
        idle_ns = 0 if self._result_ns is None else started_ns - self._result_ns
        self._result_ns = done_ns
        return StepResult(
            incarnation=plan.incarnation,
            step=plan.step,
            tokens=sampled.tokens if sampled else (),
            logprobs=sampled.logprobs if sampled else (),
            step_us=(done_ns - started_ns) // 1000,
            idle_us=idle_ns // 1000,
            forwards=forwards,
            prompt_logprobs=prompt_logprobs,
        )

    # --- checks: nothing below changes anything ---

    def _check(self, plan: StepPlan) -> CheckedStep:
        if plan.incarnation != self._capability.incarnation:
            raise StalePlan(f"incarnation {plan.incarnation} is not {self._capability.incarnation}")
        if plan.step != self._step + 1:
            raise StalePlan(f"step {plan.step} does not follow step {self._step}")
        if plan.table_digest != self._capability.table.digest:
            raise StalePlan(f"method table {plan.table_digest} is not {self._capability.table.digest}")
        changed = self._sequences.check(plan.ops)
        flags = _column("flags", plan.flags)
        step = CheckedStep(
            sequences=_column("sequences", plan.sequences),
            starts=_column("starts", plan.starts),
            widths=_column("widths", plan.widths),
            feedback=(flags & InputFlag.FEEDBACK) != 0,
            wants_output=(flags & InputFlag.WANTS_OUTPUT) != 0,
            asks=(flags & InputFlag.PROMPT_LOGPROBS) != 0,
            asked=np.zeros(len(flags), dtype=np.int64),
            cells=_column("cells", plan.cells),
            tokens=_column("tokens", plan.tokens),
            next_tokens=_column("next tokens", plan.next_tokens),
        )
        inputs = len(step.sequences)
        if not inputs == len(step.starts) == len(step.widths) == len(flags):
            raise StalePlan(
                f"{inputs} sequences, {len(step.starts)} starts, {len(step.widths)} widths and {len(flags)} flags"
            )
        self._check_inputs(step, changed)
        self._check_numbers(step)
        self._check_slices(plan, len(step.cells))
        return step

    def _check_inputs(self, step: CheckedStep, changed: dict[int, Prospect | None]) -> None:
        ends: dict[int, Prospect] = {}  # after this step's inputs so far
        answered: set[int] = set()
        columns = zip(
            step.sequences.tolist(),
            step.starts.tolist(),
            step.widths.tolist(),
            step.feedback.tolist(),
            step.wants_output.tolist(),
            step.asks.tolist(),
            strict=True,
        )
        rows = 0
        for index, (sequence, start, width, feedback, wants_output, asks) in enumerate(columns):
            now = ends.get(sequence) or self._sequences.prospect(sequence, changed)
            if start != now.length:
                raise StalePlan(f"sequence {sequence} holds {now.length} tokens, an input starts at {start}")
            end = start + width
            if width < 1 or end > self._capability.max_session_tokens:
                raise StalePlan(
                    f"sequence {sequence}: an input of {width} tokens at {start} is outside "
                    f"[0, {self._capability.max_session_tokens})"
                )
            if feedback and (width != 1 or now.sampled_position != start):
                raise StalePlan(
                    f"sequence {sequence}: {width} tokens at {start} are to be fed back, "
                    f"the token sampled last stands at {now.sampled_position}"
                )
            if wants_output:
                if not now.sampled:
                    raise StalePlan(f"sequence {sequence} wants a token and has no sampling policy")
                if sequence in answered:
                    raise StalePlan(f"sequence {sequence} wants two tokens of one step")
                answered.add(sequence)
            if asks:
                if now.policy is None or now.policy.prompt_logprobs is None:
                    raise StalePlan(f"sequence {sequence} asks how likely its prompt is, and its policy does not")
                step.asked[index] = now.policy.prompt_logprobs
            rows += width if asks else wants_output
            ends[sequence] = Prospect(end, now.policy, now.sampled_position)
        if rows > self._capability.max_output_rows:
            raise StalePlan(f"{rows} logits rows are wanted, {self._capability.max_output_rows} at most")

    def _check_numbers(self, step: CheckedStep) -> None:
        width = int(step.widths.sum())
        if len(step.cells) != width:
            raise StalePlan(f"{len(step.cells)} cells for {width} tokens")
        given = width - int(step.feedback.sum())
        if len(step.tokens) != given:
            raise StalePlan(f"{len(step.tokens)} tokens where {given} are due")
        followed = int((step.asks & ~step.wants_output).sum())
        if len(step.next_tokens) != followed:
            raise StalePlan(f"{len(step.next_tokens)} next tokens where {followed} are due")
        for name, values, limit in (
            ("next token", step.next_tokens, self._capability.vocab_size),
            ("cell", step.cells, self._capability.usable_cells),
            ("token", step.tokens, self._capability.vocab_size),
        ):
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                wrong = values[(values < 0) | (values >= limit)][0]
                raise StalePlan(f"{name} {wrong} is outside [0, {limit})")
        ascending = bool((step.cells[1:] > step.cells[:-1]).all())  # as they mostly are: no need to sort
        if not ascending and len(np.unique(step.cells)) < width:
            raise StalePlan("a cell is written twice in one step")

    def _check_slices(self, plan: StepPlan, total: int) -> None:
        if not len(plan.slice_offsets) == len(plan.slice_lengths) == len(plan.slice_methods):
            raise StalePlan("the slices' columns differ in length")
        end = 0
        for offset, length, method in zip(plan.slice_offsets, plan.slice_lengths, plan.slice_methods, strict=True):
            if not 0 <= method < len(self.methods):
                raise StalePlan(f"method {method} is outside [0, {len(self.methods)})")
            spec = self.methods[method].spec
            low = 1 if spec.static else spec.min_tokens
            if offset != end or not low <= length <= spec.max_tokens:
                raise StalePlan(
                    f"a slice of {length} tokens at {offset} does not fit {spec.name} ({low} to {spec.max_tokens}) "
                    f"or does not follow {end}"
                )
            end = offset + length
        if end != total:
            raise StalePlan(f"the slices cover {end} tokens of {total}")

    # --- effects ---

    @torch.inference_mode()
    def _run(self, plan: StepPlan, step: CheckedStep) -> tuple[Sampled | None, list[int], tuple[TokenLogprobs, ...]]:
        self._sequences.apply(plan.ops)
        ran = [0] * len(self.methods)
        if not len(step.cells):
            self._rows.upload()
            return None, ran, ()
        token_rows = np.repeat(step.sequences, step.widths)
        first_of_input = np.cumsum(step.widths) - step.widths
        positions = np.arange(len(token_rows), dtype=np.int64) + np.repeat(step.starts - first_of_input, step.widths)
        feedback = np.repeat(step.feedback, step.widths)
        tokens = np.empty(len(token_rows), dtype=np.int64)
        tokens[~feedback] = step.tokens
        tokens[feedback] = [self._sequences[sequence].sampled_token for sequence in step.sequences[step.feedback]]
        self._rows.write(token_rows, positions, step.cells)
        self._rows.upload()
        self._cell_tokens[step.cells] = tokens

        wanted = (first_of_input + step.widths - 1)[step.wants_output]  # packed index of each answer's last token
        prompt_rows = None
        if step.asks.any():
            prompt_rows = PromptRows(
                widths=step.widths,
                asks=step.asks,
                wants_output=step.wants_output,
                counts=step.asked,
                tokens=tokens,
                next_tokens=step.next_tokens,
            )
            wanted = prompt_rows.selected
        columns, forwards = self._lay_out(plan, tokens, positions, token_rows, feedback, wanted)
        device = self._rows.device.device
        columns_5N = upload(columns, device)
        if self._feeds_back_on_device:
            # What was sampled here is read here: the host's copy of those tokens is never sent down.
            columns_5N[TOKENS] = torch.where(
                columns_5N[FEEDBACK] != 0, self._last_sampled[columns_5N[ROWS]], columns_5N[TOKENS]
            )
        answers: list[Tensor] = []
        for index, forward in enumerate(forwards):
            segment = columns_5N[:, forward.column : forward.column + forward.width]
            logits_RV = self.methods[forward.method].run(segment, forward.outputs)
            ran[forward.method] += 1
            if forward.outputs:
                wanted_RV = logits_RV[: forward.outputs]
                if prompt_rows is not None:
                    wanted_RV = prompt_rows.take(wanted_RV)
                    if not len(wanted_RV):
                        continue
                # A method that runs again before the sampler does writes over its output.
                again = any(later.method == forward.method for later in forwards[index + 1 :])
                answers.append(wanted_RV.clone() if again else wanted_RV)
        for sequence, start, width in zip(
            step.sequences.tolist(), step.starts.tolist(), step.widths.tolist(), strict=True
        ):
            self._sequences[sequence].length = start + width
        if not answers:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return None, ran, self._read_prompt(step, prompt_rows)
        sampled = self._sample(
            torch.cat(answers) if len(answers) > 1 else answers[0],
            step.sequences[step.wants_output],
            (step.starts + step.widths)[step.wants_output],
        )
        prompt_logprobs = self._read_prompt(step, prompt_rows)
        self._keep(step, sampled)
        return sampled, ran, prompt_logprobs

    def _read_prompt(self, step: CheckedStep, prompt_rows: PromptRows | None) -> tuple[TokenLogprobs, ...]:
        """What the step says of given tokens; kept beside their sequences."""
        if prompt_rows is None:
            return ()
        read = prompt_rows.read()
        at = 0
        for index in np.flatnonzero(step.asks).tolist():
            kept = self._sequences[int(step.sequences[index])].logprobs
            count = int(step.widths[index]) - bool(step.wants_output[index])
            for position, logprobs in enumerate(read[at : at + count], int(step.starts[index]) + 1):
                kept.put(position, logprobs)
            at += count
        return read

    def _keep(self, step: CheckedStep, sampled: Sampled) -> None:
        """What was reported of the sampled tokens, beside their sequences, for a driver that starts anew."""
        for sequence, logprobs in zip(step.sequences[step.wants_output].tolist(), sampled.logprobs, strict=False):
            state = self._sequences[sequence]
            if state.sampled_position is not None and logprobs is not None:
                state.logprobs.put(state.sampled_position, logprobs)

    def _lay_out(
        self,
        plan: StepPlan,
        tokens: Int64Array,
        positions: Int64Array,
        token_rows: Int64Array,
        feedback: NDArray[np.bool_],
        wanted: Int64Array,
    ) -> tuple[Int64Array, list[Forward]]:
        """Every forward's columns side by side, padding filled in."""
        widths = [
            self.methods[method].width(length)
            for length, method in zip(plan.slice_lengths, plan.slice_methods, strict=True)
        ]
        # Two numbers are 16 bytes: programs expect every line of every forward to begin at a multiple of that.
        columns = np.zeros((LINES, sum(width + width % 2 for width in widths)), dtype=np.int64)
        columns[ROWS] = self._rows.padding_row
        forwards = []
        column = 0
        bounds = np.searchsorted(wanted, [*plan.slice_offsets, len(tokens)])
        for index, (offset, length, method) in enumerate(
            zip(plan.slice_offsets, plan.slice_lengths, plan.slice_methods, strict=True)
        ):
            width = widths[index]
            packed, laid = slice(offset, offset + length), slice(column, column + length)
            columns[TOKENS, laid] = tokens[packed]
            columns[POSITIONS, laid] = positions[packed]
            columns[ROWS, laid] = token_rows[packed]
            columns[FEEDBACK, laid] = feedback[packed]
            rows = wanted[bounds[index] : bounds[index + 1]] - offset
            selector = columns[SELECTOR, column : column + width]
            selector[:] = rows[-1] if len(rows) else length - 1
            selector[: len(rows)] = rows
            forwards.append(Forward(method, column, width, len(rows)))
            column += width + width % 2
        return columns, forwards

    def _sample(self, logits_RV: Tensor, sequences: Int64Array, positions: Int64Array) -> Sampled:
        states = [self._sequences[sequence] for sequence in sequences.tolist()]
        rows = [
            self._sampled_row(sequence, state, position)
            for sequence, state, position in zip(sequences.tolist(), states, positions.tolist(), strict=True)
        ]
        sampled = sample(logits_RV, rows)
        if min(sampled.tokens) < 0:
            raise ArithmeticError("a forward's logits hold a NaN")
        if self._feeds_back_on_device:
            self._last_sampled[upload(sequences, self._last_sampled.device)] = sampled.tokens_R
        for state, token, row in zip(states, sampled.tokens, rows, strict=True):
            state.sampled_token, state.sampled_position = token, row.position
        return sampled

    def _sampled_row(self, sequence: int, state: SequenceState, position: int) -> SampledRow:
        assert state.sampling is not None  # checked before anything was touched
        return SampledRow(state.sampling, position, lambda: self._cell_tokens[self._rows.cells(sequence, position)])


def _column(name: str, values: Sequence[int]) -> Int64Array:
    try:
        return np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise StalePlan(f"one of the plan's {name} does not fit 64 bits") from None
