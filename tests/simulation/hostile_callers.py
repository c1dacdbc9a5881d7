"""Callers that mean no good: they cancel, rewind and say something else at once, reuse names, and send nonsense.

Nothing waits for anything: a session is rewound, cloned, closed and submitted to while what it was asked before is
under way. What may be delivered is known all the same, so every token is compared, and every accepted name has to end
exactly once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from microtome.planner.control import Control
from microtome.planner.events import (
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    Event,
    Instruction,
    LookUpSession,
    OpenSession,
    RewindSession,
    SessionAnswer,
    Submit,
)
from microtome.planner.types import GenerationId, GenerationOptions, SamplingParams, SessionId
from tests.simulation.callers import Asked

_NOBODY = SessionId(999_999)
_FEW_TOKENS = 4  # in prompts: they share prefixes, and a wrong one looks like a right one


class HostileCallers:
    def __init__(
        self, rng: Random, control: Control, vocab: int, usable_cells: int, post: Callable[[Event], list[Instruction]]
    ) -> None:
        self._rng = rng
        self._control = control
        self._vocab = vocab
        self._usable_cells = usable_cells
        self._post = post
        self._asked: dict[GenerationId, Asked] = {}  # the newest of each name
        self._sessions: list[SessionId] = []
        self._names = 0

    def act(self, now_us: int) -> None:
        choice = self._rng.random()
        if choice < 0.45:
            session = self._rng.choice([*self._sessions, _NOBODY]) if self._rng.random() < 0.6 else None
            self._submit(now_us, session)
        elif choice < 0.62:
            open_names = self.unfinished()
            stray = GenerationId(f"g{self._rng.randrange(999)}")
            name = self._rng.choice(open_names) if open_names and self._rng.random() < 0.8 else stray
            self._post(Cancel(at_us=now_us - self._rng.choice((0, 50)), generation=name))
        elif choice < 0.69 or not self._sessions:
            self._keep(self._post(OpenSession(at_us=now_us, ticket=1)))
        elif choice < 0.74:
            upto = self._rng.choice((None, 0, 1, self._rng.randrange(-1, 20)))
            source = self._rng.choice(self._sessions)
            self._keep(self._post(CloneSession(at_us=now_us, ticket=1, source=source, upto=upto)))
        elif choice < 0.96:
            busy = [s for s in self._sessions if self._control._sessions.get(s).generation is not None]
            some = busy if busy and self._rng.random() < 0.4 else self._sessions
            self._change_its_mind(now_us, self._rng.choice(some))
        else:
            self.close(now_us, self._sessions[self._rng.randrange(len(self._sessions))])

    def close(self, now_us: int, session: SessionId) -> None:
        self._sessions.remove(session)
        self._post(CloseSession(at_us=now_us, ticket=1, session=session))

    def close_all(self, now_us: int) -> None:
        for session in list(self._sessions):
            self.close(now_us, session)

    def unfinished(self) -> list[GenerationId]:
        return [name for name, asked in self._asked.items() if not asked.over]

    def check_answers(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Deliver):
                asked = self._asked[instruction.generation]
                asked.receive(instruction)
                if asked.over and asked.session in self._control._sessions:
                    session = self._control._sessions.get(asked.session)
                    if session.generation is None:
                        asked.check_transcript(session.transcript, session.length)

    def _keep(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SessionAnswer) and instruction.session is not None:
                self._sessions.append(instruction.session)

    def _change_its_mind(self, now_us: int, session: SessionId) -> None:
        """Cancel what a session generates, rewind it, say something else, each perhaps: all at one instant."""
        self._look_up(now_us, session)
        generation = self._control._sessions.get(session).generation
        if generation is not None and self._rng.random() < 0.8:
            self._post(Cancel(at_us=now_us, generation=generation.id))
        if self._rng.random() < 0.6:
            position = self._rng.choice((0, 1, 2, self._rng.randrange(-1, 20)))
            self._post(RewindSession(at_us=now_us, ticket=1, session=session, position=position))
        if self._rng.random() < 0.7:
            self._submit(now_us, session)

    def _look_up(self, now_us: int, session: SessionId) -> None:
        """What has expired by now has ended after this: what is read of the session is what the next event finds."""
        self._post(LookUpSession(at_us=now_us, ticket=1, session=session))

    def _submit(self, now_us: int, session: SessionId | None) -> None:
        rng = self._rng
        self._look_up(now_us, _NOBODY if session is None else session)
        self._names += 1
        name = GenerationId(f"g{self._names}")
        prompt = self._prompt()
        options = self._options(now_us, alone=session is None)
        siblings: list[tuple[GenerationId, int]] = []
        if rng.random() < (0.15 if session is None else 0.3):
            count = rng.choice((1, 2, 5))
            siblings = [(GenerationId(f"{name}-{k}"), rng.randrange(100)) for k in range(count)]
        if rng.random() < 0.02:
            siblings *= 2
        if rng.random() < 0.04 and self._asked:
            used = rng.choice(list(self._asked))
            if rng.random() < 0.5:
                name = used
            else:
                siblings.append((used, 1))
        if name not in self._asked or self._asked[name].over:  # else the event is dropped, and nothing is to come
            history: list[int] = []
            context = None
            if session is not None and session in self._control._sessions:
                known = self._control._sessions.get(session)
                history = list(known.transcript)
                context = self._control._entrance._context(known.model)
            for one, seed in ((name, options.sampling.seed), *siblings):
                if one not in self._asked or self._asked[one].over:
                    length = len(history) + len(prompt)
                    policy = replace(options.sampling, seed=seed, prompt_tokens=length)
                    own = replace(options, sampling=policy)
                    place = session if one == name else None
                    self._asked[one] = Asked(one, history, prompt, own, lambda: None, place, self._vocab, context)
        self._post(
            Submit(
                at_us=now_us,
                generation=name,
                prompt=prompt,
                options=options,
                session=session,
                siblings=tuple(siblings),
            )
        )

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        length = rng.choice((1, 2, 3, 5, 8, rng.randrange(1, self._usable_cells + 3)))
        prompt = tuple(rng.randrange(_FEW_TOKENS) for _ in range(length))
        nonsense = rng.random()
        if nonsense < 0.02:
            return ()
        if nonsense < 0.04:
            return (*prompt, self._vocab)
        if nonsense < 0.06:
            return (*prompt, -1)
        return prompt * 200 if nonsense < 0.07 else prompt

    def _options(self, now_us: int, *, alone: bool) -> GenerationOptions:
        rng = self._rng
        return GenerationOptions(
            max_new_tokens=rng.choice((1, 2, 5, 9, rng.randrange(-1, self._usable_cells + 3))),
            stop_token_ids=tuple(rng.sample(range(self._vocab), rng.choice((0, 0, 1, 3)))),
            priority=rng.choice((0, 0, 0, 5, -5, 1000, 1001 if rng.random() < 0.1 else 1)),
            tenant=rng.choice(("", "a", "b")),
            cache_salt=rng.choice(("", "", "z")) if alone else "",
            deadline_us=None if rng.random() < 0.8 else now_us + rng.choice((-5, 0, 100, 5000, 10**15)),
            ttft_target_us=None if rng.random() < 0.9 else rng.choice((-1, 0, 100, 10**9)),
            sampling=SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.choice((0, 5, 2**64 - 1))),
        )
