"""Where generations are, for people to read: one by one, and all in a table."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from microtome.answers import GenerationState, ListedGeneration, Whereabouts
from microtome.terminal import one_line

__all__ = ["queue_view", "sentence_of"]

_STYLES = {"running": "green", "waiting": "yellow", "returning": "yellow", "ended": "dim"}


def sentence_of(place: Whereabouts) -> str:
    """One completion in one line."""
    so_far = f"{place.output_tokens} tokens after {place.prompt_tokens}"
    if place.state is GenerationState.ENDED:
        facts = [f"ended: {place.finish_reason or 'failed'}", so_far]
    elif place.state is GenerationState.RUNNING:
        held_up = "" if place.waits_for == "nothing" else f", held up by {place.waits_for}"
        facts = [f"running on {one_line(place.worker) or 'a worker'}{held_up}", so_far]
    else:
        before = "next" if not place.position else f"{place.position} before it"
        facts = [f"{place.state}, {before}, for want of: {place.waits_for}", so_far]
    if place.predicted_ttft_s is not None:
        facts.append(f"first token in {place.predicted_ttft_s * 1e3:.0f} ms")
    for times, what in ((place.parked, "parked"), (place.moved, "moved")):
        if times:
            facts.append(f"{what} {times} {'time' if times == 1 else 'times'}")
    facts.append(f"{place.age_s:.1f} s old")
    return "; ".join(facts)


def queue_view(listed: Sequence[ListedGeneration]) -> RenderableType:
    """A row for each, in the order in which those that wait start."""
    if not listed:
        return Text("no generation waits or runs", "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("generation", "state", "waits for", "worker", "tenant"):
        table.add_column(name, overflow="fold")
    for name in ("place", "priority", "prompt", "output", "first token", "parked", "moved", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    several = {one.generation_id for one in listed if one.whereabouts.index}
    for one in listed:
        place = one.whereabouts
        name = one_line(one.generation_id) + (f" [{place.index}]" if one.generation_id in several else "")
        ttft = "" if place.predicted_ttft_s is None else f"{place.predicted_ttft_s * 1e3:.0f} ms"
        waits = place.state not in (GenerationState.RUNNING, GenerationState.ENDED)
        table.add_row(
            Text(name),
            Text(place.state, _STYLES.get(place.state, "")),
            "" if place.waits_for == "nothing" else place.waits_for,
            Text(one_line(place.worker)),
            Text(one_line(one.tenant)),
            str(place.position) if waits else "",
            str(one.priority),
            str(place.prompt_tokens),
            str(place.output_tokens),
            ttft,
            str(place.parked),
            str(place.moved),
            f"{place.age_s:.1f} s",
        )
    return table
