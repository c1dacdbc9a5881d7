"""The demo's eight chats: short and long, facts, lists, code and prose, so that they neither start nor end together."""

from dataclasses import dataclass

__all__ = ["CHATS", "Chat"]


@dataclass(frozen=True, slots=True)
class Chat:
    topic: str  # a word or two, for tables
    question: str
    max_new_tokens: int
    system: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": self.question}]


CHATS = (
    Chat("capital", "What is the capital of France? Answer in one sentence.", 32),
    Chat("rainbow", "Why does a rainbow show its colours in the order it does?", 96),
    Chat("haiku", "Write a haiku about rain on a tin roof.", 48),
    Chat("three rivers", "Name three rivers in South America and the countries they flow through.", 72),
    Chat("gardener", "My tomato leaves turn yellow. What should I check first?", 96, "You are a patient gardener."),
    Chat("reverse", "Write a Python function that reverses a list in place.", 96),
    Chat(
        "summary",
        "Summarise in one sentence: The microtome was built to cut tissue into slices thin enough for light to pass. "
        "Early instruments were moved by hand; a screw set the thickness and a blade was drawn across the sample. "
        "With it, anatomists saw cells in the order in which they lay, slice after slice, and could rebuild in wax "
        "what no scalpel had ever laid open. Today's instruments cut slices a few thousand atoms thick.",
        64,
    ),
    Chat("tale", "Begin a fairy tale about a clockmaker who could hear tomorrow.", 120),
)
