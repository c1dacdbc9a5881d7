"""The work every engine is given: the same token ids and lengths, from seeds.

Standard library only: it runs in every engine's environment.

- W1: 48 requests, prompts of 32 to 512 tokens (uniform in the logarithm), 32 to 128 tokens out, at most 16 in flight;
- W2: one request, 64 tokens in, 128 out;
- W3: one request, 1024 tokens in, 1 out;
- W4: 16 requests at once with the same 512 tokens in front of 32 of their own, 16 out;
- W4p: W4 behind a request with the same 512 tokens, whose own time does not count.

Lengths never change. Token ids are new in every turn, so that no engine finds an earlier turn's prompts in its cache:
within a turn of W4 alone is there anything to share. Ids are uniform over the vocabulary above its special tokens.
"""

import math
from dataclasses import dataclass
from random import Random

WORKS = ("W1", "W2", "W3", "W4", "W4p")
IN_FLIGHT = {"W1": 16, "W2": 1, "W3": 1, "W4": 16, "W4p": 16}
TOKEN_IDS = range(17, 49152)  # of SmolLM2: 0 to 16 are special
PREFIX_TOKENS = 512

_LENGTHS_SEED = 1234


@dataclass(frozen=True)
class Asked:
    """A request: exactly `new_tokens` tokens are to follow the prompt, whatever they are."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Load:
    """Requests in the order in which they are sent, at most `in_flight` unanswered; `first` are sent and answered
    before, untimed."""

    requests: tuple[Asked, ...]
    in_flight: int
    first: tuple[Asked, ...] = ()


def load(work: str, turn: str) -> Load:
    """The load of one turn; another turn's has other token ids and the same lengths."""
    random = Random(f"{work} {turn}")  # by its text, which Python promises to be stable

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.choice(TOKEN_IDS) for _ in range(count))

    first: tuple[Asked, ...] = ()
    if work == "W1":
        requests = [Asked(tokens(prompt), new) for prompt, new in mixed_lengths()]
    elif work == "W2":
        requests = [Asked(tokens(64), 128)]
    elif work == "W3":
        requests = [Asked(tokens(1024), 1)]
    elif work in ("W4", "W4p"):
        prefix = tokens(PREFIX_TOKENS)
        requests = [Asked(prefix + tokens(32), 16) for _ in range(16)]
        if work == "W4p":
            first = (Asked((*prefix, TOKEN_IDS[0]), 1),)
    else:
        raise ValueError(f"work {work!r} is none of {', '.join(WORKS)}")
    return Load(tuple(requests), IN_FLIGHT[work], first)


def mixed_lengths(count: int = 48) -> list[tuple[int, int]]:
    """W1's (tokens in, tokens out)."""
    random = Random(_LENGTHS_SEED)
    least, most = math.log(32), math.log(512)
    return [(round(math.exp(random.uniform(least, most))), random.randint(32, 128)) for _ in range(count)]
