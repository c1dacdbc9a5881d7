"""The model that is served, and those that were and still have generations.

A worker brings its model: the first one settles what is served, one of an update brings another. A generation keeps
the model that its tokens are of.
"""

from microtome.planner.admission import WaitingLine
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import WrongState
from microtome.planner.served import Served
from microtome.planner.sessions import Session
from microtome.planner.types import Capability


class Models:
    """`served`, `replaced` and `every` are to be read; they change by `joined` and `forget` only."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self.served = self._another()
        self.replaced: tuple[Served, ...] = ()  # the oldest first
        self.every: tuple[Served, ...] = (self.served,)  # the served one last

    def of_submission(self, fingerprint: str, session: Session | None) -> Served:
        """Raises `WrongState` when the model that the tokens, or the session, are of is served no more."""
        if session is not None and session.transcript:
            if session.model not in self.every:
                raise WrongState(f"session {session.id} is of a model that is served no more")
            if fingerprint and session.model.fingerprint not in (None, fingerprint):
                raise WrongState(f"session {session.id} is of a model that was replaced")
            return session.model
        if not fingerprint or self.served.fingerprint in (None, fingerprint):
            return self.served
        found = next((served for served in self.replaced if served.fingerprint == fingerprint), None)
        if found is None:
            raise WrongState(f"the model {fingerprint[:16]} is served no more")
        return found

    def of_worker(self, fingerprint: str, revision: int) -> Served | None:
        """The model that a worker brings: a known one, or by an update another. None: it has no business here."""
        for served in (self.served, *self.replaced):
            if served.fingerprint in (None, fingerprint):
                return served
        return self._another() if revision != self.served.revision else None

    def joined(self, served: Served, capability: Capability, revision: int) -> None:
        """A worker with this model, which `of_worker` gave, has joined."""
        if served not in self.every:
            older = served  # after a restart of the driver one that was replaced may turn up
            if revision > self.served.revision:
                older, self.served = self.served, served
            self._replace((*self.replaced, older))
        served.fingerprint, served.vocab_size = capability.fingerprint, capability.vocab_size
        served.revision = max(served.revision, revision)
        served.cells, served.sequences = capability.usable_cells, capability.max_sequences

    def forget(self, served: Served) -> None:
        """A replaced one has neither workers nor generations."""
        self._replace(tuple(other for other in self.replaced if other is not served))

    def _replace(self, replaced: tuple[Served, ...]) -> None:
        self.replaced, self.every = replaced, (*replaced, self.served)

    def _another(self) -> Served:
        config = self._config
        return Served(WaitingLine(config.max_waiting, config.max_waiting_tokens, config.weights()))
