"""Sessions under hypothesis: any order of turns, clones, rewinds, cancellations and losses, against a naive model.

The model knows of each session what was said, and nothing else: no cells, workers or steps.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput, WrongState
from microtome.planner.types import FinishReason
from tests.support.small_cluster import SmallCluster, expected

TOKENS = st.lists(st.integers(0, 999), min_size=1, max_size=7)


class SessionMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.cluster = SmallCluster(
            PlannerConfig(max_batch_tokens=8, max_decodes=3, max_prefill_tokens=4, headroom_tokens=0),
            usable_cells=60,
            max_sequences=3,
        )
        self.said: dict[int, list[int]] = {}
        self.turns: dict[int, tuple[str, list[int], list[int]]] = {}  # session → generation, prompt, what it will say

    # --- turns ---

    @rule(target=sessions)
    def open(self) -> int:
        session = self.cluster.open()
        assert session not in self.said
        self.said[session] = []
        return session

    @rule(session=sessions, prompt=TOKENS, count=st.integers(1, 6), stop=st.booleans())
    def turn(self, session: int, prompt: list[int], count: int, stop: bool) -> None:
        history = [*self.said[session], *prompt]
        tokens = expected(history, count)
        stops = (tokens[count // 2],) if stop else ()
        tokens = expected(history, count, stop=stops)
        busy = session in self.turns
        name = self.cluster.submit(prompt, count, session=session, stop_token_ids=stops)
        if busy:
            assert isinstance(self.cluster.error(name), WrongState)
        elif len(history) + count > 60:
            assert isinstance(self.cluster.error(name), BadInput)
        else:
            self.turns[session] = (name, prompt, tokens)

    @rule(session=sessions)
    def cancel(self, session: int) -> None:
        if session in self.turns:
            name = self.turns[session][0]
            self.cluster.cancel(name)
            if self.cluster.finish(name) is FinishReason.CANCELLED:
                self._cancelled(session)

    def _cancelled(self, session: int) -> None:
        """What was consumed and delivered stays; how much that is only the service knows."""
        name, prompt, tokens = self.turns.pop(session)
        delivered = self.cluster.tokens.get(name, [])
        before = self.said[session]
        now = self.cluster.transcript(session)
        if delivered:
            assert now == [*before, *prompt, *tokens[: len(delivered)]]
        else:
            assert now == [*before, *prompt][: len(now)]
            assert len(now) >= len(before)
        self.said[session] = now

    # --- other verbs ---

    @rule(target=sessions, source=sessions, share=st.floats(0, 1))
    def clone(self, source: int, share: float) -> int:
        length = self.cluster.length(source)
        upto = int(share * length)
        answer = self.cluster.clone(source, upto)
        assert answer.session is not None
        assert answer.length == upto
        self.said[answer.session] = self.cluster.transcript(source)[:upto]
        return answer.session

    @rule(session=sessions, share=st.floats(0, 1))
    def rewind(self, session: int, share: float) -> None:
        position = int(share * self.cluster.length(session))
        answer = self.cluster.rewind(session, position)
        if session in self.turns:
            assert isinstance(answer.error, WrongState)
        elif position == 0 and self.said[session]:
            assert isinstance(answer.error, BadInput)
        else:
            assert answer.error is None
            del self.said[session][position:]

    @rule(session=consumes(sessions))
    def close(self, session: int) -> None:
        assert self.cluster.close(session).error is None
        turn = self.turns.pop(session, None)
        if turn is not None:
            assert self.cluster.finish(turn[0]) in (FinishReason.CANCELLED, FinishReason.STOP, FinishReason.LENGTH)
        del self.said[session]

    # --- the world ---

    @precondition(lambda self: self.cluster.plans["w0"])
    @rule(steps=st.integers(1, 4))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.cluster.plans["w0"]:
                self.cluster.answer()

    @rule()
    def run(self) -> None:
        self.cluster.run()
        assert not self.turns or all(turn[0] in self.cluster.ends for turn in self.turns.values())

    @rule()
    def lose_the_worker(self) -> None:
        self.cluster.lose()
        self.cluster.join()

    @invariant()
    def what_was_said_is_what_is_remembered(self) -> None:
        for session, (name, prompt, tokens) in list(self.turns.items()):
            delivered = self.cluster.tokens.get(name, [])
            assert delivered == tokens[: len(delivered)]
            if name in self.cluster.ends:
                assert delivered == tokens
                del self.turns[session]
                self.said[session] = [*self.said[session], *prompt, *tokens]
        for session, said in self.said.items():
            if session not in self.turns:
                assert self.cluster.transcript(session) == said
                assert len(said) - 1 <= self.cluster.length(session) <= len(said)

    def teardown(self) -> None:
        for session in list(self.said):
            self.cluster.close(session)
        self.cluster.run()
        assert self.cluster.cells_used() == 0
        assert self.cluster.executors["w0"].snapshot() == ()


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
