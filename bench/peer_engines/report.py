"""What was measured, as Markdown tables and as a value for a JSON file. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.peer_engines.figures import MEASURES, Spread, speed_ratios, spread, spreads
from bench.peer_engines.limits import Demand
from bench.peer_engines.roster import OURS, OURS_INT8, OURS_SERVED
from bench.peer_engines.rounds import Entrant, Measured

# Columns of a table: their heading, and the measures in them.
COLUMNS = (
    ("W1 output tok/s", (("W1", "output"),)),
    ("W1 TTFT p50, p99 ms", (("W1", "TTFT p50"), ("W1", "TTFT p99"))),
    ("W1 ITL p50, p99 ms", (("W1", "ITL p50"), ("W1", "ITL p99"))),
    ("W2 decode tok/s", (("W2", "decode"),)),
    ("W3 prefill tok/s", (("W3", "prefill"),)),
    ("W4 s", (("W4", "time"),)),
    ("W4p s", (("W4p", "time"),)),
)
DIGITS = {(measure.work, measure.name): measure.digits for measure in MEASURES}
W3_TOKENS = 1024
OF_ONE_RUN = {
    "model",
    "-m",
    "host",
    "--host",
    "port",
    "--port",
    "service.name",
    "service.port",
}  # they say nothing later


@dataclass(frozen=True)
class Agreement:
    """Of ours and a peer's tokens, greedy, over the works of the first round."""

    peer: str
    requests: int
    equal: int
    first_position: int | None  # of the earliest parting, counted in output tokens; None: all are equal
    largest_lead: float | None  # of ours' likeliest token over the second, where they part; None: not looked at


@dataclass(frozen=True)
class Share:
    """How near to the machine's limit ours comes."""

    engine: str
    decode_limit: float  # tokens/s
    decode_share: Spread
    prefill_limit: float
    prefill_share: Spread


@dataclass(frozen=True)
class Part:
    """All of one dtype."""

    measured: Measured
    shares: Sequence[Share]
    agreements: Sequence[Agreement]

    @property
    def there(self) -> list[Entrant]:
        return [entrant for entrant in self.measured.entrants if entrant.rounds]

    @property
    def ours(self) -> list[Entrant]:
        return [entrant for entrant in self.there if entrant.engine.name in (OURS, OURS_SERVED, OURS_INT8)]


def part_of(measured: Measured, demand: Demand, agreements: Sequence[Agreement]) -> Part:
    """With ours' shares of the limits that were measured in the same rounds."""
    decode = [limit["read_bytes_per_s"] / demand.decode_bytes(measured.dtype) for limit in measured.limits]
    per_token = demand.prefill_operations(W3_TOKENS) / W3_TOKENS
    prefill = [limit["operations_per_s"] / per_token for limit in measured.limits]
    bare = Part(measured, (), agreements)
    found = [
        Share(
            own.engine.title,
            spread(decode).median,
            spread([one["W2"]["decode"] / most for one, most in zip(own.rounds, decode, strict=True)]),
            spread(prefill).median,
            spread([one["W3"]["prefill"] / most for one, most in zip(own.rounds, prefill, strict=True)]),
        )
        for own in bare.ours
        if own.engine.name != OURS_INT8 and {"W2", "W3"} <= own.rounds[0].keys()  # it reads other bytes
    ]
    return replace(bare, shares=found)


def markdown(title: str, facts: Sequence[str], parts: Sequence[Part]) -> str:
    lines = [f"# {title}", "", *facts, ""]
    for part in parts:
        rounds = len(part.measured.limits)
        lines += [f"## {part.measured.dtype}, {rounds} round{'s' if rounds > 1 else ''}", ""]
        lines += [*_figures(part.there), ""]
        for own in part.ours:
            if len(part.there) > 1:
                lines += [f"{own.engine.title}, times as fast as:", "", *_ratios(own, part.there), ""]
        if part.shares:
            lines += [*map(_share, part.shares), ""]
        if part.agreements:
            lines += ["Tokens of ours in process beside the others':", "", *_agreements(part.agreements), ""]
        if gone := [entrant for entrant in part.measured.entrants if entrant.out]:
            lines += ["Not measured:", "", *(f"- {one.engine.title}: {one.out}" for one in gone), ""]
    settings = [line for part in parts for line in _settings(part)]
    return "\n".join([*lines, "## Versions and settings", "", *settings, ""])


