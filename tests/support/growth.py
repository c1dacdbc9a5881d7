"""Whether processes grow: memory, descriptors and threads of each, looked at now and again."""

import time
from collections import defaultdict
from dataclasses import dataclass

import psutil

WARM_UP = 0.5  # share of a process's life that is not judged: a driver reaches its size with its first 7000 generations
MOST_MIB_PER_MINUTE = 2.0
MOST_MORE_DESCRIPTORS = 20
MOST_MORE_THREADS = 8
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    rss_mib: float
    descriptors: int
    threads: int


class Growth:
    def __init__(self) -> None:
        self._looks: dict[tuple[str, int], list[Look]] = defaultdict(list)

    def look(self, who: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                look = Look(time.monotonic(), process.memory_info().rss / MIB, process.num_fds(), process.num_threads())
        except psutil.Error:
            return  # killed meanwhile
        self._looks[who, pid].append(look)

    def flat(self, at_least_s: float, *, memory: bool = True) -> list[str]:
        """What grew, in words, of those that lived so long. Raises when nobody did."""
        judged = self._lived(at_least_s)
        complaints: list[str] = []
        for (who, pid), looks in judged.items():
            kept = looks[int(len(looks) * WARM_UP) :]
            slope = slope_per_minute(kept)
            if memory and slope > MOST_MIB_PER_MINUTE:
                complaints.append(f"{who} ({pid}) grows by {slope:.1f} MiB a minute")
            if kept[-1].descriptors > kept[0].descriptors + MOST_MORE_DESCRIPTORS:
                complaints.append(
                    f"{who} ({pid}) went from {kept[0].descriptors} to {kept[-1].descriptors} descriptors"
                )
            if kept[-1].threads > kept[0].threads + MOST_MORE_THREADS:
                complaints.append(f"{who} ({pid}) went from {kept[0].threads} to {kept[-1].threads} threads")
        return complaints

    def figures(self, at_least_s: float) -> list[dict[str, object]]:
        """Of those that lived so long, behind their warm-up."""
        figures: list[dict[str, object]] = []
        for (who, _), looks in self._lived(at_least_s).items():
            kept = looks[int(len(looks) * WARM_UP) :]
            figures.append(
                {
                    "process": who,
                    "seconds": round(kept[-1].at_s - kept[0].at_s),
                    "rss_mib": [round(kept[0].rss_mib), round(kept[-1].rss_mib)],
                    "rss_mib_per_minute": round(slope_per_minute(kept), 2),
                    "descriptors": [kept[0].descriptors, kept[-1].descriptors],
                    "threads": [kept[0].threads, kept[-1].threads],
                }
            )
        return figures

    def _lived(self, at_least_s: float) -> dict[tuple[str, int], list[Look]]:
        lived = {who: looks for who, looks in self._looks.items() if looks[-1].at_s - looks[0].at_s >= at_least_s}
        if not lived:
            raise AssertionError(f"no process lived for {at_least_s:g} s")
        return lived

    def __str__(self) -> str:
        lines: list[str] = []
        for (who, pid), looks in self._looks.items():
            first, last = looks[0], looks[-1]
            lines.append(
                f"{who} ({pid}) {last.at_s - first.at_s:.0f} s: {first.rss_mib:.0f} to {last.rss_mib:.0f} MiB "
                f"({slope_per_minute(looks):+.2f} a minute), {first.descriptors} to {last.descriptors} descriptors, "
                f"{first.threads} to {last.threads} threads"
            )
        return "\n".join(lines)


def slope_per_minute(looks: list[Look]) -> float:
    """MiB a minute, by least squares."""
    if len(looks) < 2:
        return 0.0
    at = [look.at_s for look in looks]
    mean_at, mean_rss = sum(at) / len(at), sum(look.rss_mib for look in looks) / len(looks)
    spread = sum((x - mean_at) ** 2 for x in at)
    if not spread:
        return 0.0
    return 60 * sum((look.at_s - mean_at) * (look.rss_mib - mean_rss) for look in looks) / spread
