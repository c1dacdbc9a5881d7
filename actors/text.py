"""Text to tokens and back: the service's tokenizer, and one incremental decoder per generation.

Promises: the pieces of a `TextStream`, put together, are the text of all its tokens, in the context of what came
before them; a character appears only once it is complete; special tokens add nothing.

`Tokenizer`'s methods may be called from several threads at once, and are meant to be called off the event loop (a long
prompt takes milliseconds). A `TextStream` belongs to one thread at a time. Widths count tokens.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from microtome.cuda_runtime.checkpoint import Checkpoint, end_token_ids, find_checkpoint, load_tokenizer
from microtome.planner.errors import BadInput

CONTEXT_TOKENS = 8  # of the prompt, before the first generated token: whether a space is stripped depends on them
WINDOW_TOKENS = 64  # held tokens before a cut is looked for; a character takes a handful, so only broken text gets here
INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no whole character, or not yet


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


class Tokenizer:
    """The tokenizer of one checkpoint. Building one reads its files: seconds for a GGUF."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises `BadConfig` when the checkpoint has no readable tokenizer."""
        self._tokenizer: Any = load_tokenizer(checkpoint)
        # The Rust tokenizer, where there is one: it releases the GIL, holds no state between calls, and is ten times
        # cheaper per token than the Python object around it.
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()  # set in some tokenizer files; a prompt is never cut silently
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self._special = frozenset(token for token, text in added.items() if text.special)
        else:
            self._special = frozenset(self._tokenizer.all_special_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that the model's tokenizer adds."""
        return self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the chat, up to where the assistant's answer begins.

        Raises `BadInput` when the model has no chat template, or its template refuses the messages.
        """
        if not self.has_chat_template:
            raise BadInput("the model has no chat template; send text or token ids")
        dicts = [message._asdict() for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the model's; they raise what they like
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f"the model's chat template refuses the messages: {reason}") from error
        return self._encode(text, special=False)  # the template has written the special tokens itself

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens left out."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=True))
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stream(self, context: Sequence[int]) -> "TextStream":
        """A decoder for the tokens generated after `context`, the prompt's last `CONTEXT_TOKENS` tokens."""
        return TextStream(self.decode, self._special, context)

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=special))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What the driver knows of a model's language: all that is not weights."""

    tokenizer: Tokenizer
    end_token_ids: tuple[int, ...]
    architecture: str  # the library's name of the model's class


def load_model_text(model: str) -> ModelText:
    """Read it from the checkpoint at path `model`: seconds. Raises `BadConfig`."""
    checkpoint = find_checkpoint(model)
    return ModelText(
        tokenizer=Tokenizer(checkpoint),
        end_token_ids=end_token_ids(checkpoint),
        architecture=checkpoint.model_class,
    )


class TextStream:
    """Decodes one generation piece by piece.

    A token's text depends on its neighbours (spaces, characters of several tokens), so it decodes a short window of
    tokens again with the new one in it, and hands on what that adds. Work per token does not grow with the generation.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], special: Container[int] = (), context: Sequence[int] = ()
    ) -> None:
        """`decode` gives the text of some tokens; those in `special` have none; `context` came before the first."""
        self._decode = decode
        self._special = special
        self._window = list(context)  # settled tokens, for their effect on what follows; then held ones
        self._settled = len(self._window)
        self._shown = decode(self._window).rstrip(INCOMPLETE)  # the start of the window's text that was handed on

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` add, short of a character that is not complete yet."""
        return "".join([self._push(token) for token in tokens if token not in self._special])

    def finish(self) -> str:
        """What was held back: marks for characters that never became complete. Nothing may be pushed after it."""
        return self._decode(self._window)[len(self._shown) :]

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE):
            return self._cut(text) if len(self._window) - self._settled >= WINDOW_TOKENS else ""
        piece = text[len(self._shown) :]
        if piece or len(self._window) >= WINDOW_TOKENS:  # a token without text of its own still shapes the next one's
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._shown = self._decode(self._window)
        return piece

    def _cut(self, text: str) -> str:
        """Shortens a window full of broken characters. Only the last mark of `text` can still become something."""
        piece = text[len(self._shown) : -1]
        self._shown = text[:-1]
        for at in range(len(self._window) - CONTEXT_TOKENS, len(self._window) - 1):
            tail = self._decode(self._window[at:])
            if tail and self._decode(self._window[:at]) + tail == text:  # no character straddles the cut
                del self._window[:at]
                self._shown = tail[:-1]
                break
        self._settled = 0
        return piece
