"""Who waits for a first step, in which order they start, and how many may.

`WaitingLine` owns the generations without a place on a worker. How many new ones there may be is bounded. They stand in
a line per priority, in the order of self-clocked fair queueing over tenants: each is tagged with the tokens that its
tenant has asked for by then, divided by the tenant's weight, and the smallest tag is next. A tenant that is not in line
starts at the tag taken last, so one that floods delays itself, and none gathers credit or starves. Parked and moved
generations stand apart, are not counted against the bounds, and are never refused.

Between priorities, and between the new and the returning, the more senior rank is next: submission time minus priority
times ageing, so waiting long enough outweighs any priority. Adding and taking cost the logarithm of the line.
"""

import heapq
from collections.abc import Iterator, Mapping

from microtome.planner.errors import AtCapacity
from microtome.planner.generations import Generation, Rank, State

_New = tuple[float, int, Generation]  # (tag, arrival, generation)
_Returning = tuple[Rank, Generation]
_IN_LINE = (State.WAITING, State.RETURNING)


class WaitingLine:
    def __init__(self, max_waiting: int, max_waiting_tokens: int, weights: Mapping[str, int]) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self._weights = weights
        self._levels: dict[int, list[_New]] = {}
        self._returning: list[_Returning] = []
        self._aside: list[tuple[_New | None, Generation]] = []  # no worker can hold them; with their places if new
        self._virtual = 0.0  # tag of the generation taken last
        self._asked: dict[str, float] = {}  # tenant → its newest tag
        self._arrivals = 0
        self._waiting = 0
        self._tokens = 0
        self._returning_count = 0
        self._returning_tokens = 0

    def __len__(self) -> int:
        """New, expected and returning generations."""
        return self._waiting + self._returning_count

    @property
    def waiting(self) -> int:
        """New and expected generations."""
        return self._waiting

    @property
    def tokens(self) -> int:
        """Tokens that all in line have to be prefilled with, at most."""
        return self._tokens + self._returning_tokens

    def check_room(self, generations: int, tokens: int, retry_after_ms: int | None) -> None:
        """Raise `AtCapacity` if that much more would be over a bound."""
        if self._waiting + generations > self._max_waiting:
            free = self._max_waiting - self._waiting
            raise AtCapacity("places in the queue", generations, free, retry_after_ms)
        if self._tokens + tokens > self._max_tokens:
            free = self._max_tokens - self._tokens
            raise AtCapacity("queued prompt tokens", tokens, free, retry_after_ms)

    def expect(self, generation: Generation) -> None:
        """A new generation counts as waiting; `add` lets it stand in line when it could start."""
        generation.state = State.SETTLING
        self._waiting += 1
        self._tokens += generation.prompt_tokens

    def add(self, generation: Generation) -> None:
        """An expected generation joins its priority's line."""
        tenant = generation.options.tenant
        asked = (generation.prompt_tokens + generation.limit) / self._weights.get(tenant, 1)
        self._asked[tenant] = tag = max(self._virtual, self._asked.get(tenant, 0.0)) + asked
        if len(self._asked) > 64 + 2 * self._waiting:
            # A tenant whose newest tag was taken starts at the clock: forget it.
            self._asked = {name: at for name, at in self._asked.items() if at > self._virtual}
        generation.charged = True
        self._arrivals += 1
        heapq.heappush(self._levels.setdefault(generation.options.priority, []), (tag, self._arrivals, generation))
        generation.state = State.WAITING

    def add_returning(self, generation: Generation) -> None:
        """A generation that had a place and lost it joins again."""
        heapq.heappush(self._returning, (generation.rank, generation))
        generation.state = State.RETURNING
        self._returning_count += 1
        self._returning_tokens += len(generation.session.transcript)

    def next(self) -> Generation | None:
        """Who starts next; it stays in line."""
        best = None
        returning = self._returning
        while returning and returning[0][1].state is not State.RETURNING:
            heapq.heappop(returning)
        if returning:
            best = returning[0][1]
        for priority, line in list(self._levels.items()):
            while line and line[0][2].state is not State.WAITING:
                heapq.heappop(line)
            if not line:
                del self._levels[priority]
            elif best is None or line[0][2].rank < best.rank:
                best = line[0][2]
        return best

    def take(self, generation: Generation) -> None:
        """`generation`, which `next` returned, starts."""
        if generation.state is State.RETURNING:
            heapq.heappop(self._returning)
        else:
            tag, _, _ = heapq.heappop(self._levels[generation.options.priority])
            self._virtual = max(self._virtual, tag)
        self.leave(generation)

    def set_aside(self, generation: Generation) -> None:
        """`generation`, which `next` returned, can start nowhere until `recall`: it waits on and holds nobody up."""
        if generation.state is State.RETURNING:
            heapq.heappop(self._returning)
            place = None
        else:
            place = heapq.heappop(self._levels[generation.options.priority])
        if len(self._aside) > 64 + 2 * len(self):
            self._aside = [entry for entry in self._aside if entry[1].state in _IN_LINE]
        self._aside.append((place, generation))

    def recall(self) -> None:
        """Those set aside stand in line again, where they stood."""
        for place, generation in self._aside:
            if generation.state not in _IN_LINE:
                continue
            if place is None:
                heapq.heappush(self._returning, (generation.rank, generation))
            else:
                heapq.heappush(self._levels.setdefault(generation.options.priority, []), place)
        self._aside.clear()

    def leave(self, generation: Generation) -> None:
        """`generation` waits no more. The caller changes its state: that makes its entry void."""
        if generation.state is State.RETURNING:
            self._returning_count -= 1
            self._returning_tokens -= len(generation.session.transcript)
        else:
            self._waiting -= 1
            self._tokens -= generation.prompt_tokens

    def refund(self, generation: Generation) -> None:
        """`generation` ended: its tenant gets back what it asked for and did not use."""
        tenant = generation.options.tenant
        if generation.charged and tenant in self._asked:
            unused = generation.limit - generation.delivered
            self._asked[tenant] -= unused / self._weights.get(tenant, 1)

    def in_order(self) -> Iterator[Generation]:
        """All in line, as they start if nobody comes or goes; then those set aside."""
        returning = sorted(self._returning, key=lambda entry: entry[0])
        levels = [sorted(level, key=lambda entry: entry[:2]) for level in self._levels.values()]
        lines = [[g for _, g in returning if g.state is State.RETURNING]]
        lines += [[g for _, _, g in level if g.state is State.WAITING] for level in levels]
        # Within a line its own order holds, and between lines the ranks of those in front, as in `next`.
        heads = [(line[0].rank, number, 0) for number, line in enumerate(lines) if line]
        heapq.heapify(heads)
        while heads:
            _, number, at = heads[0]
            line = lines[number]
            yield line[at]
            if at + 1 < len(line):
                heapq.heapreplace(heads, (line[at + 1].rank, number, at + 1))
            else:
                heapq.heappop(heads)
        yield from (generation for _, generation in self._aside if generation.state in _IN_LINE)
