"""The sampler once more, in plain Python over lists: what the device's is compared with, rule by rule."""

import math
from collections.abc import Sequence

from microtome.planner.types import SamplingParams

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _finalise(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def coin(seed: int, position: int) -> float:
    """The coin in [0, 1) of (seed, position)."""
    mixed = _finalise((seed + _GOLDEN) & _MASK)
    mixed = _finalise(mixed ^ (((position + 1) * _GOLDEN) & _MASK))
    return (mixed >> 11) * 2.0**-53


def edit(logits: Sequence[float], policy: SamplingParams, position: int, history: Sequence[int]) -> list[float]:
    """The logits after penalties, bias and bans."""
    edited = list(logits)
    generated = list(history[policy.prompt_tokens :])
    for token in set(history):
        factor = policy.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token in set(generated):
        edited[token] -= policy.presence_penalty + policy.frequency_penalty * generated.count(token)
    for token, bias in policy.logit_bias:
        edited[token] += bias
    forbidden = set(policy.banned_tokens)
    if policy.allowed_tokens is not None:
        forbidden |= set(range(len(edited))) - set(policy.allowed_tokens)
    if position - policy.prompt_tokens < policy.min_new_tokens:
        forbidden |= set(policy.stop_token_ids)
    for token in forbidden:
        edited[token] = -math.inf
    return list(logits) if max(edited) == -math.inf else edited


def draw(logits: Sequence[float], policy: SamplingParams, position: int) -> int:
    """The token at `position` under `policy`; `logits` are float32 numbers."""
    by_logit = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if policy.temperature <= 0:
        return by_logit[0]
    largest = logits[by_logit[0]]
    weights = [math.exp((logit - largest) / policy.temperature) for logit in logits]
    total = math.fsum(weights)
    kept = list(range(len(logits)))
    if 0 < policy.top_k < len(logits):
        kept = by_logit[: policy.top_k]
    elif 0 < policy.top_p < 1:
        kept, running = [], 0.0
        for token in by_logit:
            if running > policy.top_p * total:
                break
            kept.append(token)
            running += weights[token]
    elif policy.min_p > 0:
        kept = by_logit
    if policy.min_p > 0:
        kept = [token for token in kept if weights[token] >= policy.min_p]
    threshold = coin(policy.seed, position) * math.fsum(weights[token] for token in kept)
    running = 0.0
    for token in kept:
        running += weights[token]
        if running > threshold:
            return token
    return kept[-1]
