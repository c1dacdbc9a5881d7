"""Callers in virtual time: they ask, listen, cancel, talk in turns, and check every token they are given.

What a generation may deliver is known beforehand: the model's own tokens after its whole history. So each delivery is
compared at its offset, each generation has to end exactly once, and a session's transcript has to be what was said.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from microtome.planner.control import Control
from microtome.planner.errors import (
    AtCapacity,
    BadInput,
    DeadlineExpired,
    StepError,
    UnknownId,
    WrongState,
)
from microtome.planner.events import (
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    DeliverPrompt,
    Event,
    Instruction,
    OpenSession,
    Restored,
    RewindSession,
    SessionAnswer,
    Submit,
)
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    SamplingParams,
    SessionId,
    TokenLogprobs,
)
from tests.simulation.clock import Clock
from tests.simulation.scenario import VOCAB, Scenario
from tests.support.fake_model import content, generate, logprobs_of

CROWD_US = 15_000  # between two moments at which a crowd comes


class Asked:
    """One generation as its caller sees it."""

    def __init__(
        self,
        name: GenerationId,
        history: Sequence[int],
        prompt: tuple[int, ...],
        options: GenerationOptions,
        then: Callable[[], None],
        session: SessionId | None = None,
        vocab: int = VOCAB,
        context: int | None = None,
    ) -> None:
        """`context`: tokens; in a session what is asked for beyond is cut off. None: not known, or no session."""
        self.name = name
        self.history = list(history)
        self.prompt = prompt
        self.options = options
        self.then = then
        self.session = session
        self.length = len(history) + len(prompt)
        sampling = options.sampling
        limit = options.max_new_tokens if context is None else min(options.max_new_tokens, context - self.length)
        self.oracle = generate([*history, *prompt], sampling, limit, options.stop_token_ids, vocab)
        self.likely = self._likely([*history, *prompt, *self.oracle])
        self.prompt_next = 0  # tokens of the prompt that it was told of
        self.restored = False  # an earlier driver began it: what it told is known as far as the worker has kept it
        self.next = 0
        self.finish: FinishReason | None = None
        self.ends = 0
        self.broken = False  # the driver it was asked of is gone
        self.replayed = False  # it had ended, and a restarted driver did not know

    @property
    def over(self) -> bool:
        return self.finish is not None

    @staticmethod
    def _likely(tokens: Sequence[int]) -> list[int]:
        """Per token, what all before it hold."""
        attended = [0]
        for position, token in enumerate(tokens):
            attended.append(attended[-1] + content(token, position, attended[-1]))
        return attended

    def receive_prompt(self, d: DeliverPrompt) -> None:
        """Each position once, in order, in front of the first token."""
        assert not self.over
        assert self.next == 0, f"{self.name} is told of its prompt behind its first token"
        assert d.offset == self.prompt_next, f"{self.name} knows {self.prompt_next} of its prompt, told from {d.offset}"
        self._check_logprobs(len(self.history) + d.offset, d.logprobs, self.options.sampling.prompt_logprobs)
        self.prompt_next += len(d.logprobs)

    def _check_logprobs(self, start: int, found: Sequence[TokenLogprobs | None], count: int | None) -> None:
        tokens = [*self.history, *self.prompt, *self.oracle]
        for position, one in enumerate(found, start):
            if one is None:
                assert position == 0 or self.restored or count is None
            else:
                assert one == logprobs_of(tokens[position], position, self.likely[position], count)

    def receive(self, d: Deliver) -> None:
        assert not self.over, f"{self.name} goes on after its end"
        sampling = self.options.sampling
        if d.tokens and sampling.prompt_logprobs is not None:
            assert self.prompt_next == len(self.prompt), f"{self.name} was told of {self.prompt_next} of its prompt"
        assert len(d.logprobs) == len(d.tokens) or (sampling.logprobs is None and not d.logprobs)
        assert sampling.logprobs is not None or not any(d.logprobs)
        self._check_logprobs(self.length + d.offset, d.logprobs, sampling.logprobs)
        assert d.offset == self.next, f"{self.name} is at {self.next}, the next tokens are at {d.offset}"
        expected = self.oracle[d.offset : d.offset + len(d.tokens)]
        assert list(d.tokens) == expected, f"{self.name} at {d.offset}: {list(d.tokens)} instead of {expected}"
        self.next += len(d.tokens)
        assert (d.error is not None) == (d.finish is FinishReason.FAILED)
        if d.finish is None:
            assert d.tokens
            return
        self.finish = d.finish
        self.ends += 1
        assert d.usage is not None
        assert (d.usage.prompt_tokens, d.usage.output_tokens) == (len(self.prompt), self.next)
        assert d.usage.cached_tokens < max(1, self.length)
        if d.finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.next == len(self.oracle), f"{self.name} ends after {self.next} of {len(self.oracle)}"
            stopped = self.oracle[-1] in self.options.stop_token_ids
            assert stopped == (d.finish is FinishReason.STOP)

    def check_transcript(self, transcript: list[int], length: int) -> None:
        """No token is lost or invented: old context, the consumed part of the delta, all delivered tokens."""
        said = [*self.history, *self.prompt]
        delivered = self.oracle[: self.next]
        if delivered:
            assert transcript == [*said, *delivered]
            assert length == len(transcript) - 1
        else:
            assert transcript == said[: len(transcript)]
            assert len(self.history) <= len(transcript)
            assert len(transcript) - 1 <= length <= len(transcript)


class Callers:
    def __init__(self, rng: Random, plot: Scenario, clock: Clock, post: Callable[[Event], None]) -> None:
        self._rng = rng
        self._plot = plot
        self._clock = clock
        self._post = post
        self._asked: dict[GenerationId, Asked] = {}
        self._tickets: dict[int, Callable[[SessionAnswer], None]] = {}
        self._tickets_issued = 0
        self._names = 0
        self._openings = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        self._sessions: dict[SessionId, list[int]] = {}  # opened: what was said
        self._era = 0  # of drivers

    @property
    def asked(self) -> dict[GenerationId, Asked]:
        return self._asked

    def begin(self) -> None:
        for number in range(self._plot.clients):
            act = self._ask_alone if number % 3 < 2 else self._open_session
            self._clock.after(self._when(self._rng.randrange(0, 30_000)), act)

    def unfinished(self) -> list[str]:
        return [a.name for a in self._asked.values() if not a.over]

    # --- what the planner says ---

    def check_answers(self, event: Event, instructions: Sequence[Instruction], control: Control) -> None:
        for instruction in instructions:
            match instruction:
                case Deliver():
                    asked = self._asked[instruction.generation]
                    asked.receive(instruction)
                    if asked.over:
                        self._ended(asked, instruction, control)
                case DeliverPrompt():
                    self._asked[instruction.generation].receive_prompt(instruction)
                case SessionAnswer(ticket=ticket):
                    self._tickets.pop(ticket)(instruction)
                case Restored(generation=generation, prompt=prompt):
                    asked = self._asked[generation]
                    assert prompt == asked.prompt
                    asked.broken = False
                    asked.next = asked.prompt_next = 0
                    asked.restored = True
                    asked.replayed = asked.over
                    asked.finish = None

    def _ended(self, asked: Asked, last: Deliver, control: Control) -> None:
        self._check_error(asked, last)
        if asked.replayed:
            return
        assert asked.ends == 1, f"{asked.name} ended {asked.ends} times"
        if asked.session is not None and asked.session in self._sessions and asked.session in control._sessions:
            session = control._sessions.get(asked.session)
            if session.generation is None:
                asked.check_transcript(session.transcript, session.length)
                self._sessions[asked.session] = list(session.transcript)
        self._clock.after(self._when(self._rng.randrange(0, 10_000)), asked.then)

    def _check_error(self, asked: Asked, last: Deliver) -> None:
        options = asked.options
        too_long = asked.length + options.max_new_tokens > self._plot.max_tokens
        match last.error:
            case None:
                pass
            case BadInput():
                assert too_long or not asked.prompt, f"{asked.name} was refused: {last.error}"
            case AtCapacity():
                assert last.error.retry_after_ms is not None
                assert last.offset == 0
            case DeadlineExpired():
                assert options.deadline_us is not None
                assert options.deadline_us <= self._clock.now_us
            case StepError():
                pass
            case UnknownId() | WrongState():
                assert asked.session is not None
            case _:
                raise AssertionError(f"{asked.name} failed with {last.error!r}")

    # --- generations alone ---

    def _ask_alone(self) -> None:
        if self._clock.now_us >= self._plot.horizon_us:
            return
        prompt, options = self._prompt(), self._options()
        asked = self._remember([], prompt, options, self._ask_alone)
        siblings = []
        if self._rng.random() < 0.15:
            for _ in range(self._rng.randrange(1, 4)):
                seed = self._rng.randrange(2**64)
                # The first completion tells of the prompt for all.
                seeded = replace(options, sampling=replace(options.sampling, seed=seed, prompt_logprobs=None))
                siblings.append((self._remember([], prompt, seeded, lambda: None).name, seed))
        self._submit(asked, siblings)

    def _submit(self, asked: Asked, siblings: Sequence[tuple[GenerationId, int]] = ()) -> None:
        if self._rng.random() < 0.25:
            self._clock.after(self._rng.randrange(0, 40_000), lambda: self._cancel(asked.name))
        self._post(
            Submit(
                at_us=self._clock.now_us,
                generation=asked.name,
                prompt=asked.prompt,
                options=asked.options,
                session=asked.session,
                siblings=tuple(siblings),
            )
        )

    def _cancel(self, name: GenerationId) -> None:
        self._post(Cancel(at_us=self._clock.now_us, generation=name))

    def _remember(
        self,
        history: Sequence[int],
        prompt: tuple[int, ...],
        options: GenerationOptions,
        then: Callable[[], None],
        session: SessionId | None = None,
    ) -> Asked:
        self._names += 1
        name = GenerationId(f"g{self._names}")
        context = None if session is None else self._plot.max_tokens
        asked = self._asked[name] = Asked(name, history, prompt, options, then, session, context=context)
        return asked

    def _prompt(self) -> tuple[int, ...]:
        longest = self._plot.max_tokens if self._rng.random() < 0.1 else max(2, self._plot.max_tokens // 3)
        length = self._rng.randrange(1, min(longest, 80) + 1)
        shared = self._rng.randrange(0, min(length, 60) + 1) if self._rng.random() < 0.6 else 0
        if self._plot.crowded:
            length = self._rng.randrange(2, max(3, min(self._plot.max_tokens // 2, 70)))
            shared = max(0, min(length, 60) - self._rng.randrange(0, 6))
        tail = [self._rng.randrange(VOCAB) for _ in range(length - shared)]
        return (*self._rng.choice(self._openings)[:shared], *tail)

    def _options(self) -> GenerationOptions:
        rng, now = self._rng, self._clock.now_us
        stop = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3))))
        seed = rng.randrange(2**64)
        options = GenerationOptions(
            max_new_tokens=rng.randrange(1, max(2, min(30, self._plot.max_tokens // 2))),
            stop_token_ids=stop,
            priority=rng.choice((0, 0, 0, 1, 5, -2)),
            tenant=rng.choice(("", "a", "b")),
            cache_salt=rng.choice(("", "", "x")),
            deadline_us=now + rng.randrange(1, 80_000) if rng.random() < 0.1 else None,
            ttft_target_us=rng.randrange(1, 50_000) if rng.random() < 0.05 else None,
            sampling=SamplingParams(temperature=rng.choice((0.0, 1.0))),
        )
        return self._seeded(options, seed)

    def _seeded(self, options: GenerationOptions, seed: int) -> GenerationOptions:
        sampling = SamplingParams(
            temperature=options.sampling.temperature,
            seed=seed,
            logprobs=(None, None, 0, 2)[seed % 4],
            prompt_logprobs=(None, None, None, 0, 1)[seed % 5],
        )
        return GenerationOptions(
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            priority=options.priority,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            deadline_us=options.deadline_us,
            ttft_target_us=options.ttft_target_us,
            sampling=sampling,
        )

    # --- sessions, in turns ---

    def _open_session(self) -> None:
        if self._clock.now_us < self._plot.horizon_us:
            ticket = self._ticket(self._session_opened)
            salt = self._rng.choice(("", "x"))
            self._post(OpenSession(at_us=self._clock.now_us, ticket=ticket, cache_salt=salt))

    def _session_opened(self, answer: SessionAnswer) -> None:
        if answer.session is None:
            assert isinstance(answer.error, AtCapacity)
            self._later(self._open_session)
            return
        assert answer.session not in self._sessions, "a session id was used twice"
        self._sessions[answer.session] = []
        self._next_turn(answer.session)

    def _next_turn(self, session: SessionId) -> None:
        self._later(lambda: self._turn(session))

    def _turn(self, session: SessionId) -> None:
        history = self._sessions.get(session)
        if history is None or self._clock.now_us >= self._plot.horizon_us:
            return
        now, choice = self._clock.now_us, self._rng.random()
        if choice < 0.15 or len(history) > self._plot.max_tokens // 2:
            del self._sessions[session]
            self._post(CloseSession(at_us=now, ticket=self._ticket(self._closed), session=session))
        elif choice < 0.3:
            upto = None if self._rng.random() < 0.5 else self._rng.randrange(0, len(history) + 2)
            ticket = self._ticket(lambda answer: self._cloned(session, history, upto, answer))
            self._post(CloneSession(at_us=now, ticket=ticket, source=session, upto=upto))
            self._next_turn(session)
        elif choice < 0.45:
            position = self._rng.randrange(0, len(history) + 2)
            ticket = self._ticket(lambda answer: self._rewound(session, history, position, answer))
            self._post(RewindSession(at_us=now, ticket=ticket, session=session, position=position))
            self._next_turn(session)
        else:
            prompt = self._prompt()[: max(1, self._plot.max_tokens // 6)]
            options = self._options()
            asked = self._remember(history, prompt, options, lambda: self._turn(session), session)
            self._submit(asked)
            if self._rng.random() < 0.2:
                self._later(lambda: self._meddle(session))

    def _meddle(self, session: SessionId) -> None:
        """While it generates, perhaps: a clone works, a rewind does not, a close ends it."""
        if session not in self._sessions:
            return
        now = self._clock.now_us
        what = self._rng.choice(("clone", "close", "submit"))
        if what == "clone":
            ticket = self._ticket(lambda answer: self._cloned_while_generating(session, answer))
            self._post(CloneSession(at_us=now, ticket=ticket, source=session))
        elif what == "close":
            del self._sessions[session]
            self._post(CloseSession(at_us=now, ticket=self._ticket(self._closed), session=session))
        else:
            self._submit(self._remember([], (1, 2), self._options(), lambda: None, SessionId(10**6)))

    def _closed(self, answer: SessionAnswer) -> None:
        self._later(self._open_session)

    def _cloned(self, source: SessionId, history: list[int], upto: int | None, answer: SessionAnswer) -> None:
        if answer.session is None:
            assert isinstance(answer.error, AtCapacity | BadInput | UnknownId)
            return
        assert source in self._sessions
        assert upto is None or answer.length == upto
        self._sessions[answer.session] = history[: answer.length]
        self._next_turn(answer.session)

    def _cloned_while_generating(self, source: SessionId, answer: SessionAnswer) -> None:
        if answer.session is None:
            assert isinstance(answer.error, AtCapacity | UnknownId)
            return
        under_way = [a for a in self._asked.values() if a.session == source and not a.over]
        said = self._sessions[source]
        for a in under_way:
            said = [*a.history, *a.prompt, *a.oracle[: a.next]]
        self._sessions[answer.session] = said[: answer.length]
        self._next_turn(answer.session)

    def _rewound(self, session: SessionId, history: list[int], position: int, answer: SessionAnswer) -> None:
        if answer.error is None:
            assert answer.length == position
            del history[position:]
        else:
            assert isinstance(answer.error, BadInput | WrongState | UnknownId)

    def _ticket(self, answered: Callable[[SessionAnswer], None]) -> int:
        self._tickets_issued += 1
        self._tickets[self._tickets_issued] = answered
        return self._tickets_issued

    def _when(self, delay_us: int) -> int:
        """A crowd waits for the next round moment."""
        return delay_us if not self._plot.crowded else delay_us + -(self._clock.now_us + delay_us) % CROWD_US

    def _later(self, act: Callable[[], None]) -> None:
        era = self._era
        delay_us = self._when(self._rng.randrange(1, 20_000))
        self._clock.after(delay_us, lambda: act() if era == self._era else None)

    # --- a driver that dies ---

    def driver_lost(self) -> None:
        """Streams are broken; sessions are given up, their callers begin anew."""
        self._era += 1
        self._tickets.clear()
        for asked in self._asked.values():
            asked.broken = not asked.over

    def ask_again(self, control: Control) -> None:
        """What the new driver found goes on by itself; the rest is asked again."""
        for session in [s.id for s in control._sessions._by_id.values() if s.opened]:
            self._post(
                CloseSession(at_us=self._clock.now_us, ticket=self._ticket(lambda answer: None), session=session)
            )
        turns = len(self._sessions)
        self._sessions.clear()
        for asked in [a for a in self._asked.values() if a.broken]:
            if asked.session is None and not asked.over:
                asked.next = asked.prompt_next = 0
                self._submit(asked)
            elif not asked.over:
                asked.finish = FinishReason.CANCELLED
        for _ in range(min(turns, 2)):
            self._later(self._open_session)

    def _close(self, session: SessionId) -> None:
        ticket = self._ticket(lambda answer: None)
        self._post(CloseSession(at_us=self._clock.now_us, ticket=ticket, session=session))

    def close_all(self) -> None:
        for session in list(self._sessions):
            self._post(
                CloseSession(at_us=self._clock.now_us, ticket=self._ticket(lambda answer: None), session=session)
            )
        self._sessions.clear()
