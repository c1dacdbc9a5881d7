"""Every generation's state, for all workers. Changed only by `handle`; the same events give the same instructions.

`handle(event)` is called by one thread, one event at a time, and never waits. Time is what the events say. What it
returns is to be carried out in order. It ties the planner's parts together and keeps none of their books:

- `sessions` holds transcripts and the rules of sessions, `generations` the numbers of one call;
- `entrance` decides who comes in, `admission` who is next, `placement` where it goes;
- `roster` holds who is there and who may take what, `models` what is served; `drains` empties workers that are to go;
- `fleet` decides which workers there should be;
- one `WorkerPlan` per worker holds its cells, scheduler and steps under way; `fault` judges its answers;
- `outlook` reads all that and changes nothing: status, load, where a generation is, when a first token comes.

A generation stays with the model that it was submitted to. After an update to another one, workers of the old model
take nothing but what was submitted to it, and go when that has ended.

Promises. Tokens of a generation are delivered in order, each once, and never retracted, whatever happens to workers:
only a `Cancel` that says how many to keep takes the others back. So are log-probabilities of its prompt.
Each accepted generation ends exactly once; with `FAILED` comes an error. A refusal changes nothing but its answer. An
answer of a worker or an incarnation that is not planned for is dropped, so is a repeated one. A `Submit` under the id
of a generation that has not ended is dropped too: an answer to it would end the other.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from microtome.planner.config import PlannerConfig
from microtome.planner.counters import Counters
from microtome.planner.drains import Drains
from microtome.planner.entrance import Entrance
from microtome.planner.errors import (
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
    DeliverPrompt,
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
from microtome.planner.fault import fault_of
from microtome.planner.fleet import Fleet
from microtome.planner.forecast import step_us
from microtome.planner.generations import Generation, Rank, State, check_options, policy_of
from microtome.planner.models import Models
from microtome.planner.noting import idle_note, note_of
from microtome.planner.outlook import Outlook
from microtome.planner.placement import by_preference, can_hold
from microtome.planner.resident import Resident
from microtome.planner.restore import Found, read_snapshot
from microtome.planner.roster import Roster
from microtome.planner.served import Served
from microtome.planner.sessions import Session, Sessions
from microtome.planner.status import ControlStatus, Listed, Whereabouts
from microtome.planner.tenant_counters import TenantTally
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    Kind,
    SequenceId,
    SequenceSnapshot,
    StepResult,
    TokenLogprobs,
    Usage,
    WorkerId,
)
from microtome.planner.worker_plan import Step, WorkerPlan


class Control:
    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._counters = Counters()
        self._tenants = TenantTally(config.weights())
        self._models = Models(config)
        self._roster = Roster(self._models)
        self._drains = Drains(self._roster, self._counters, config.drain_timeout_ms)
        self._fleet = Fleet()
        self._sessions = Sessions(config.max_sessions)
        self._generations: dict[GenerationId, Generation] = {}
        self._stoppable: dict[GenerationId, Session] = {}  # ended ones whose text may have stopped before, by session
        self._outlook = Outlook(
            self._roster, self._models, self._sessions, self._generations, self._counters, self._tenants
        )
        self._entrance = Entrance(config, self._roster, self._models, self._outlook)
        self._deadlines: list[tuple[int, int, Generation]] = []  # heap
        self._arrivals = 0
        self._now = 0
        self._out: list[Instruction] = []

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
                self._fleet.callers = event.count if self._models.served.fingerprint is None else 0
            case UpdateWorkers():
                self._fleet.update(event.revision, event.surge, event.tried)
            case OpenSession() | CloneSession() | RewindSession() | LookUpSession() | CloseSession():
                self._answer_session(event)
            case _:
                assert_never(event)
        if self._fleet.active and (not len(self._roster) or not isinstance(event, StepDone | Submit | Cancel)):
            self._change_workers()
        self._advance()
        return self._out

    # --- reading ---

    @property
    def fingerprint(self) -> str | None:
        """Of the model that is served; None while no worker has ever joined."""
        return self._models.served.fingerprint

    def status(self) -> ControlStatus:
        """A snapshot, consistent in itself."""
        return self._outlook.status()

    def where(self, generation: GenerationId) -> Whereabouts | None:
        """Where a generation is and what it waits for; None if it has ended or never was. Walks the line."""
        return self._outlook.where(generation)

    def places(self, generations: Iterable[GenerationId]) -> dict[GenerationId, Whereabouts]:
        """`where` of several, walking the line once. Without those that have ended or never were."""
        return self._outlook.places(generations)

    def listed(self, limit: int) -> list[Listed]:
        """Generations that have not ended, `limit` at most: those in line, in their order, then the others.

        Costs time in proportion to the line, and to `limit` times what waits for a step.
        """
        return self._outlook.listed(limit)

    def awaited_outputs(self, worker: WorkerId) -> list[tuple[GenerationId, int]]:
        """Per output of the step that this worker answers next: whose token, and its offset; void ones have no name."""
        w = self._roster.get(worker)
        step = w.awaited if w is not None else None
        if step is None:
            return []
        outputs: list[tuple[GenerationId, int]] = []
        for one, r in zip(step.inputs, step.residents, strict=True):
            if one.wants_output:
                g = r.generation
                outputs.append((g.id, g.delivered) if g else (GenerationId(""), 0))
        return outputs

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
                self._tenants.refused(event.options.tenant)
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
        served = self._models.of_submission(event.fingerprint, session)
        if session is not None:
            # Only here is it known how long the history is: a caller's limit beyond the context's end means that end.
            room = self._entrance.room(served, len(history) + len(prompt))
            limit = options.max_new_tokens if room is None else min(options.max_new_tokens, room)
            options = replace(options, max_new_tokens=limit, tenant=options.tenant or session.tenant)
        held = session.resident.planned if session is not None and session.resident is not None else 0
        self._entrance.check(served, len(history), prompt, options, 1 + len(names), held, self._now)

        if session is None:
            session = self._sessions.open(options.tenant, options.cache_salt, opened=False)
        session.model = served
        twins = [list(session.transcript) for _ in event.siblings]
        first = self._begin(event.generation, session, prompt, options)
        for (name, seed), transcript in zip(event.siblings, twins, strict=True):
            twin = self._sessions.open(session.tenant, session.cache_salt, opened=False)
            twin.transcript, twin.model = transcript, served
            # The prompt is the same for all: the first completion says how likely it is.
            seeded = replace(options, sampling=replace(options.sampling, seed=seed, prompt_logprobs=None))
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
        g.checked = bool(self._roster.of_model(session.model))
        self._remember_ended(session, None)
        session.transcript += prompt
        session.pending = False
        session.generation = g
        g.generated_from = len(session.transcript)
        g.sampling = policy_of(options, g.generated_from)
        g.reported = g.generated_from - g.prompt_tokens
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

    def _cancel(self, event: Cancel) -> None:
        g = self._generations.get(event.generation)
        if g is None and event.keep is not None:
            self._stop_ended(event.generation, event.keep)
        if g is not None:
            reason = FinishReason.CANCELLED if event.keep is None else FinishReason.STOP
            self._finish(g, reason, keep=event.keep)

    def _stop_ended(self, generation: GenerationId, keep: int) -> None:
        """It ended before its text was looked at, which had come to a stop: its session forgets what is behind that."""
        session = self._stoppable.get(generation)
        if session is None or session.ended is None or session.generation is not None:
            return
        end = session.ended.generated_from + keep
        if session.pending and end < len(session.transcript):
            del session.transcript[end:]
            w, r = self._roster.home_of(session.resident), session.resident
            if w is not None and r is not None and not r.rows:
                self._settled(w, r)
                self._roster.touch(w)

    def _remember_ended(self, session: Session, g: Generation | None) -> None:
        """`g` was the session's last generation; None: a next one begins, or the session is closed."""
        if session.ended is not None:
            self._stoppable.pop(session.ended.id, None)
        session.ended = g
        if g is not None:
            self._stoppable[g.id] = session

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
        keep: int | None = None,
    ) -> None:
        """The generation is over; `tokens` are its last, counted already. Cells go when nothing of it is under way.

        `keep`: what it delivered behind so many tokens is void.
        """
        session, r = g.session, g.session.resident
        w = self._roster.home_of(r)
        line = session.model.line
        if g.state is not State.RUNNING:
            line.leave(g)
        elif w is not None and r is not None:
            if not g.delivered:
                g.consumed = max(g.consumed, min(r.planned, g.generated_from))
            w.end(r)
            r.ended = reason
            self._roster.touch(w)
        if keep is not None and keep < g.delivered:
            void = g.delivered - keep
            del session.transcript[len(session.transcript) - void :]
            g.delivered = keep
            self._counters.output_tokens -= void
            self._counters.overshoot_tokens += void
        g.state = State.ENDED
        g.finish = reason
        del self._generations[g.id]
        self._release_followers(g)
        line.refund(g)
        self._counters.count_end(reason)
        self._tenants.ended(g)
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
        if session.opened and g.options.stop_texts:
            self._remember_ended(session, g)
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
        result = event.result
        w = self._roster.incarnated(event.worker, result.incarnation)
        if w is None:
            return
        step = w.awaited
        if step is None or result.step < step.number:
            return  # a repeated answer
        if fault := fault_of(result, step, w):
            self._give_up(w, fault, step)
            return
        w.settle(result)
        w.quiet_since_us = self._now
        self._roster.touch(w)
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
        if step.asking:
            self._take_prompt_logprobs(step, result)
        for share in step.shares:
            r = share.resident
            r.rows -= 1
            if not r.rows and (r.leaving or r.generation is None):
                settled.append(r)
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

    def _take_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        """Deliver how likely the tokens of prompts are, each position once."""
        at = 0
        for index in step.asking:
            one, g = step.inputs[index], step.residents[index].generation
            count = one.width - one.wants_output
            logprobs: tuple[TokenLogprobs | None, ...] = result.prompt_logprobs[at : at + count]
            at += count
            if g is None:
                continue
            if one.start == 0 and g.reported == 0:
                logprobs = (None, *logprobs)  # nothing is in front of the first token of all
            offset = g.reported - (g.generated_from - g.prompt_tokens)
            g.reported += len(logprobs)
            if logprobs:
                self._out.append(DeliverPrompt(generation=g.id, offset=offset, logprobs=logprobs))

    def _settled(self, w: WorkerPlan, r: Resident) -> None:
        """Nothing of the resident is under way: it leaves, or is trimmed to what its session has committed."""
        if w.residents.get(r.session.id) is not r:
            return  # left already
        session, g = r.session, r.generation
        if r.leaving:
            w.leave(r)
            if g is not None:
                self._counters.parked += not w.draining
                g.parked += not w.draining
                session.model.line.add_returning(g)
        elif g is None:
            w.rest(r, session.length, idle_note(session))
            if w.draining:
                w.leave(r)
        following = session.generation
        if following is not None and following.state is State.SETTLING and following.leader is None:
            session.model.line.add(following)

    def _step_failed(self, event: StepFailed) -> None:
        w = self._roster.incarnated(event.worker, event.incarnation)
        if w is None:
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
        self._roster.touch(w)
        for r in w.refused() or ():
            if r.leaving or r.generation is None:
                self._settled(w, r)

    # --- workers ---

    def _worker_joined(self, event: WorkerJoined) -> None:
        capability = event.capability
        if self._roster.is_fenced(capability.incarnation):
            self._refuse_worker(event, "this incarnation was given up")
            return
        known = self._roster.get(event.worker)
        if known is not None:
            if known.incarnation == capability.incarnation:
                return
            self._lose(known)
        served = self._models.of_worker(capability.fingerprint, event.revision)
        if served is None:
            known_as = self._models.served.fingerprint
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
        self._models.joined(served, capability, event.revision)
        w.revision, w.joined_us = event.revision, self._now
        w.quiet_since_us = self._now
        self._fleet.joined(w.id, event.revision, self._now)
        self._roster.add(w)
        self._restore(w, event.held)
        served.line.recall()
        for g in [g for g in self._generations.values() if not g.checked and g.session.model is served]:
            self._check_again(g)
        self._drains.go_on()

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
        g.sampling = policy_of(options, note.generated_from)
        g.reported = g.generated_from
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
        if options.sampling.prompt_logprobs is not None:
            of_prompt = found.reported(begin, note.generated_from)
            self._out.append(DeliverPrompt(generation=g.id, offset=0, logprobs=of_prompt))
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if options.sampling.logprobs is not None:
            logprobs = found.reported(note.generated_from, len(found.transcript))
        w.adopt(session, sequence, g, found.sampled and found.finish is None)
        if found.finish is not None:
            self._finish(g, found.finish, tokens=tokens, logprobs=logprobs)
        elif tokens:
            self._out.append(Deliver(generation=g.id, offset=0, tokens=tokens, logprobs=logprobs))

    def _rank(self, submitted_us: int, priority: int) -> Rank:
        return (submitted_us - priority * self._config.priority_ageing_ms * 1000, self._arrivals)

    def _refuse_worker(self, event: WorkerJoined, cause: str) -> None:
        incarnation = event.capability.incarnation
        self._roster.fence(incarnation)
        self._out.append(GiveUpWorker(worker=event.worker, incarnation=incarnation, cause=cause))
        self._out += self._fleet.start_failed(event.worker, cause, self._now)

    def _check_again(self, g: Generation) -> None:
        """Submitted before any worker was there: now its numbers can be checked."""
        g.checked = True
        transcript = g.session.transcript
        try:
            self._entrance.check_limits(g.session.model, len(transcript), tuple(transcript[g.base :]), g.options)
        except BadInput as error:
            self._finish(g, FinishReason.FAILED, error=error)

    def _worker_gone(self, event: WorkerGone) -> None:
        w = self._roster.incarnated(event.worker, event.incarnation)
        if w is not None:
            self._fleet.lost(w, self._now)
            self._lose(w)

    def _worker_draining(self, event: WorkerDraining) -> None:
        w = self._roster.get(event.worker)
        if w is not None:
            self._drains.begin(w, self._now, event.deadline_us)

    def _end_drains(self) -> None:
        """What is still on a worker when its time is up has to go: to the line, or to its end if no line serves it."""
        for w in self._drains.over(self._now):
            if w.served is not self._models.served and not self._roster.has_another(w):
                lost = f"the update had no more time for it: {w.id} served the model that was replaced"
                self._fail_all(w.served, WorkerLost(lost))
            self._drains.clear(w)

    def _fail_all(self, served: Served, error: BatchingError) -> None:
        for g in [g for g in self._generations.values() if g.session.model is served]:
            self._finish(g, FinishReason.FAILED, error=error)

    # --- which workers there are ---

    def _start_failed(self, event: WorkerStartFailed) -> None:
        start = self._fleet.starting.get(event.worker)
        self._out += self._fleet.start_failed(event.worker, event.cause, self._now)
        for served in self._models.replaced:
            if start is not None and start.revision == served.revision:
                self._fail_all(served, WorkerLost(f"no worker of the model that was replaced starts: {event.cause}"))

    def _change_workers(self) -> None:
        decided = self._fleet.decide(self._outlook.load(self._fleet, self._now), list(self._roster))
        for served in self._models.replaced:
            own = self._roster.of_model(served)
            if not own and not len(served.line):
                self._models.forget(served)
            elif not own:  # its last worker died
                decided += self._fleet.start_one(served.revision, self._now)
        self._out += decided
        for instruction in decided:
            if isinstance(instruction, DrainBegun) and (w := self._roster.get(instruction.worker)):
                self._drains.begin(w, self._now, None)

    def _find_hangs(self) -> None:
        for w in self._roster:
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
        self._roster.remove(w)
        for r in w.residents.values():
            session, g = r.session, r.generation
            session.resident = None
            if g is not None:
                self._counters.moved += 1
                g.moved += 1
                self._release_followers(g)
                session.model.line.add_returning(g)
            following = session.generation
            if following is not None and following.state is State.SETTLING and following.leader is None:
                session.model.line.add(following)

    # --- sessions ---

    def _answer_session(self, event: SessionEvent) -> None:
        try:
            match event:
                case OpenSession():
                    session = self._sessions.open(event.tenant, event.cache_salt, opened=True, life=event.life)
                    session.model = self._models.served
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
        w = self._roster.home_of(source.resident)
        if w is not None and not w.draining and source.resident is not None and not source.resident.leaving:
            w.clone(source.resident, twin, idle_note(twin))
        return twin

    def _rewind_session(self, event: RewindSession) -> Session:
        session = self._sessions.get(event.session)
        self._sessions.rewind(session, event.position)
        w, r = self._roster.home_of(session.resident), session.resident
        if w is not None and r is not None and not r.rows:
            self._settled(w, r)
            self._roster.touch(w)
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
        self._remember_ended(session, None)
        self._sessions.close(session)
        w, r = self._roster.home_of(session.resident), session.resident
        if w is not None and r is not None:
            w.leave(r)
            self._roster.touch(w)

    # --- going on ---

    def _advance(self) -> None:
        """Start who can start, and send each worker the steps it may have."""
        while True:
            for served in self._models.every:
                if len(served.line):
                    self._start_waiting(served)
            changed = self._roster.take_changed()
            if not changed:
                return
            parked: list[Generation] = []
            for w in changed:
                while (plan := w.form_step(self._now)) is not None:
                    self._out.append(RunStep(worker=w.id, plan=plan))
                parked += w.parked
                w.parked.clear()
                self._counters.cached_tokens += w.found_tokens
                w.found_tokens = 0
            for g in parked:
                g.parked += 1
                g.session.model.line.add_returning(g)
            self._counters.parked += len(parked)
            for w in changed:
                if w.draining:
                    self._release(w)
            if not parked:
                return

    def _release(self, w: WorkerPlan) -> None:
        """Let a draining worker go if nothing is on it, and nothing waits that it alone may take."""
        if not (w.residents or w.in_flight or (len(w.served.line) and w in self._roster.takers(w.served))):
            self._roster.remove(w)
            self._out.append(ReleaseWorker(worker=w.id))

    def _start_waiting(self, served: Served) -> None:
        takers = self._roster.takers(served)
        while (g := served.line.next()) is not None:
            if takers and not any(can_hold(w, g) for w in takers):
                served.line.set_aside(g)  # for a roomier worker, as there was when it was admitted
                continue
            home = self._roster.home_of(g.session.resident)
            if home is not None and g.session.resident is not None and not can_hold(home, g):
                home.leave(g.session.resident)
                self._roster.touch(home)
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
                self._roster.touch(way)
                if not way.parked:
                    return  # it will have its place when what is under way of the others is settled
            else:
                self._roster.touch(chosen)

    def _start(self, g: Generation, w: WorkerPlan) -> bool:
        first = g.state is State.WAITING and not g.delivered
        had = g.session.resident
        had_tokens = had.planned if had else 0
        if not w.start(g, note_of(g)):
            return False
        g.session.model.line.take(g)
        g.state = State.RUNNING
        g.needed = 0
        if first:
            r = g.session.resident
            assert r is not None
            begin = g.generated_from - g.prompt_tokens
            r.prompt_from = begin
            g.cached_tokens = max(0, r.planned - max(begin, had_tokens))
            g.first_step_us = self._now
            self._counters.cached_tokens += g.cached_tokens
        return True
