"""One model that is served, or that was and still has generations: its fingerprint, and who waits for it.

A generation belongs to the model whose tokens its prompt is, and never changes it. While a service has one model there
is one `Served`; an update to another model makes a second one, and the first goes when the last of its generations has.
"""

from microtome.planner.admission import WaitingLine


class Served:
    """Mutable; `Control` is its one caller. `fingerprint` and `vocab_size` are unknown until a worker has joined."""

    __slots__ = ("cells", "fingerprint", "line", "revision", "sequences", "vocab_size")

    def __init__(self, line: WaitingLine) -> None:
        self.fingerprint: str | None = None
        self.vocab_size: int | None = None
        self.revision = 0  # of settings: the newest that has brought this model
        self.cells = 0  # usable ones, of the worker that joined last; 0: none has
        self.sequences = 0  # live at once, likewise
        self.line = line
