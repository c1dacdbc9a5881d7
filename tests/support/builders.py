"""Inputs and method tables in few words: a call names only what matters to its test."""

from microtome.planner.types import Input, Kind, MethodSpec, MethodTable, Position, SessionId


def decode(session: int, start: int = 0, *, wants_output: bool = True) -> Input:
    return Input(
        session=SessionId(session), kind=Kind.DECODE, start=Position(start), width=1, wants_output=wants_output
    )


def prefill(session: int, width: int, start: int = 0, *, wants_output: bool = False) -> Input:
    return Input(
        session=SessionId(session), kind=Kind.PREFILL, start=Position(start), width=width, wants_output=wants_output
    )


def chunks(session: int, *widths: int, start: int = 0) -> list[Input]:
    """A prompt in chunks; the last one asks for output."""
    inputs: list[Input] = []
    for number, width in enumerate(widths, 1):
        inputs.append(prefill(session, width, start, wants_output=number == len(widths)))
        start += width
    return inputs


def static(width: int, cost_us: int = 0) -> MethodSpec:
    return MethodSpec(name=f"forward_{width}", max_tokens=width, static=True, cost_us=cost_us)


def dynamic(most: int, least: int = 1, cost_us: int = 0, cost_ns_per_token: int = 0) -> MethodSpec:
    return MethodSpec(
        name="forward_others",
        max_tokens=most,
        static=False,
        min_tokens=least,
        cost_us=cost_us,
        cost_ns_per_token=cost_ns_per_token,
    )


def ladder(*methods: MethodSpec) -> MethodTable:
    """A table in the right order: by width, a static method before a dynamic one of the same width."""
    return MethodTable(tuple(sorted(methods, key=lambda method: (method.max_tokens, not method.static))))
