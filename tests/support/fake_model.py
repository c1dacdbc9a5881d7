"""A language model without weights: the next token is a function of (history, seed, position), in plain integers.

What a cell holds depends on its token, its position and on everything the cells before it hold, as K and V do in a
real model; the next token depends on every cell of the history. So a wrong, stale or foreign cell anywhere in a
sequence's row gives other tokens.
"""

from collections.abc import Sequence

from microtome.planner.types import SamplingParams, TokenLogprobs

_MASK = (1 << 61) - 1  # a Mersenne prime: sums stay small integers


def content(token: int, position: int, attended: int) -> int:
    """What one cell holds; `attended` is the sum of what the cells before it hold."""
    x = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + attended * 0x165667B19E3779F9 + 1) & (2**64 - 1)
    x ^= x >> 31
    return (x * 0xD6E8FEB86659FD93) & _MASK


def draw(attended: int, position: int, sampling: SamplingParams, generated: int, vocab_size: int) -> int:
    """The token at `position`, after a history whose cells sum to `attended`; greedy at temperature 0."""
    seed = sampling.seed + 1 if sampling.temperature > 0 else 0
    allowed = sampling.allowed_tokens or range(vocab_size)
    banned = set(sampling.banned_tokens)
    if generated < sampling.min_new_tokens:
        banned.update(sampling.stop_token_ids)
    x = content(seed, position, attended)
    for _ in range(4 * vocab_size):
        token = allowed[(x >> 17) % len(allowed)]
        if token not in banned:
            return token
        x = content(x, position, attended)
    raise AssertionError("every token is banned")


def logprobs_of(token: int, position: int, attended: int, count: int | None) -> TokenLogprobs | None:
    """How likely it is that `token` stands at `position`, after a history whose cells sum to `attended`."""
    if count is None:
        return None
    own = content(token, position, attended) % 1024
    return TokenLogprobs(-own / 64, tuple((token + i, -0.5 - i) for i in range(count)))


def generate(
    prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int, stop: Sequence[int], vocab_size: int
) -> list[int]:
    """What an undisturbed run delivers after `prompt`: the oracle of every test with faults."""
    attended = 0
    for position, token in enumerate(prompt):
        attended += content(token, position, attended)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        position = len(prompt) + len(tokens)
        token = draw(attended, position, sampling, position - sampling.prompt_tokens, vocab_size)
        tokens.append(token)
        if token in stop:
            break
        attended += content(token, position, attended)
    return tokens
