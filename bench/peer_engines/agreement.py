"""Whether two engines answered with the same tokens, and where they part first. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parting:
    """Two engines' tokens are the same up to `position` of a request's output and differ there."""

    request: int
    position: int
    ours: int
    theirs: int


def partings(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Parting]:
    """One for each request whose tokens differ, the earliest position first. Lengths were found equal before."""
    found = []
    for request, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        for position, (a, b) in enumerate(zip(own, other, strict=True)):
            if a != b:
                found.append(Parting(request, position, a, b))
                break
    return sorted(found, key=lambda parting: (parting.position, parting.request))
