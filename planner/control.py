"""Every generation's state, for all workers. Changed only by `handle`; the same events give the same instructions.

`handle(event)` is called by one thread, one event at a time, and never waits. Time is what the events say. What it
returns is to be carried out in order. It ties the planner's parts together and keeps none of their books:

- `sessions` holds transcripts and the rules of sessions, `generations` the numbers of one call;
- `admission` decides who is next, `placement` where it goes, `forecast` when its first token comes;
- `fleet` decides which workers there should be;
- one `WorkerPlan` per worker holds its cells, scheduler and steps under way.

A generation stays with the model that it was submitted to. After an update to another one, workers of the old model
take nothing but what was submitted to it, and go when that has ended.

Promises. Tokens of a generation are delivered in order, each once, and never retracted, whatever happens to workers.
Each accepted generation ends exactly once; with `FAILED` comes an error. A refusal changes nothing but its answer. An
answer of a worker or an incarnation that is not planned for is dropped, so is a repeated one. A `Submit` under the id
of a generation that has not ended is dropped too: an answer to it would end the other.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import assert_never

from microtome.planner.admission import WaitingLine
from microtome.planner.config import PlannerConfig
from microtome.planner.counters import Counters
from microtome.planner.errors import (
    AtCapacity,
    BadInput,
    BatchingError,
    DeadlineExpired,
    Refused,
    StepError,
    WorkerLost,
    WrongState,
)
from microtome.planner.events import (
    CallersWait,
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    DeliverStep,
    DrainBegun,
    Event,
    GiveUpWorker,
    Instruction,
    LookUpSession,
    OpenSession,
    ReleaseWorker,
    Restored,
    RewindSession,
    RunStep,
    Scale,
    SessionAnswer,
    SessionEvent,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    UpdateWorkers,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
)
from microtome.planner.fleet import Fleet
from microtome.planner.forecast import step_us, ttft_us
from microtome.planner.generations import Generation, Rank, State, check_options, check_vocabulary
from microtome.planner.notes import Note, encode_note
from microtome.planner.placement import by_preference, can_hold
from microtome.planner.resident import Resident
from microtome.planner.restore import Found, read_snapshot
from microtome.planner.scaling import Load
from microtome.planner.served import Served
from microtome.planner.sessions import Session, Sessions
from microtome.planner.status import ControlStatus, Waiting, Whereabouts, WorkerStatus
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    Incarnation,
    Kind,
    SequenceId,
    SequenceSnapshot,
    StepResult,
    TokenLogprobs,
    Usage,
    WorkerId,
)
from microtome.planner.worker_plan import Step, WorkerPlan

_FENCED_REMEMBERED = 1024  # incarnations given up, against one that comes back
_RETRY_MS = 1000  # where nothing is measured yet
_RETRY_MAX_MS = 60_000


class Control:
    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._workers: dict[WorkerId, WorkerPlan] = {}  # in the order of joining
        self._fenced: dict[Incarnation, None] = {}
        self._fleet = Fleet()
        self._served = self._another_model()
        self._replaced: list[Served] = []  # models that were served and still have generations, the oldest first
        self._sessions = Sessions(config.max_sessions)
        self._generations: dict[GenerationId, Generation] = {}
        self._deadlines: list[tuple[int, int, Generation]] = []  # heap
        self._arrivals = 0
        self._counters = Counters()
        self._now = 0
        self._out: list[Instruction] = []
        self._changed: dict[WorkerId, WorkerPlan] = {}  # those that may have a step to form

    def handle(self, event: Event) -> list[Instruction]:
        """Take in what happened; return what to do about it, in order."""
        self._now = max(self._now, event.at_us)
        self._out = []
        if self._deadlines and self._deadlines[0][0] <= self._now:
            self._expire()
        match event:
            case StepDone():
                self._step_done(event)
            case Submit():
                self._submit(event)
            case Cancel():
                self._cancel(event)
            case Tick():
                self._find_hangs()
                self._end_drains()
                self._close_unused()
            case StepFailed():
                self._step_failed(event)
            case WorkerJoined():
                self._worker_joined(event)
            case WorkerGone():
                self._worker_gone(event)
            case WorkerDraining():
                self._worker_draining(event)
            case WorkerPlaced():
                self._fleet.placed(event.worker)
            case WorkerStartFailed():
                self._start_failed(event)
            case Scale():
                self._fleet.scale(event.scaling, event.count, self._now)
            case CallersWait():
                self._fleet.callers = event.count if self._served.fingerprint is None else 0
            case UpdateWorkers():
                self._fleet.update(event.revision, event.surge, event.tried)
            case OpenSession() | CloneSession() | RewindSession() | LookUpSession() | CloseSession():
                self._answer_session(event)
            case _:
                assert_never(event)
        if self._fleet.active and (not self._workers or not isinstance(event, StepDone | Submit | Cancel)):
            self._change_workers()
        self._advance()
        return self._out

    # --- reading ---

    @property
    def fingerprint(self) -> str | None:
        """Of the model that is served; None while no worker has ever joined."""
        return self._served.fingerprint

    def status(self) -> ControlStatus:
        """A snapshot, consistent in itself."""
        workers = tuple(
            WorkerStatus(
                worker=w.id,
                incarnation=w.incarnation,
                draining=w.draining,
                revision=w.revision,
                cells_used=w.table.used_cells - w.cells_cached,
                cells_cached=w.cells_cached,
                cells_usable=w.table.usable_cells,
                sessions=len(w.residents),
                running=w.running,
                steps=w.steps,
                steps_in_flight=len(w.in_flight),
                step_us=w.step_us,
                idle_us=w.idle_us,
            )
            for w in self._workers.values()
        )
        running = sum(w.running for w in self._workers.values())
        return ControlStatus(
            workers=workers,
            running=running,
            waiting=len(self._generations) - running,
            sessions=self._sessions.opened,
            waiting_tokens=self._line.tokens,
            wait_us=self._forecast(self._line.tokens, 0),
            counters=replace(self._counters),
        )

    def where(self, generation: GenerationId) -> Whereabouts | None:
        """Where a generation is and what it waits for; None if it has ended or never was. Walks the line."""
        g = self._generations.get(generation)
        if g is None:
            return None
        r = g.session.resident
        worker = next((w for w in self._workers.values() if r and w.residents.get(g.session.id) is r), None)
        if g.state is State.RUNNING and worker is not None:
            standing = worker.scheduler.standing(g.session.id)
            waits_for = Waiting(standing.behind.value) if standing and standing.ahead else Waiting.NOTHING
            own = r.undone if r else 0
            ttft = None if g.delivered else ttft_us(worker, -own, own)
            return Whereabouts(
                running=True, position=0, waits_for=waits_for, predicted_ttft_us=ttft, delivered=g.delivered,
                worker=worker.id,
            )  # fmt: skip
        before = list(takewhile(lambda other: other is not g, g.session.model.line.in_order()))
        ahead = sum(len(other.session.transcript) for other in before)
        return Whereabouts(
            running=False,
            position=len(before),
            waits_for=self._reason(g, before),
            predicted_ttft_us=None if g.delivered else self._forecast(ahead, len(g.session.transcript)),
            delivered=g.delivered,
            worker=None,
        )

    def awaited_outputs(self, worker: WorkerId) -> list[tuple[GenerationId, int]]:
        """Per output of the step that this worker answers next: whose token, and its offset; void ones have no name."""
        step = self._workers[worker].awaited
        if step is None:
            return []
        outputs: list[tuple[GenerationId, int]] = []
        for one, r in zip(step.inputs, step.residents, strict=True):
            if one.wants_output:
                g = r.generation
                outputs.append((g.id, g.delivered) if g else (GenerationId(""), 0))
        return outputs

    def _reason(self, g: Generation, before: Sequence[Generation]) -> Waiting:
        if g.state is State.SETTLING:
            return Waiting.SHARED_PROMPT if g.leader else Waiting.OWN_SESSION
        staying = [w for w in self._takers(g.session.model) if can_hold(w, g)]
        if not staying:
            return Waiting.NO_WORKER
        later = [other for other in before if other.rank[1] > g.rank[1]]  # those that came after it
        if any(other.options.priority > g.options.priority for other in later):
            return Waiting.PRIORITY
        if any(other.options.tenant != g.options.tenant for other in later):
            return Waiting.TENANT_SHARE
        return Waiting.CELLS if any(w.has_sequence or w.idle for w in staying) else Waiting.SEQUENCES

    # --- generations ---

    def _submit(self, event: Submit) -> None:
        if event.generation in self._generations:
            return
        try:
            self._admit(event)
        except (Refused, DeadlineExpired) as error:
            for generation in dict.fromkeys((event.generation, *(name for name, _ in event.siblings))):
                if generation in self._generations:
                    continue  # it is the one that was asked for twice: it goes on
                self._counters.refused += 1
                self._out.append(
                    Deliver(
                        generation=generation,
                        offset=0,
                        finish=FinishReason.FAILED,
                        usage=Usage(prompt_tokens=len(event.prompt), output_tokens=0),
                        error=error,
                    )
                )

    def _admit(self, event: Submit) -> None:
        """Every check, then every change."""
        options, prompt = event.options, event.prompt
        check_options(options)
        if not prompt:
            raise BadInput("the prompt is empty: it needs 1 token at least")
        names = [name for name, _ in event.siblings]
        for name in names:
            if name in self._generations or name == event.generation or names.count(name) > 1:
                raise WrongState(f"generation {name} is under way already")
        session = None
        history: Sequence[int] = ()
        if event.session is not None:
            session = self._sessions.get(event.session)
            if session.generation is not None:
                raise WrongState(f"session {session.id} is generating")
            history = session.transcript
        served = self._model_of(event, session)
        self._check_limits(served, len(history) + len(prompt), prompt, options)
        self._check_time(len(history) + len(prompt), options)
        count = 1 + len(names)
        served.line.check_room(count, count * len(prompt), self._retry_after_ms())

        if session is None:
            session = self._sessions.open(options.tenant, options.cache_salt, opened=False)
        session.model = served
        twins = [list(session.transcript) for _ in event.siblings]
        first = self._begin(event.generation, session, prompt, options)
        for (name, seed), transcript in zip(event.siblings, twins, strict=True):
            twin = self._sessions.open(session.tenant, session.cache_salt, opened=False)
            twin.transcript, twin.model = transcript, served
            seeded = replace(options, sampling=replace(options.sampling, seed=seed))
            sibling = self._begin(name, twin, prompt, seeded)
            sibling.leader = first
            first.followers.append(sibling)
        resident = session.resident
        if resident is None or not (resident.rows or resident.leaving):
            served.line.add(first)

    def _begin(
        self, name: GenerationId, session: Session, prompt: tuple[int, ...], options: GenerationOptions
    ) -> Generation:
        self._arrivals += 1
        rank = self._rank(self._now, options.priority)
        g = Generation(name, session, options, len(prompt), self._now, rank)
        g.base = session.length
        g.had_pending = session.pending
        g.checked = any(w.served is session.model for w in self._workers.values())
        session.transcript += prompt
        session.pending = False
        session.generation = g
        g.generated_from = len(session.transcript)
        g.sampling = replace(options.sampling, prompt_tokens=g.generated_from, stop_token_ids=options.stop_token_ids)
        self._generations[name] = g
        session.model.line.expect(g)
        if options.deadline_us is not None:
            heapq.heappush(self._deadlines, (options.deadline_us, self._arrivals, g))
            if len(self._deadlines) > 64 + 2 * len(self._generations):
                self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.ENDED]
                heapq.heapify(self._deadlines)
        self._counters.generations_started += 1
        self._counters.prompt_tokens += len(prompt)
        return g

    def _check_limits(self, served: Served, length: int, prompt: tuple[int, ...], options: GenerationOptions) -> None:
        """Against the roomiest worker; with none there, the configuration, and again when one joins."""
        if served.vocab_size is not None:
            check_vocabulary(prompt, options, served.vocab_size)
        own = [w.max_session_tokens for w in self._workers.values() if w.served is served]
        limit = max(own, default=self._config.max_session_tokens)
        if limit is None:
            return
        if length + 1 > limit:
            raise BadInput(f"a history of {length} tokens and 1 more do not fit a context of {limit} tokens")
        if length + options.max_new_tokens > limit:
            raise BadInput(
                f"max_new_tokens {options.max_new_tokens} after {length} tokens exceed a context of {limit} tokens"
            )

    def _check_time(self, length: int, options: GenerationOptions) -> None:
        """Refuse what cannot be in time: a deadline that has passed, a first token that would come too late."""
        if options.deadline_us is not None and options.deadline_us <= self._now:
            raise DeadlineExpired(f"the deadline passed {(self._now - options.deadline_us) / 1000:g} ms ago")
        bounds = [options.ttft_target_us] if options.ttft_target_us is not None else []
        if options.deadline_us is not None:
            bounds.append(options.deadline_us - self._now)
        if not bounds:
            return
        predicted = self._forecast(self._line.tokens, length)
        if predicted is not None and predicted > min(bounds):
            late_ms = -(-(predicted - min(bounds)) // 1000)
            raise AtCapacity(
                "ms to the first token", -(-predicted // 1000), min(bounds) // 1000, min(late_ms, _RETRY_MAX_MS)
            )

    def _model_of(self, event: Submit, session: Session | None) -> Served:
        """Raises `WrongState` when the model that the tokens, or the session, are of is served no more."""
        known = [self._served, *self._replaced]
        if session is not None and session.transcript:
            if session.model not in known:
                raise WrongState(f"session {session.id} is of a model that is served no more")
            if event.fingerprint and session.model.fingerprint not in (None, event.fingerprint):
                raise WrongState(f"session {session.id} is of a model that was replaced")
            return session.model
        if not event.fingerprint or self._served.fingerprint in (None, event.fingerprint):
            return self._served
        found = next((served for served in self._replaced if served.fingerprint == event.fingerprint), None)
        if found is None:
            raise WrongState(f"the model {event.fingerprint[:16]} is served no more")
        return found

    def _forecast(self, ahead: int, own: int) -> int | None:
        """Microseconds to the first token of a prompt of `own` tokens behind a line of `ahead`; None: unknown."""
        staying = self._takers(self._served)
        forecasts = [ttft_us(w, ahead // len(staying), own) for w in staying]
        known = [f for f in forecasts if f is not None]
        return min(known) if known else None

    def _retry_after_ms(self) -> int:
        """When the line will have moved on by half."""
        predicted = self._forecast(self._line.tokens // 2, 0)
        return _RETRY_MS if predicted is None else max(1, min(predicted // 1000, _RETRY_MAX_MS))

    def _cancel(self, event: Cancel) -> None:
        g = self._generations.get(event.generation)
        if g is not None:
            self._finish(g, FinishReason.CANCELLED)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now:
            _, _, g = heapq.heappop(self._deadlines)
            if g.state is not State.ENDED:
                late = f"the deadline passed after {g.delivered} of {g.limit} tokens"
                self._finish(g, FinishReason.FAILED, error=DeadlineExpired(late))

    def _finish(
        self,
        g: Generation,
        reason: FinishReason,
        *,
        error: BatchingError | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> None:
        """The generation is over; `tokens` are its last, counted already. Cells go when nothing of it is under way."""
        session, r = g.session, g.session.resident
        w = self._worker_of(r)
        line = session.model.line
        if g.state is not State.RUNNING:
            line.leave(g)
        elif w is not None and r is not None:
            if not g.delivered:
                g.consumed = max(g.consumed, min(r.planned, g.generated_from))
            w.end(r)
            r.ended = reason
            self._changed[w.id] = w
        g.state = State.ENDED
        g.finish = reason
        del self._generations[g.id]
        self._release_followers(g)
        line.refund(g)
        self._counters.count_end(reason)
        self._out.append(
            Deliver(
                generation=g.id,
                offset=g.delivered - len(tokens),
                tokens=tokens,
                logprobs=logprobs,
                finish=reason,
                usage=Usage(prompt_tokens=g.prompt_tokens, output_tokens=g.delivered, cached_tokens=g.cached_tokens),
                error=error,
            )
        )
        session.generation = None
        self._sessions.used(session, self._now)
        if g.delivered:
            session.pending = True
        elif g.consumed > g.base:
            session.keep_prefix(g.consumed)
        else:
            session.keep_prefix(g.base + g.had_pending)
            session.pending = g.had_pending
        if not session.opened:
            self._sessions.close(session)
            if w is not None and r is not None:
                w.leave(r)
        elif w is not None and r is not None and not r.rows:
            self._settled(w, r)

    def _release_followers(self, leader: Generation) -> None:
        """The leader's prompt is run, or it will not be here: its followers join the line."""
        for follower in leader.followers:
            if follower.state is State.SETTLING:
                follower.session.model.line.add(follower)
        leader.followers.clear()

    # --- steps ---

    def _step_done(self, event: StepDone) -> None:
        w, result = self._workers.get(event.worker), event.result
        if w is None or w.incarnation != result.incarnation:
            return
        step = w.awaited
        if step is None or result.step < step.number:
            return  # a repeated answer
        if fault := _fault(result, step, w):
            self._give_up(w, fault, step)
            return
        w.settle(result)
        w.quiet_since_us = self._now
        self._changed[w.id] = w
        self._counters.steps += 1
        self._counters.step_us += result.step_us
        self._counters.prefilled_tokens += step.prefilled
        self._counters.idle_us += 0 if step.after_pause else result.idle_us
        self._take_tokens(w, step, result)

    def _take_tokens(self, w: WorkerPlan, step: Step, result: StepResult) -> None:
        """Append the step's tokens to their transcripts and deliver them; end what they end."""
        tokens, logprobs = result.tokens, result.logprobs
        names: list[GenerationId] = []  # of generations that go on, with their new tokens' offsets
        offsets: list[int] = []
        delivered: list[int] = []
        beside: list[TokenLogprobs | None] = []
        settled: list[Resident] = []
        at = void = 0
        for one, r in zip(step.inputs, step.residents, strict=True):
            r.rows -= 1
            g = r.generation
            if one.kind is Kind.PREFILL and g is not None:
                g.consumed = max(g.consumed, one.end)
            if one.wants_output:
                token = tokens[at]
                r.outputs -= 1
                if g is None:
                    void += r.ended is FinishReason.STOP
                else:
                    offset = g.delivered
                    g.delivered = offset + 1
                    r.session.transcript.append(token)
                    if offset == 0:
                        g.first_token_us = self._now
                        w.remember(r)
                        self._release_followers(g)
                    if token in g.stop or offset + 1 >= g.limit:
                        reason = FinishReason.STOP if token in g.stop else FinishReason.LENGTH
                        self._finish(g, reason, tokens=(token,), logprobs=(logprobs[at],) if logprobs else ())
                    else:
                        names.append(g.id)
                        offsets.append(offset)
                        delivered.append(token)
                        if logprobs:
                            beside.append(logprobs[at])
                at += 1
            if not r.rows and (r.leaving or r.generation is None):
                settled.append(r)
        if names:
            self._out.append(DeliverStep(generations=names, offsets=offsets, tokens=delivered, logprobs=beside))
        self._counters.output_tokens += at - void
        self._counters.overshoot_tokens += void
        for r in settled:
            if r.session.id not in w.idle:  # else its generation's end has seen to it
                self._settled(w, r)

    def _settled(self, w: WorkerPlan, r: Resident) -> None:
        """Nothing of the resident is under way: it leaves, or is trimmed to what its session has committed."""
        if w.residents.get(r.session.id) is not r:
            return  # left already
        session, g = r.session, r.generation
        if r.leaving:
            w.leave(r)
            if g is not None:
                self._counters.parked += not w.draining
                session.model.line.add_returning(g)
        elif g is None:
            w.rest(r, session.length, encode_note(_idle_note(session)))
            if w.draining:
                w.leave(r)
        following = session.generation
        if following is not None and following.state is State.SETTLING and following.leader is None:
            session.model.line.add(following)

    def _step_failed(self, event: StepFailed) -> None:
        w = self._workers.get(event.worker)
        if w is None or w.incarnation != event.incarnation:
            return
        step = w.awaited
        if step is None or event.step < step.number:
            return  # a repeated answer
        self._counters.failed_steps += 1
        if event.step > step.number or not event.refused:
            self._give_up(w, f"step {event.step} failed: {event.message}", step)
            return
        if w.refused_steps + 1 >= self._config.step_attempts:
            self._give_up(w, f"step {event.step} was refused: {event.message}", step)
            return
        w.quiet_since_us = self._now
        self._changed[w.id] = w
        for r in w.refused() or ():
            if r.leaving or r.generation is None:
                self._settled(w, r)

    # --- workers ---

    def _worker_joined(self, event: WorkerJoined) -> None:
        capability = event.capability
        if capability.incarnation in self._fenced:
            self._refuse_worker(event, "this incarnation was given up")
            return
        known = self._workers.get(event.worker)
        if known is not None:
            if known.incarnation == capability.incarnation:
                return
            self._lose(known)
        served = self._model_for(event)
        if served is None:
            known_as = self._served.fingerprint
            self._refuse_worker(event, f"its model is {capability.fingerprint}, the service's is {known_as}")
            return
        try:
            w = WorkerPlan(event.worker, capability, self._config, event.last_step, served)
            held = {snapshot.sequence: snapshot.cells for snapshot in event.held}
            if len(held) < len(event.held):
                raise BadInput(f"{len(event.held)} snapshots are of {len(held)} sequences")
            w.table.restore(held)
        except BatchingError as error:
            self._refuse_worker(event, str(error))
            return
        if served is not self._served and served not in self._replaced:
            self._replace_model(served, event.revision)
        served.fingerprint, served.vocab_size = capability.fingerprint, capability.vocab_size
        served.revision = max(served.revision, event.revision)
        served.cells, served.sequences = capability.usable_cells, capability.max_sequences
        w.revision, w.joined_us = event.revision, self._now
        w.quiet_since_us = self._now
        self._fleet.joined(w.id, event.revision, self._now)
        self._workers[w.id] = w
        self._changed[w.id] = w
        self._restore(w, event.held)
        served.line.recall()
        for g in [g for g in self._generations.values() if not g.checked and g.session.model is served]:
            self._check_again(g)
        for other in self._workers.values():
            if other.draining:
                self._move_away(other)

    def _model_for(self, event: WorkerJoined) -> Served | None:
        """The model that the worker brings: a known one, or by an update another. None: it has no business here."""
        fingerprint = event.capability.fingerprint
        for served in (self._served, *self._replaced):
            if served.fingerprint in (None, fingerprint):
                return served
        return self._another_model() if event.revision != self._served.revision else None

    def _another_model(self) -> Served:
        config = self._config
        return Served(WaitingLine(config.max_waiting, config.max_waiting_tokens, config.weights()))

    def _replace_model(self, served: Served, revision: int) -> None:
        """Another model is served from now on; or, after a restart of the driver, an older one has turned up."""
        if revision > self._served.revision:
            self._replaced.append(self._served)
            self._served = served
        else:
            self._replaced.append(served)

    @property
    def _line(self) -> WaitingLine:
        """Who waits for the model that is served."""
        return self._served.line

    def _restore(self, w: WorkerPlan, held: tuple[SequenceSnapshot, ...]) -> None:
        """Go on where an earlier driver left off, from what the worker holds; nothing is computed again."""
        for snapshot in held:
            found = read_snapshot(snapshot)
            if found is None or found.note.session in self._sessions or found.note.generation in self._generations:
                w.disown(snapshot.sequence)
            else:
                self._restore_sequence(w, snapshot.sequence, found)

    def _restore_sequence(self, w: WorkerPlan, sequence: SequenceId, found: Found) -> None:
        note, options = found.note, found.options
        session = self._sessions.restore(note.session, note.tenant, note.cache_salt, opened=note.opened)
        session.transcript, session.model = found.transcript, w.served
        self._sessions.used(session, self._now)
        if options is None or note.generation is None:
            session.pending = note.pending is not None
            w.adopt(session, sequence, None, sampled=False)
            return
        self._arrivals += 1
        rank = self._rank(min(note.submitted_us, self._now), options.priority)
        g = Generation(note.generation, session, options, note.prompt_tokens, self._now, rank)
        g.base, g.generated_from, g.consumed = note.base, note.generated_from, note.generated_from
        g.sampling = replace(options.sampling, prompt_tokens=note.generated_from, stop_token_ids=options.stop_token_ids)
        g.checked = True
        g.delivered = len(found.transcript) - note.generated_from
        g.state = State.RUNNING
        session.generation = g
        self._generations[g.id] = g
        self._counters.generations_started += 1
        self._counters.prompt_tokens += g.prompt_tokens
        self._counters.output_tokens += g.delivered
        begin = note.generated_from - note.prompt_tokens
        prompt, tokens = found.transcript[begin : note.generated_from], tuple(found.transcript[note.generated_from :])
        fingerprint = w.capability.fingerprint
        self._out.append(Restored(generation=g.id, prompt=tuple(prompt), options=options, fingerprint=fingerprint))
        w.adopt(session, sequence, g, found.sampled and found.finish is None)
        if found.finish is not None:
            self._finish(g, found.finish, tokens=tokens)
        elif tokens:
            self._out.append(Deliver(generation=g.id, offset=0, tokens=tokens))

    def _rank(self, submitted_us: int, priority: int) -> Rank:
        return (submitted_us - priority * self._config.priority_ageing_ms * 1000, self._arrivals)

    def _refuse_worker(self, event: WorkerJoined, cause: str) -> None:
        incarnation = event.capability.incarnation
        self._fence(incarnation)
        self._out.append(GiveUpWorker(worker=event.worker, incarnation=incarnation, cause=cause))
        self._out += self._fleet.start_failed(event.worker, cause, self._now)

    def _check_again(self, g: Generation) -> None:
        """Submitted before any worker was there: now its numbers can be checked."""
        g.checked = True
        transcript = g.session.transcript
        try:
            self._check_limits(g.session.model, len(transcript), tuple(transcript[g.base :]), g.options)
        except BadInput as error:
            self._finish(g, FinishReason.FAILED, error=error)

    def _worker_gone(self, event: WorkerGone) -> None:
        w = self._workers.get(event.worker)
        if w is not None and w.incarnation == event.incarnation:
            self._fleet.lost(w, self._now)
            self._lose(w)

    def _worker_draining(self, event: WorkerDraining) -> None:
        w = self._workers.get(event.worker)
        if w is not None:
            self._drain(w, event.deadline_us)

    def _drain(self, w: WorkerPlan, deadline_us: int | None = None) -> None:
        if w.draining and w.drain_until_us is None:
            return  # its time is up
        latest = w.drain_until_us or self._now + self._config.drain_timeout_ms * 1000
        w.drain_until_us = latest if deadline_us is None else min(latest, deadline_us)
        if not w.draining:
            w.draining = True
            w.served.line.recall()  # others that drain may be who takes them now
            self._move_away(w)

    def _end_drains(self) -> None:
        """What is still on a worker when its time is up has to go: to the line, or to its end if no line serves it."""
        for w in list(self._workers.values()):
            if w.draining:
                self._changed[w.id] = w  # what it alone might have taken may have left the line
            if w.drain_until_us is None or self._now < w.drain_until_us:
                continue
            w.drain_until_us = None
            if w.served is not self._served and not self._has_another(w):
                lost = f"the update had no more time for it: {w.id} served the model that was replaced"
                self._fail_all(w.served, WorkerLost(lost))
            self._leave_all(w)

    def _fail_all(self, served: Served, error: BatchingError) -> None:
        for g in [g for g in self._generations.values() if g.session.model is served]:
            self._finish(g, FinishReason.FAILED, error=error)

    def _leave_all(self, w: WorkerPlan) -> None:
        self._changed[w.id] = w
        for r in list(w.residents.values()):
            g = r.generation
            if r.leaving or (g is None and r.rows):
                continue
            w.leave(r)
            if g is not None:
                self._counters.moved += 1
                if not r.rows:
                    r.session.model.line.add_returning(g)

    def _has_another(self, w: WorkerPlan) -> bool:
        """Another worker of the same model stays."""
        return any(other.served is w.served and not other.draining for other in self._workers.values())

    # --- which workers there are ---

    def _start_failed(self, event: WorkerStartFailed) -> None:
        start = self._fleet.starting.get(event.worker)
        self._out += self._fleet.start_failed(event.worker, event.cause, self._now)
        for served in self._replaced:
            if start is not None and start.revision == served.revision:
                self._fail_all(served, WorkerLost(f"no worker of the model that was replaced starts: {event.cause}"))

    def _change_workers(self) -> None:
        decided = self._fleet.decide(self._load(), list(self._workers.values()))
        for served in list(self._replaced):
            own = [w for w in self._workers.values() if w.served is served]
            if not own and not len(served.line):
                self._replaced.remove(served)
            elif not own:  # its last worker died
                decided += self._fleet.start_one(served.revision, self._now)
        self._out += decided
        for instruction in decided:
            if isinstance(instruction, DrainBegun):
                self._drain(self._workers[instruction.worker])

    def _load(self) -> Load:
        staying = [w for w in self._workers.values() if not w.draining]
        cells = [w.capability.usable_cells for w in staying]
        return Load(
            at_us=self._now,
            ready=len(staying),
            starting=self._fleet.loading,
            generations=len(self._generations) + self._fleet.callers,
            waiting_tokens=self._line.tokens,
            cells_used=sum(w.table.used_cells - w.cells_cached for w in self._workers.values()),
            cells_per_worker=min(cells, default=self._served.cells),
            sequences_per_worker=self._served.sequences,
            wait_us=self._forecast(self._line.tokens, 0),
            start_us=self._fleet.start_us,
        )

    def _takers(self, served: Served) -> list[WorkerPlan]:
        """Who may be given a generation of this model. Of one that was replaced, those that drain, if nobody else."""
        own = [w for w in self._workers.values() if w.served is served]
        staying = [w for w in own if not w.draining]
        if staying or served is self._served:
            return staying
        return [w for w in own if w.drain_until_us is not None]

    def _move_away(self, w: WorkerPlan) -> None:
        """Residents of a draining worker leave: idle ones at once, running ones when there is another worker."""
        self._changed[w.id] = w
        elsewhere = self._has_another(w)
        for r in list(w.residents.values()):
            g = r.generation
            if r.leaving or (g is None and r.rows) or (g is not None and not elsewhere):
                continue
            w.leave(r)
            if g is not None:
                self._counters.moved += 1
                if not r.rows:
                    g.session.model.line.add_returning(g)

    def _find_hangs(self) -> None:
        for w in list(self._workers.values()):
            if not w.in_flight:
                continue
            predicted = sum(step_us(w, len(s.cells.cells)) or 0 for s in w.in_flight if s.cells)
            quiet = self._now - w.quiet_since_us
            if quiet > self._config.step_timeout_ms * 1000 + predicted:
                self._give_up(w, f"no answer to step {w.in_flight[0].number} for {quiet // 1000} ms", None)

    def _give_up(self, w: WorkerPlan, cause: str, step: Step | None) -> None:
        """The worker's state is unknown. Generations in `step` have failed with it once more."""
        self._out.append(GiveUpWorker(worker=w.id, incarnation=w.incarnation, cause=cause))
        suspects = {r.generation.id: r.generation for r in step.residents if r.generation} if step else {}
        for g in suspects.values():
            g.attempts += 1
        self._fleet.lost(w, self._now)
        self._lose(w)
        for g in suspects.values():
            if g.attempts >= self._config.step_attempts:
                error = StepError(f"it was in {g.attempts} failed steps; the last: {cause}")
                self._finish(g, FinishReason.FAILED, error=error)

    def _lose(self, w: WorkerPlan) -> None:
        """The worker and every cell on it are gone: sessions keep their transcripts and wait for another place."""
        self._fence(w.incarnation)
        del self._workers[w.id]
        self._changed.pop(w.id, None)
        for r in w.residents.values():
            session, g = r.session, r.generation
            session.resident = None
            if g is not None:
                self._counters.moved += 1
                self._release_followers(g)
                session.model.line.add_returning(g)
            following = session.generation
            if following is not None and following.state is State.SETTLING and following.leader is None:
                session.model.line.add(following)

    def _fence(self, incarnation: Incarnation) -> None:
        self._fenced[incarnation] = None
        if len(self._fenced) > _FENCED_REMEMBERED:
            del self._fenced[next(iter(self._fenced))]

    def _worker_of(self, r: Resident | None) -> WorkerPlan | None:
        return self._workers.get(r.worker) if r is not None else None

    # --- sessions ---

    def _answer_session(self, event: SessionEvent) -> None:
        try:
            match event:
                case OpenSession():
                    session = self._sessions.open(event.tenant, event.cache_salt, opened=True, life=event.life)
                    session.model = self._served
                case CloneSession():
                    session = self._clone_session(event)
                case RewindSession():
                    session = self._rewind_session(event)
                case LookUpSession():
                    session = self._sessions.get(event.session)
                case CloseSession():
                    session = self._close_session(event)
        except Refused as error:
            self._out.append(SessionAnswer(ticket=event.ticket, error=error))
        else:
            self._sessions.used(session, self._now)
            self._out.append(SessionAnswer(ticket=event.ticket, session=session.id, length=session.length))

    def _clone_session(self, event: CloneSession) -> Session:
        source = self._sessions.get(event.source)
        twin = self._sessions.clone(source, event.upto, event.life)
        self._sessions.used(source, self._now)
        twin.model = source.model
        w = self._worker_of(source.resident)
        if w is not None and not w.draining and source.resident is not None and not source.resident.leaving:
            w.clone(source.resident, twin, encode_note(_idle_note(twin)))
        return twin

    def _rewind_session(self, event: RewindSession) -> Session:
        session = self._sessions.get(event.session)
        self._sessions.rewind(session, event.position)
        w, r = self._worker_of(session.resident), session.resident
        if w is not None and r is not None and not r.rows:
            self._settled(w, r)
            self._changed[w.id] = w
        return session

    def _close_session(self, event: CloseSession) -> Session:
        session = self._sessions.get(event.session)
        self._close(session)
        return session

    def _close_unused(self) -> None:
        """Whoever opened them has forgotten them, or has died."""
        if self._config.session_idle_ms:
            for session in self._sessions.unused_since(self._now - self._config.session_idle_ms * 1000):
                self._close(session)

    def _close(self, session: Session) -> None:
        if session.generation is not None:
            self._finish(session.generation, FinishReason.CANCELLED)
        self._sessions.close(session)
        w, r = self._worker_of(session.resident), session.resident
        if w is not None and r is not None:
            w.leave(r)
            self._changed[w.id] = w

    # --- going on ---

    def _advance(self) -> None:
        """Start who can start, and send each worker the steps it may have."""
        while True:
            for served in (*self._replaced, self._served):
                if len(served.line):
                    self._start_waiting(served)
            if not self._changed:
                return
            parked: list[Generation] = []
            changed = list(self._changed.values())
            for w in changed:
                while (plan := w.form_step(self._now)) is not None:
                    self._out.append(RunStep(worker=w.id, plan=plan))
                parked += w.parked
                w.parked.clear()
            self._changed.clear()
            for g in parked:
                g.session.model.line.add_returning(g)
            self._counters.parked += len(parked)
            for w in changed:
                if w.draining:
                    self._release(w)
            if not parked:
                return

    def _release(self, w: WorkerPlan) -> None:
        """Let a draining worker go if nothing is on it, and nothing waits that it alone may take."""
        if not (w.residents or w.in_flight or (len(w.served.line) and w in self._takers(w.served))):
            self._fence(w.incarnation)
            del self._workers[w.id]
            self._out.append(ReleaseWorker(worker=w.id))

    def _start_waiting(self, served: Served) -> None:
        takers = self._takers(served)
        while (g := served.line.next()) is not None:
            if takers and not any(can_hold(w, g) for w in takers):
                served.line.set_aside(g)  # for a roomier worker, as there was when it was admitted
                continue
            home = self._worker_of(g.session.resident)
            if home is not None and g.session.resident is not None and not can_hold(home, g):
                home.leave(g.session.resident)
                self._changed[home.id] = home
            fits = [
                w
                for w in takers
                if w.has_sequence or w.idle or g.session.resident is not None
                if w.room - w.headroom >= g.needed or w.idle
            ]
            g.needed = 0 if fits else g.needed
            chosen = next((w for w in by_preference(g, fits) if self._start(g, w)), None)
            if chosen is None:
                way = next((w for w in by_preference(g, takers) if w.make_way(g)), None)
                if way is None:
                    return
                self._changed[way.id] = way
                if not way.parked:
                    return  # it will have its place when what is under way of the others is settled
            else:
                self._changed[chosen.id] = chosen

    def _start(self, g: Generation, w: WorkerPlan) -> bool:
        first = g.state is State.WAITING and not g.delivered
        had = g.session.resident
        had_tokens = had.planned if had else 0
        if not w.start(g, encode_note(_note(g))):
            return False
        g.session.model.line.take(g)
        g.state = State.RUNNING
        g.needed = 0
        if first:
            r = g.session.resident
            assert r is not None
            begin = g.generated_from - g.prompt_tokens
            g.cached_tokens = max(0, r.planned - max(begin, had_tokens))
            g.first_step_us = self._now
            self._counters.cached_tokens += g.cached_tokens
        return True


