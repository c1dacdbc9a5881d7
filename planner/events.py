"""What can happen (events), and what to do about it (instructions): everything that crosses `Control`'s border.

Events carry the time at which they happened (`at_us`): `Control` has no clock of its own. Both are plain values, so a
cluster's whole life can be written down and run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from microtome.planner.errors import BatchingError
from microtome.planner.scaling import ScalingConfig
from microtome.planner.types import (
    Capability,
    FinishReason,
    GenerationId,
    GenerationOptions,
    Incarnation,
    SequenceSnapshot,
    SessionId,
    StepNumber,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Usage,
    WorkerId,
)

# --- events: about workers ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker can be planned for. `held` is what it holds already: not empty after a restart of the driver."""

    at_us: int
    worker: WorkerId
    capability: Capability
    held: tuple[SequenceSnapshot, ...] = ()
    last_step: StepNumber = StepNumber(0)  # the newest step it has run in this incarnation
    revision: int = 0  # of the settings it was started with


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """The worker died, hung or was given up; its incarnation is fenced and never answers again."""

    at_us: int
    worker: WorkerId
    incarnation: Incarnation
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDraining:
    """No new sessions on it; those it has move away. `deadline_us`: by when, if that is before the configured time."""

    at_us: int
    worker: WorkerId
    deadline_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlaced:
    """A worker that was asked for has its place, and loads."""

    at_us: int
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStartFailed:
    """A worker that was asked for will not come."""

    at_us: int
    worker: WorkerId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From now on there are as many workers as the load wants, within bounds; `count` of them to begin with.

    Before the first such event `Control` starts and drains none by itself.
    """

    at_us: int
    scaling: ScalingConfig
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallersWait:
    """So many calls cannot be checked before a worker has said what is served."""

    at_us: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWorkers:
    """Put a worker with the settings of `revision` in the place of each one with older settings.

    `surge`: the new one first, then the old one drains; else the old one's place is given up first. `tried`: workers
    have run with these settings before, so it is not taken back when the first one fails to start.
    """

    at_us: int
    revision: int
    surge: bool = True
    tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    at_us: int
    worker: WorkerId
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """`refused`: nothing was touched. Otherwise the worker's state is unknown."""

    at_us: int
    worker: WorkerId
    incarnation: Incarnation
    step: StepNumber
    refused: bool
    message: str


# --- events: about generations and sessions ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A caller wants tokens after `prompt`. `session` None: a session of its own, closed at the end.

    `n` completions: the first answers as `generation`, the others as `siblings`.
    """

    at_us: int
    generation: GenerationId
    prompt: tuple[int, ...]
    options: GenerationOptions
    session: SessionId | None = None
    siblings: tuple[tuple[GenerationId, int], ...] = ()  # (generation, seed) of the further completions
    fingerprint: str = ""  # of the model whose tokens these are; empty: of the one that is served


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End the generation. `keep`: it ended behind so many of its tokens, at a text to stop at; the others are void."""

    at_us: int
    generation: GenerationId
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    at_us: int
    ticket: int  # the caller's; comes back in the `SessionAnswer`
    tenant: str = ""
    cache_salt: str = ""
    life: int = 0  # of the driver that asks: tells its sessions from those of its earlier lives, see `Sessions`


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneSession:
    at_us: int
    ticket: int
    source: SessionId
    upto: int | None = None  # None: everything committed
    life: int = 0  # as of `OpenSession`


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSession:
    at_us: int
    ticket: int
    session: SessionId
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpSession:
    """How long is it? Changes nothing."""

    at_us: int
    ticket: int
    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    at_us: int
    ticket: int
    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Deadlines and hangs are found here."""

    at_us: int


SessionEvent = OpenSession | CloneSession | RewindSession | LookUpSession | CloseSession  # answered by `SessionAnswer`

Event = (
    WorkerJoined
    | WorkerGone
    | WorkerDraining
    | WorkerPlaced
    | WorkerStartFailed
    | Scale
    | CallersWait
    | UpdateWorkers
    | StepDone
    | StepFailed
    | Submit
    | Cancel
    | OpenSession
    | CloneSession
    | RewindSession
    | LookUpSession
    | CloseSession
    | Tick
)

# --- instructions ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Send the plan to the worker, behind those already sent."""

    worker: WorkerId
    plan: StepPlan


# Not frozen, though never changed: the driver builds one per token, and a frozen one takes five times as long to build.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Deliver:
    """Hand tokens to whoever listens. `offset` counts the tokens delivered before these. Never changed.

    `finish` ends the generation; `usage` comes with it, `error` with `FAILED` only.
    """

    generation: GenerationId
    offset: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: BatchingError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverStep:
    """One more token to each of these generations, none of which it ends: as many `Deliver`s, as columns.

    `logprobs`: empty, or one entry per token. The columns are never changed.
    """

    generations: list[GenerationId]
    offsets: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def deliveries(self) -> list[Deliver]:
        """The same, spelled out."""
        columns = zip(self.generations, self.offsets, self.tokens, strict=True)
        if not self.logprobs:
            return [Deliver(generation=name, offset=offset, tokens=(token,)) for name, offset, token in columns]
        return [
            Deliver(generation=name, offset=offset, tokens=(token,), logprobs=(beside,))
            for (name, offset, token), beside in zip(columns, self.logprobs, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverPrompt:
    """How likely the prompt's tokens from `offset` on are, each behind those before it. None: that is not known."""

    generation: GenerationId
    offset: int
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAnswer:
    """The answer to a session operation: the session concerned and its committed length, or the refusal."""

    ticket: int
    session: SessionId | None = None
    length: int = 0
    error: BatchingError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpWorker:
    """Fence this incarnation and end the process behind it: its state is unknown."""

    worker: WorkerId
    incarnation: Incarnation
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorker:
    """A drained worker holds no session any more, or one that was asked for is not wanted now: end its process."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker under this new name, with the settings of `revision`."""

    worker: WorkerId
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegun:
    """The worker was chosen to go. Its sessions move; `ReleaseWorker` follows."""

    worker: WorkerId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnded:
    """Every worker has the settings of `revision`; or, with an error, none has, and things are as before."""

    revision: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A generation that an earlier driver began goes on, found on a worker. What it has so far is delivered next."""

    generation: GenerationId
    prompt: tuple[int, ...]
    options: GenerationOptions
    fingerprint: str = ""  # of its model


Instruction = (
    RunStep
    | Deliver
    | DeliverStep
    | DeliverPrompt
    | SessionAnswer
    | GiveUpWorker
    | ReleaseWorker
    | StartWorker
    | DrainBegun
    | UpdateEnded
    | Restored
)


def spelled_out(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The same instructions with a `Deliver` for each delivery."""
    plain: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, DeliverStep):
            plain += instruction.deliveries()
        else:
            plain.append(instruction)
    return plain
