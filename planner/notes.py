"""The driver's own record of a sequence, kept by the worker beside it: enough for a restarted driver to go on.

A worker gives a note back in its snapshot, with the sequence's cells, tokens and sampling policy; so a note holds what
those do not tell. JSON of short lists, its first entry a version: an unknown version is an error, not a guess.
"""

import json
from dataclasses import dataclass

from microtome.planner.errors import BadInput
from microtome.planner.types import GenerationId, GenerationOptions, SamplingParams, SessionId

_VERSION = 3
_OLDEST = 2  # that is still read: it knows no texts to stop at


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    session: SessionId
    opened: bool  # by a caller, who closes it
    tenant: str
    cache_salt: str
    generation: GenerationId | None = None  # None: the session is idle
    prompt_tokens: int = 0
    generated_from: int = 0  # position of the generation's first token
    base: int = 0  # the session's committed length before it
    submitted_us: int = 0  # on the clock of the driver that wrote this; only differences of rank survive it
    priority: int = 0
    max_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    delivered_before: int = 0
    stop_texts: tuple[str, ...] = ()
    length: int | None = None  # of an idle session: committed tokens; what the sequence has beyond is void
    pending: int | None = None  # of an idle session: the token delivered last, if it was not run

    def options(self, sampling: SamplingParams) -> GenerationOptions:
        """The caller's options again, without deadline and target: those were on another clock."""
        return GenerationOptions(
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            delivered_before=self.delivered_before,
            stop_texts=self.stop_texts,
        )


def encode_note(note: Note) -> bytes:
    session = [note.session, int(note.opened), note.tenant, note.cache_salt, note.length, note.pending]
    generation = None
    if note.generation is not None:
        generation = [
            note.generation,
            note.prompt_tokens,
            note.generated_from,
            note.base,
            note.submitted_us,
            note.priority,
            note.max_new_tokens,
            note.stop_token_ids,
            note.delivered_before,
            note.stop_texts,
        ]
    return json.dumps([_VERSION, session, generation], separators=(",", ":")).encode()


def decode_note(data: bytes) -> Note:
    """Raises `BadInput` for bytes that `encode_note` of this version did not write."""
    try:
        version, session, generation = json.loads(data)
        if not _OLDEST <= version <= _VERSION:
            raise BadInput(f"a sequence's note has version {version}, this driver reads {_OLDEST} to {_VERSION}")
        number, opened, tenant, salt, length, pending = session
        note = Note(session=number, opened=bool(opened), tenant=tenant, cache_salt=salt, length=length, pending=pending)
        if generation is None:
            return note
        if version == _OLDEST:
            generation = [*generation, ()]
        name, prompt, begin, base, submitted, priority, limit, stop, before, texts = generation
    except (ValueError, TypeError) as error:
        raise BadInput(f"a sequence's note is not one of ours: {data[:40]!r}") from error
    return Note(
        session=number,
        opened=bool(opened),
        tenant=tenant,
        cache_salt=salt,
        generation=name,
        prompt_tokens=prompt,
        generated_from=begin,
        base=base,
        submitted_us=submitted,
        priority=priority,
        max_new_tokens=limit,
        stop_token_ids=tuple(stop),
        delivered_before=before,
        stop_texts=tuple(texts),
    )