def _fault(result: StepResult, step: Step, w: WorkerPlan) -> str | None:
    """What is wrong with an answer, if anything: checked as if the worker were wrong (D15, H9)."""
    if result.step != step.number:
        return f"step {result.step} was answered where step {step.number} was due"
    if w.refusing:
        return f"step {result.step} was run behind a refused one"
    if len(result.tokens) != step.outputs:
        return f"step {result.step} was answered with {len(result.tokens)} tokens, {step.outputs} were asked for"
    if result.logprobs and len(result.logprobs) != step.outputs:
        return f"step {result.step} was answered with {len(result.logprobs)} logprobs for {step.outputs} tokens"
    if result.tokens and (min(result.tokens) < 0 or max(result.tokens) >= w.capability.vocab_size):
        return f"step {result.step} brought a token that is not below the vocabulary size {w.capability.vocab_size}"
    return None


def _idle_note(session: Session) -> Note:
    return Note(
        session=session.id,
        opened=session.opened,
        tenant=session.tenant,
        cache_salt=session.cache_salt,
        length=session.length,
        pending=session.transcript[-1] if session.pending else None,
    )


def _note(g: Generation) -> Note:
    session = g.session
    return Note(
        session=session.id,
        opened=session.opened,
        tenant=session.tenant,
        cache_salt=session.cache_salt,
        generation=g.id,
        prompt_tokens=g.prompt_tokens,
        generated_from=g.generated_from,
        base=g.base,
        submitted_us=g.submitted_us,
        priority=g.options.priority,
        max_new_tokens=g.limit,
        stop_token_ids=g.options.stop_token_ids,
        delivered_before=g.options.delivered_before,
    )
