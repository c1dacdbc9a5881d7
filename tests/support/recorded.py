"""A small cluster whose life is written down."""

from collections.abc import Sequence

from microtome.planner.config import PlannerConfig
from microtome.planner.events import Event, Instruction
from microtome.planner.journal import Encoder
from tests.support.small_cluster import SmallCluster, method_table


class Recorded(SmallCluster):
    """`journal`: the bytes; `entries`: what was written, before it was."""

    def __init__(self, config: PlannerConfig | None = None, **settings: object) -> None:
        self._encoder = Encoder()
        self.journal = self._encoder.header(config or PlannerConfig())
        self.entries: list[tuple[Event, Sequence[Instruction]]] = []
        super().__init__(config or PlannerConfig(), **settings)  # type: ignore[arg-type]

    def control_answers(self, event: Event) -> list[Instruction]:
        instructions = super().control_answers(event)
        self.entries.append((event, instructions))
        self.journal += self._encoder.entry(event, instructions)
        return instructions


def busy_day(config: PlannerConfig | None = None) -> Recorded:
    """Forty prompts in 20 ms on one worker with steps of up to 16 tokens."""
    cluster = Recorded(config, table=method_table((1, 2, 4, 8), 16), usable_cells=2000)
    for n in range(40):
        cluster.now_us += 500
        cluster.submit(range(n, n + 5 + n % 30), 3 + n % 9, priority=n % 3)
        if cluster.plans["w0"] and n % 2:
            cluster.answer()
    while cluster.plans["w0"]:
        cluster.now_us += 1300
        cluster.answer()
    return cluster