def _figures(entrants: Sequence[Entrant]) -> Iterator[str]:
    yield "| engine | " + " | ".join(heading for heading, _ in COLUMNS) + " | cores busy |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for entrant in entrants:
        found = spreads(entrant.rounds)
        busy = spread([cores["busy"] for cores in entrant.cores]).median
        yield f"| {entrant.engine.title} | {' | '.join(_cells(found))} | {busy:.2f} |"


def _ratios(own: Entrant, entrants: Sequence[Entrant]) -> Iterator[str]:
    yield "| | " + " | ".join(heading.rsplit(" ", 1)[0] for heading, _ in COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for peer in entrants:
        if peer is not own:
            found = speed_ratios(own.rounds, peer.rounds)
            yield f"| {peer.engine.title} | {' | '.join(_cells(found, 2))} |"


def _cells(found: Mapping[tuple[str, str], Spread], digits: int | None = None) -> Iterator[str]:
    for _, keys in COLUMNS:
        told = [found[key].told(DIGITS[key] if digits is None else digits) for key in keys if key in found]
        yield ", ".join(told) or "–"


def _share(share: Share) -> str:
    return (
        f"- {share.engine}: W2 at {share.decode_share.told(2)} of the {share.decode_limit:.0f} tok/s at which the "
        f"weights can be read; W3 at {share.prefill_share.told(2)} of the {share.prefill_limit:.0f} tok/s at which "
        "large matrices are multiplied"
    )


def _agreements(agreements: Sequence[Agreement]) -> Iterator[str]:
    yield "| peer | requests with equal tokens | first difference at output token | our lead there at most |"
    yield "|---|---|---|---|"
    for one in agreements:
        first = "none" if one.first_position is None else str(one.first_position)
        lead = "–" if one.largest_lead is None else f"{one.largest_lead:.1e}"
        yield f"| {one.peer} | {one.equal} of {one.requests} | {first} | {lead} |"


def _settings(part: Part) -> Iterator[str]:
    for entrant in part.there:
        versions = ", ".join(f"{name} {said}" for name, said in entrant.facts.items() if isinstance(said, str))
        settings = ", ".join(f"{name} {said}" for name, said in _kept(entrant.facts)["settings"].items())
        yield f"- {entrant.engine.title}, {part.measured.dtype}: {versions}; {settings}"


def _kept(facts: Mapping[str, Any]) -> dict[str, Any]:
    settings = facts.get("settings", {})
    return {**facts, "settings": {name: said for name, said in settings.items() if name not in OF_ONE_RUN}}


def as_value(facts: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """For a JSON file: every round's figures, their spreads, and ratios."""
    return {**facts, "dtypes": {part.measured.dtype: _part_value(part) for part in parts}}


def _part_value(part: Part) -> dict[str, Any]:
    return {
        "engines": {
            entrant.engine.name: {
                "title": entrant.engine.title,
                "out": entrant.out,
                "facts": _kept(entrant.facts),
                "start_s": entrant.start_s,
                "rounds": entrant.rounds,
                "cores": entrant.cores,
                "spreads": _named(spreads(entrant.rounds)) if entrant.rounds else {},
            }
            for entrant in part.measured.entrants
        },
        "times_as_fast": {
            own.engine.name: {
                peer.engine.name: _named(speed_ratios(own.rounds, peer.rounds))
                for peer in part.there
                if peer is not own
            }
            for own in part.ours
        },
        "limits": list(part.measured.limits),
        "shares": [asdict(share) for share in part.shares],
        "tokens": [asdict(one) for one in part.agreements],
    }


def _named(found: Mapping[tuple[str, str], Spread]) -> dict[str, Any]:
    return {f"{work} {name}": asdict(one) for (work, name), one in found.items()}
