"""Clusters whose lives are written down."""

from collections.abc import Sequence

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import Event, Instruction
from microtome.planner.journal import Encoder
from microtome.planner.types import SamplingParams
from tests.support.scaled_cluster import ScaledCluster
from tests.support.small_cluster import SmallCluster, method_table


class Written:
    """Of a cluster: `journal`, the bytes; `entries`, what was written, before it was."""

    journal = b""
    config: PlannerConfig
    control: Control

    def control_answers(self, event: Event) -> list[Instruction]:
        instructions = self.control.handle(event)
        if not self.journal:
            self._encoder = Encoder()
            self.entries: list[tuple[Event, Sequence[Instruction]]] = []
            self.journal = self._encoder.header(self.config)
        self.entries.append((event, instructions))
        self.journal += self._encoder.entry(event, instructions)
        return instructions


class Recorded(Written, SmallCluster):
    pass


class RecordedFleet(Written, ScaledCluster):
    pass


def busy_day(config: PlannerConfig | None = None) -> Recorded:
    """Forty prompts in 20 ms on one worker with steps of up to 16 tokens."""
    cluster = Recorded(config, table=method_table((1, 2, 4, 8), 16), usable_cells=2000)
    for n in range(40):
        cluster.now_us += 500
        asks = SamplingParams(logprobs=n % 3, prompt_logprobs=n % 2) if n % 5 == 0 else SamplingParams()
        cluster.submit(range(n, n + 5 + n % 30), 3 + n % 9, priority=n % 3, sampling=asks)
        if cluster.plans["w0"] and n % 2:
            cluster.answer()
    while cluster.plans["w0"]:
        cluster.now_us += 1300
        cluster.answer()
    return cluster
