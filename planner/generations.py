"""One generation: what was asked, how far it is, and whether the next token ends it.

Owns the numbers of one client call. Its tokens lie in its session's transcript; where they are computed is a
`Resident`'s business. Positions and counts are tokens, times are the driver's microseconds.
"""

import math
from dataclasses import replace
from enum import Enum

from microtome.planner.errors import BadInput
from microtome.planner.sessions import Session
from microtome.planner.types import FinishReason, GenerationId, GenerationOptions, SamplingParams

Rank = tuple[int, int]  # smaller is more senior: (submission - priority * ageing, arrival)

MAX_PRIORITY = 1000  # either way: what a rank can weigh
SEEDS = 2**64
MAX_COUNT = 2**32 - 1  # of tokens that a caller may name
MAX_LOGPROBS = 20  # likeliest tokens to report beside one


class State(Enum):
    SETTLING = "settling"  # its session's last generation still has a step under way
    WAITING = "waiting"  # in line for its first step
    RUNNING = "running"  # its session has a place on a worker
    RETURNING = "returning"  # parked or moved: in line to be prefilled again
    ENDED = "ended"


class Generation:
    """Mutable; changed by `Control` and its parts only."""

    __slots__ = (
        "attempts",
        "base",
        "cached_tokens",
        "charged",
        "checked",
        "consumed",
        "delivered",
        "finish",
        "first_step_us",
        "first_token_us",
        "followers",
        "generated_from",
        "had_pending",
        "id",
        "leader",
        "limit",
        "moved",
        "needed",
        "options",
        "parked",
        "prompt_tokens",
        "rank",
        "reported",
        "sampling",
        "session",
        "state",
        "stop",
        "submitted_us",
    )

    def __init__(
        self,
        generation: GenerationId,
        session: Session,
        options: GenerationOptions,
        prompt_tokens: int,
        submitted_us: int,
        rank: Rank,
    ) -> None:
        self.id = generation
        self.session = session
        self.options = options
        self.sampling: SamplingParams = options.sampling
        self.prompt_tokens = prompt_tokens  # the caller's, without a pending token
        self.submitted_us = submitted_us
        self.rank = rank
        self.limit = options.max_new_tokens
        self.stop = frozenset(options.stop_token_ids)
        self.state = State.WAITING
        self.base = 0  # the session's committed length when it began
        self.had_pending = False  # the session had a token to be joined to the prompt
        self.generated_from = 0  # position of the first generated token
        self.reported = 0  # prompt positions [0, reported) need no log-probability, or their caller has it
        self.consumed = 0  # prompt positions [0, consumed) have been run, on whatever worker
        self.delivered = 0
        self.cached_tokens = 0
        self.attempts = 0  # failed steps it was in
        self.parked = 0  # times it gave up its cells for another
        self.moved = 0  # times it lost its worker, or left it
        self.finish: FinishReason | None = None
        self.leader: Generation | None = None  # of n completions: whose prompt's K/V this one clones
        self.first_step_us = 0
        self.first_token_us = 0
        self.needed = 0  # cells it lacked when it was last tried; 0: it was not
        self.followers: list[Generation] = []  # of n completions: those that wait for this one's prompt
        self.charged = False  # its tokens to its tenant
        self.checked = False  # its numbers against a worker's limits

    @property
    def policy_bytes(self) -> int:
        """What its policy takes in a message, at most."""
        s = self.sampling
        ids = len(s.allowed_tokens or ()) + len(s.banned_tokens) + len(s.stop_token_ids)
        return 5 * ids + 13 * len(s.logit_bias) + 128

    @property
    def runs_from(self) -> int | None:
        """Its prompt is to be run from this position on, cached or not: it is asked how likely what follows is.

        None: nothing is, or its caller has all of it.
        """
        if self.sampling.prompt_logprobs is None or self.reported >= self.generated_from:
            return None
        return max(0, self.reported - 1)


def policy_of(options: GenerationOptions, generated_from: int) -> SamplingParams:
    """How the tokens from `generated_from` on are drawn. What an earlier call has delivered counts as generated."""
    begin = generated_from - options.delivered_before
    return replace(options.sampling, prompt_tokens=begin, stop_token_ids=options.stop_token_ids)


def check_options(options: GenerationOptions) -> None:
    """Raise `BadInput` if the caller's numbers can never work, whatever the worker (J5, B6)."""
    if options.max_new_tokens < 1:
        raise BadInput(f"max_new_tokens {options.max_new_tokens} is below 1")
    if options.max_new_tokens > MAX_COUNT:
        raise BadInput(f"max_new_tokens {options.max_new_tokens} is above {MAX_COUNT}")
    if not -MAX_PRIORITY <= options.priority <= MAX_PRIORITY:
        raise BadInput(f"priority {options.priority} is not in {-MAX_PRIORITY} to {MAX_PRIORITY}")
    s = options.sampling
    if not 0 <= s.temperature < math.inf:
        raise BadInput(f"temperature {s.temperature:g} is not 0 or more")
    for name, count, most in (
        ("top_k", s.top_k, MAX_COUNT),
        ("min_new_tokens", s.min_new_tokens, MAX_COUNT),
        ("logprobs", s.logprobs or 0, MAX_LOGPROBS),
        ("prompt_logprobs", s.prompt_logprobs or 0, MAX_LOGPROBS),
    ):
        if not 0 <= count <= most:
            raise BadInput(f"{name} {count} is not in 0 to {most}")
    if not 0 < s.top_p <= 1:
        raise BadInput(f"top_p {s.top_p:g} is not above 0 and at most 1")
    if not 0 <= s.min_p <= 1:
        raise BadInput(f"min_p {s.min_p:g} is not in 0 to 1")
    if not 0 <= s.seed < SEEDS:
        raise BadInput(f"seed {s.seed} is not in 0 to {SEEDS - 1}")
    if not 0 < s.repetition_penalty < math.inf:
        raise BadInput(f"repetition_penalty {s.repetition_penalty:g} is not above 0")
    for name, penalty in (("presence", s.presence_penalty), ("frequency", s.frequency_penalty)):
        if not math.isfinite(penalty):
            raise BadInput(f"{name}_penalty {penalty:g} is not a finite number")
    if any(not math.isfinite(bias) for _, bias in s.logit_bias):
        raise BadInput("a logit bias is not a finite number")


def check_tokens(what: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    """Raise `BadInput` for a token that is not in the vocabulary (B9)."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong = next(t for t in tokens if not 0 <= t < vocab_size)
        raise BadInput(f"{what} {wrong} is not below the vocabulary size {vocab_size}")


def check_vocabulary(prompt: tuple[int, ...], options: GenerationOptions, vocab_size: int) -> None:
    """Raise `BadInput` if any token a caller named is not in the vocabulary (B9)."""
    s = options.sampling
    check_tokens("prompt token", prompt, vocab_size)
    check_tokens("stop token", options.stop_token_ids, vocab_size)
    check_tokens("banned token", s.banned_tokens, vocab_size)
    check_tokens("biased token", tuple(t for t, _ in s.logit_bias), vocab_size)
    if s.allowed_tokens is not None:
        check_tokens("allowed token", s.allowed_tokens, vocab_size)
        if not set(s.allowed_tokens) - set(s.banned_tokens):
            raise BadInput("no token is allowed: allowed_tokens minus banned_tokens is empty")
