"""What a restarted driver makes of a sequence that a worker holds: a session, and the generation on it, as they were.

A snapshot has the tokens that were run, the one sampled last, the policy, and the driver's own note. All of a
generation but the rest of an unfinished prompt can be read from those; one that was still in its prompt has delivered
nothing, and its caller asks again. Tokens sampled after a stop, or beyond the limit, were never delivered and are cut.
"""

from dataclasses import dataclass

from microtome.planner.errors import BadInput
from microtome.planner.notes import Note, decode_note
from microtome.planner.types import FinishReason, GenerationOptions, SequenceSnapshot, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    note: Note
    transcript: list[int]
    options: GenerationOptions | None  # None: the session is idle
    finish: FinishReason | None  # the generation was over, and nobody had told the worker
    sampled: bool  # the transcript's last token is on the device, sampled last
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # what the worker has kept, of the tokens from `logprobs_from` on
    logprobs_from: int = 0

    def reported(self, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        """Of the tokens in [start, end), as far as it is kept."""
        kept, first = self.logprobs, self.logprobs_from
        return tuple([kept[at - first] if 0 <= at - first < len(kept) else None for at in range(start, end)])


def read_snapshot(snapshot: SequenceSnapshot) -> Found | None:
    """None: nothing can be made of it, and it is to be dropped."""
    try:
        note = decode_note(snapshot.note)
    except BadInput:
        return None
    tokens = list(snapshot.tokens)
    if len(tokens) != len(snapshot.cells):
        return None
    if note.generation is None:
        length = len(tokens) if note.length is None else note.length
        if length > len(tokens):
            return None
        pending = [] if note.pending is None else [note.pending]
        return Found(note=note, transcript=tokens[:length] + pending, options=None, finish=None, sampled=False)
    if snapshot.sampling is None or len(tokens) < note.generated_from:
        return None
    sampled = snapshot.last_sampled is not None
    if snapshot.last_sampled is not None:
        tokens.append(snapshot.last_sampled)
    finish = None
    for at in range(note.generated_from, len(tokens)):
        if tokens[at] in note.stop_token_ids:
            finish = FinishReason.STOP
        elif at + 1 - note.generated_from >= note.max_new_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            sampled = sampled and at + 1 == len(tokens)
            del tokens[at + 1 :]
            break
    options = note.options(snapshot.sampling)
    return Found(
        note=note,
        transcript=tokens,
        options=options,
        finish=finish,
        sampled=sampled,
        logprobs=snapshot.logprobs,
        logprobs_from=snapshot.logprobs_from,
    )
