"""How often, and after how long, a call that failed safely is tried again."""

from dataclasses import dataclass

__all__ = ["Retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A call is tried again only when that is safe: nobody answered, or the service was unavailable and the call may be
    made twice. A stream that has brought tokens is never started over; it is resumed from the last of them.

    The wait before attempt n + 1 is drawn from the upper half of `first_s * 2 ** (n - 1)`, `most_s` at most, so that
    clients which failed together do not return together.
    """

    attempts: int = 4  # the first one included; 1: never try again
    # Of going on with a stream that broke, each time one breaks; the break itself is the first. 32 take half a minute
    # to a minute: a service whose driver was killed is back by then, on a slow machine too.
    resume_attempts: int = 32
    first_s: float = 0.1
    most_s: float = 2.0

    def __post_init__(self) -> None:
        for name, number in (("attempts", self.attempts), ("resume_attempts", self.resume_attempts)):
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, not {number}")
        if not 0 < self.first_s <= self.most_s:
            raise ValueError(f"first_s must be above 0 and at most most_s ({self.most_s:g}), not {self.first_s:g}")

    def wait_s(self, failed_attempts: int, share: float) -> float:
        """Seconds to wait after the `failed_attempts`-th failure, 1 or more; `share` in [0, 1) places the draw."""
        longest = min(self.first_s * 2.0 ** min(failed_attempts - 1, 30), self.most_s)
        return longest * (1 + share) / 2
