"""The notes that go to a worker beside its sequences: what is written of a session, and of its generation."""

from microtome.planner.generations import Generation
from microtome.planner.notes import Note, encode_note
from microtome.planner.sessions import Session


def idle_note(session: Session) -> bytes:
    """For the sequence of a session between generations."""
    note = Note(
        session=session.id,
        opened=session.opened,
        tenant=session.tenant,
        cache_salt=session.cache_salt,
        length=session.length,
        pending=session.transcript[-1] if session.pending else None,
    )
    return encode_note(note)


def note_of(g: Generation) -> bytes:
    """For the sequence of a session that generates."""
    session = g.session
    note = Note(
        session=session.id,
        opened=session.opened,
        tenant=session.tenant,
        cache_salt=session.cache_salt,
        generation=g.id,
        prompt_tokens=g.prompt_tokens,
        generated_from=g.generated_from,
        base=g.base,
        submitted_us=g.submitted_us,
        priority=g.options.priority,
        max_new_tokens=g.limit,
        stop_token_ids=g.options.stop_token_ids,
        delivered_before=g.options.delivered_before,
        stop_texts=g.options.stop_texts,
    )
    return encode_note(note)
