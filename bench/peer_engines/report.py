"""What was measured, as Markdown tables and as a value for a JSON file. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.peer_engines.figures import MEASURES, Spread, speed_ratios, spread, spreads
from bench.peer_engines.limits import Demand
from bench.peer_engines.roster import OURS, OURS_SERVED
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
    dtype: str
    decode_limit: float  # tokens/s
    decode_share: Spread
    prefill_limit: float
    prefill_share: Spread


def shares(measured: Measured, demand: Demand) -> list[Share]:
    """Ours ÷ the limit measured in the same round."""
    found = []
    for entrant in measured.entrants:
        if entrant.engine.name not in (OURS, OURS_SERVED) or not entrant.rounds:
            continue
        rounds, dtype = entrant.rounds, entrant.dtype
        if not {"W2", "W3"} <= rounds[0].keys():
            continue
        decode = [limit["read_bytes_per_s"] / demand.decode_bytes(dtype) for limit in measured.limits]
        per_token = demand.prefill_operations(W3_TOKENS) / W3_TOKENS
        prefill = [limit["operations_per_s"][dtype] / per_token for limit in measured.limits]
        found.append(
            Share(
                entrant.engine.name,
                dtype,
                spread(decode).median,
                spread([one["W2"]["decode"] / most for one, most in zip(rounds, decode, strict=True)]),
                spread(prefill).median,
                spread([one["W3"]["prefill"] / most for one, most in zip(rounds, prefill, strict=True)]),
            )
        )
    return found


def markdown(
    title: str, facts: Sequence[str], measured: Measured, limits: Sequence[Share], agreements: Sequence[Agreement]
) -> str:
    lines = [f"# {title}", "", *facts, ""]
    for dtype in dict.fromkeys(entrant.dtype for entrant in measured.entrants):
        there = [entrant for entrant in measured.entrants if entrant.dtype == dtype and entrant.rounds]
        lines += [f"## {dtype}", "", *_figures(there), ""]
        for name in (OURS, OURS_SERVED):
            own = next((entrant for entrant in there if entrant.engine.name == name), None)
            if own is not None and len(there) > 1:
                lines += [f"{own.engine.title}, times as fast as:", "", *_ratios(own, there), ""]
        own_limits = [share for share in limits if share.dtype == dtype]
        if own_limits:
            lines += [*_limits(own_limits), ""]
    if agreements:
        lines += ["## Tokens, float32, greedy", "", *_agreements(agreements), ""]
    lines += ["## Versions and settings", "", *_settings(measured.entrants), ""]
    if gone := [entrant for entrant in measured.entrants if entrant.out]:
        lines += ["## Not measured", "", *(f"- {entrant.key}: {entrant.out}" for entrant in gone), ""]
    return "\n".join(lines)


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


def _limits(limits: Sequence[Share]) -> Iterator[str]:
    for share in limits:
        yield (
            f"- {share.engine}: W2 at {share.decode_share.told(2)} of the {share.decode_limit:.0f} tok/s at which the "
            f"weights can be read; W3 at {share.prefill_share.told(2)} of the {share.prefill_limit:.0f} tok/s at which "
            f"large matrices are multiplied"
        )


def _settings(entrants: Sequence[Entrant]) -> Iterator[str]:
    for entrant in entrants:
        if entrant.rounds:
            versions = ", ".join(f"{name} {said}" for name, said in entrant.facts.items() if isinstance(said, str))
            settings = ", ".join(f"{name} {said}" for name, said in entrant.facts.get("settings", {}).items())
            yield f"- {entrant.key}: {versions}; {settings}"


def _agreements(agreements: Sequence[Agreement]) -> Iterator[str]:
    yield "| peer | requests with equal tokens | first difference at output token | our lead there at most |"
    yield "|---|---|---|---|"
    for one in agreements:
        first = "none" if one.first_position is None else str(one.first_position)
        lead = "–" if one.largest_lead is None else f"{one.largest_lead:.1e}"
        yield f"| {one.peer} | {one.equal} of {one.requests} | {first} | {lead} |"


def as_value(
    facts: Mapping[str, Any], measured: Measured, limits: Sequence[Share], agreements: Sequence[Agreement]
) -> dict[str, Any]:
    """For a JSON file: every round's figures, their spreads, and ratios."""
    ratios: dict[str, dict[str, dict[str, Any]]] = {}
    for own in measured.entrants:
        if own.engine.name in (OURS, OURS_SERVED) and own.rounds:
            for peer in measured.entrants:
                if peer is not own and peer.dtype == own.dtype and peer.rounds:
                    found = speed_ratios(own.rounds, peer.rounds)
                    ratios.setdefault(own.key, {})[peer.key] = _named(found)
    return {
        **facts,
        "engines": {
            entrant.key: {
                "title": entrant.engine.title,
                "out": entrant.out,
                "facts": entrant.facts,
                "start_s": entrant.start_s,
                "rounds": entrant.rounds,
                "cores": entrant.cores,
                "spreads": _named(spreads(entrant.rounds)) if entrant.rounds else {},
            }
            for entrant in measured.entrants
        },
        "times_as_fast": ratios,
        "limits": {"rounds": list(measured.limits), "shares": [asdict(share) for share in limits]},
        "tokens": [asdict(one) for one in agreements],
    }


def _named(found: Mapping[tuple[str, str], Spread]) -> dict[str, Any]:
    return {f"{work} {name}": asdict(one) for (work, name), one in found.items()}
