"""When a generation's tokens arrived, as its client saw it. Told the times; reads no clock."""

import statistics
from dataclasses import dataclass, field

__all__ = ["Timing"]


@dataclass(slots=True)
class Timing:
    """Times are seconds of any one clock; results are milliseconds. `began_s`: when the call was made."""

    began_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, how many tokens came), none of them empty

    def note(self, at_s: float, tokens: int) -> None:
        """`tokens` arrived together. A message without tokens is no arrival."""
        if tokens:
            self.arrivals.append((at_s, tokens))

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def first_token_ms(self) -> float | None:
        """Time to first token; None: none came."""
        return (self.arrivals[0][0] - self.began_s) * 1e3 if self.arrivals else None

    @property
    def between_tokens_ms(self) -> list[float]:
        """Inter-token latency, one value for each token after the first message.

        Tokens that came together share the time since the message before in equal parts.
        """
        gaps: list[float] = []
        for (before_s, _), (at_s, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps.extend([(at_s - before_s) * 1e3 / tokens] * tokens)
        return gaps

    @property
    def mean_between_ms(self) -> float | None:
        gaps = self.between_tokens_ms
        return statistics.fmean(gaps) if gaps else None

    @property
    def median_between_ms(self) -> float | None:
        gaps = self.between_tokens_ms
        return statistics.median(gaps) if gaps else None

    @property
    def ended_s(self) -> float:
        """When the last token came; when the call was made, if none did."""
        return self.arrivals[-1][0] if self.arrivals else self.began_s
