"""Pieces of streamed text, put together, are the text; a character appears once it is whole."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from microtome.actors.text import WINDOW_TOKENS, TextStream

SPECIAL = 300
BYTES = st.one_of(st.sampled_from([*"é€😀你a ".encode()]), st.integers(0, 255), st.just(SPECIAL))


def byte_level(tokens: Sequence[int]) -> str:
    """As byte-level tokenizers decode: the bytes, put together, as UTF-8 with marks for what is broken."""
    return bytes(token for token in tokens if token != SPECIAL).decode(errors="replace")


def byte_fallback() -> Backend:
    """As Llama's: words with a mark for the space before them, which is stripped at the start; bytes as tokens."""
    words = {"<unk>": 0, "\u2581": 1, "\u2581a": 2, "b": 3, "\u2581\u4f60": 4}
    vocab = words | {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [stream.push([token]) for token in tokens] + [stream.finish()]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*"é€😀你a ".encode()]), st.integers(0, 255), st.just(SPECIAL)), max_size=200)
)
def test_pieces_of_any_bytes_are_the_whole_text(tokens: list[int]) -> None:
    assert "".join(pieces(TextStream(byte_level, {SPECIAL}), tokens)) == byte_level(tokens)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=60), st.integers(0, 7))
def test_pieces_after_a_prompt_are_what_they_add_to_it(prompt: str, answer: str, cut: int) -> None:
    """A cut inside a character: the prompt ends with half of it, and the answer begins with the other."""
    data = (prompt + answer).encode()
    start = min(len(data), len(prompt.encode()) + cut)
    before, after = list(data[:start]), list(data[start:])
    stream = TextStream(byte_level, (), before[-8:])
    settled = byte_level(before).rstrip("\ufffd") if before else ""
    assert "".join(pieces(stream, after)) == byte_level(list(data))[len(settled) :]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab é€😀你", max_size=60))
def test_pieces_of_words_and_byte_tokens_are_the_whole_text(text: str) -> None:
    backend = byte_fallback()
    tokens = [0]
    for word in text:
        known = backend.token_to_id({" ": "\u2581", "a": "\u2581a", "b": "b"}.get(word, ""))
        tokens += [known] if known is not None else [10 + byte for byte in word.encode()]
    tokens = tokens[1:]

    def decode(ids: Sequence[int]) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=True))

    assert "".join(pieces(TextStream(decode), tokens)) == decode(tokens)


def test_space_before_the_first_generated_word_is_kept_when_a_prompt_came_before_it() -> None:
    backend = byte_fallback()

    def decode(ids: Sequence[int]) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=True))

    assert TextStream(decode, (), [2]).push([2]) == " a"
    assert TextStream(decode).push([2]) == "a"


def test_character_appears_with_its_last_byte() -> None:
    stream = TextStream(byte_level)
    assert pieces(stream, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_special_token_inside_a_word_shows_nothing_and_changes_nothing() -> None:
    stream = TextStream(byte_level, {SPECIAL})
    assert pieces(stream, [0xE2, SPECIAL, 0x82, SPECIAL, 0xAC, SPECIAL]) == ["", "", "", "", "€", "", ""]


def test_work_per_token_is_bounded_in_endless_broken_text() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return byte_level(tokens)

    tokens = [0xE2, 0x82] * 500
    assert "".join(pieces(TextStream(decode), tokens)) == byte_level(tokens)
    assert longest <= 2 * WINDOW_TOKENS


@pytest.mark.parametrize("width", [1, 3, 7])
def test_tokens_may_come_several_at_a_time(width: int) -> None:
    tokens = list("Größe: 5 € 😀".encode())
    stream = TextStream(byte_level)
    groups = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    assert "".join([stream.push(group) for group in groups]) + stream.finish() == "Größe: 5 € 😀"
