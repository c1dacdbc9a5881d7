"""The prefix cache against a model that keeps every prefix by itself and looks at all of them each time."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from microtome.planner.cells import CellPlan, CellTable
from microtome.planner.errors import BadInput
from microtome.planner.prefix import Place as PathPlace
from microtome.planner.prefix import PrefixCache, PrefixKey
from microtome.planner.types import Cell, SequenceId

CELLS, SEQUENCES, PROMPTS_AT_ONCE = 150, 4, 3
# Few prompts, so that they come again; they part at the first token, in the middle of a run, and behind a long one.
LONG = [5] * 18
PROMPTS = st.sampled_from(
    [
        [1],
        [1, 2],
        [1, 2, 3, 3, 3, 3],
        [1, 2, 3, 3, 4],
        [1, 2, 9, 9],
        [2, 2, 2],
        [2, 2, 3, 1, 1],
        LONG,
        [*LONG, 1, 1, 1],
        [*LONG, 2, 2],
        [*LONG, 2, 2, 2, 2, 3],
    ]
)
KEYS = st.sampled_from([("weights", ""), ("weights", "salt")])

Place = tuple[PrefixKey, tuple[int, ...]]  # one cached token: the key, and all tokens up to it


@dataclass
class Prefilling:
    """A session whose prompt is planned in chunks, what others planned of it taken over."""

    sequence: SequenceId
    key: PrefixKey
    tokens: list[int]
    place: PathPlace
    at: int = 0  # tokens planned


class AgainstEveryPrefix(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = CellTable(CELLS, SEQUENCES + PROMPTS_AT_ONCE)
        self.cache = PrefixCache(self.table)
        self.cached: dict[Place, Cell] = {}
        self.stamps: dict[Place, int] = {}
        self.clock = 0
        self.sessions: list[tuple[SequenceId, PrefixKey, list[int]]] = []
        self.prompts: list[Prefilling] = []
        self.plans: list[tuple[CellPlan, Prefilling, int]] = []  # with where their tokens begin
        self.planned: set[Cell] = set()
        self.hits = self.misses = 0

    def is_idle(self, place: Place) -> bool:
        live = [sequence for sequence, _, _ in self.sessions] + [prompt.sequence for prompt in self.prompts]
        return not any(self.cached[place] in self.table.cells(sequence) for sequence in live)

    def prefixes(self, key: PrefixKey, tokens: Sequence[int]) -> list[Place]:
        return [(key, tuple(tokens[:end])) for end in range(1, len(tokens) + 1)]

    def longest(self, key: PrefixKey, tokens: Sequence[int]) -> list[Place]:
        found = []
        for place in self.prefixes(key, tokens):
            if place not in self.cached:
                break
            found.append(place)
        return found

    def use(self, places: Sequence[Place]) -> None:
        self.clock += 1
        for place in places:
            self.stamps[place] = self.clock

    @rule(
        key=KEYS, tokens=PROMPTS, cold=st.booleans(), then=st.sampled_from(["", "insert", "insert", "insert and close"])
    )
    def run(self, key: PrefixKey, tokens: list[int], cold: bool, then: str) -> None:
        """A session computes a prompt: on what is cached, or all of it again."""
        if len(self.sessions) == SEQUENCES:
            self.table.remove(self.sessions.pop(0)[0])
        self.settle()
        shared: tuple[Cell, ...] = ()
        if not cold:
            places = self.longest(key, tokens[:-1])
            shared = self.cache.match(key, tokens)
            assert list(shared) == [self.cached[place] for place in places]
            self.hits += len(shared)
            self.misses += len(tokens) - len(shared)
            if places:
                self.use(places)
        rest = len(tokens) - len(shared)
        if rest > self.table.free_cells:
            return
        sequence = self.table.open(shared)
        self.table.commit(self.table.plan([(sequence, len(shared), rest)]))
        self.sessions.append((sequence, key, tokens))
        if then:
            self.insert(-1, None)
        if then == "insert and close":
            self.close(-1)

    @rule(number=st.integers(0, SEQUENCES - 1), part=st.one_of(st.none(), st.integers(0, 40)))
    def insert(self, number: int, part: int | None) -> None:
        if number >= len(self.sessions):
            return
        sequence, key, tokens = self.sessions[number]
        length = len(tokens) if part is None else min(part, len(tokens))
        places = self.prefixes(key, tokens[:length])
        cells = list(self.table.cells(sequence, 0, length))
        new = [place for place in places if place not in self.cached]
        idle = {place for place in places if place in self.cached and self.is_idle(place)}
        assert self.cache.insert(key, tokens[:length], cells) == len(new)
        held = set(self.cached.values())
        for place, cell in zip(places, cells, strict=True):
            if place not in self.cached or (place in idle and cell not in held):
                self.cached[place] = cell
        if places:
            self.use(places)

    @rule(key=KEYS, tokens=PROMPTS)
    def begin_prompt(self, key: PrefixKey, tokens: list[int]) -> None:
        """A session is to be prefilled, on what is cached or planned."""
        if len(self.prompts) == PROMPTS_AT_ONCE:
            self.finish_prompt(0)
        places = self.longest(key, tokens[:-1])
        shared, place = self.cache.find(key, tokens)
        assert list(shared) == [self.cached[at] for at in places]
        planned = [cell in self.planned for cell in shared]
        assert self.cache.planned_from(shared) == (planned.index(True) if True in planned else len(planned))
        self.hits += len(shared)
        self.misses += len(tokens) - len(shared)
        if places:
            self.use(places)
        prompt = Prefilling(self.table.open(), key, tokens, place)
        self.prompts.append(prompt)
        self.take_over(prompt, list(shared))

    def take_over(self, prompt: Prefilling, cells: list[Cell]) -> None:
        plan = self.table.begin()
        self.table.share(plan, prompt.sequence, cells)
        self.plans.append((plan, prompt, prompt.at))
        prompt.at += len(cells)

    @rule(number=st.integers(0, PROMPTS_AT_ONCE - 1), width=st.integers(1, 12), follow=st.booleans())
    def plan_chunk(self, number: int, width: int, follow: bool) -> None:
        """A session's next chunk is planned and cached, after it took over what others had planned, or not."""
        if number >= len(self.prompts):
            return
        prompt = self.prompts[number]
        key, tokens = prompt.key, prompt.tokens
        reached = self.longest(key, tokens[: prompt.at])
        lost = len(reached) < prompt.at
        if follow:
            places = self.longest(key, tokens[:-1])
            more = [] if lost else [self.cached[at] for at in places[prompt.at :]]
            assert self.cache.follow(prompt.place, tokens) == more
            self.hits += len(more)
            self.misses -= len(more)
            if more:
                self.use(places)
                self.take_over(prompt, more)
        end = min(len(tokens), prompt.at + width)
        if end == prompt.at or end - prompt.at > self.table.free_cells:
            return
        plan = self.table.begin()
        cells = self.table.grow(plan, prompt.sequence, prompt.at, end - prompt.at)
        self.plans.append((plan, prompt, prompt.at))
        frontier = self.cache.frontier(prompt.place, tokens)
        assert (frontier is None) == lost
        grown = self.cache.grow(prompt.place, tokens, cells)
        places = self.prefixes(key, tokens[:end])
        new = [at for at in places if at not in self.cached]
        if lost or not new:
            assert grown is None
            if not lost:
                self.use(places)
        else:
            at = end - len(new)
            assert grown == (at, self.cached[places[at - 1]] if at else key)
            for place, cell in zip(new, cells[len(cells) - len(new) :], strict=True):
                self.cached[place] = cell
            self.planned.update(cells[len(cells) - len(new) :])
            self.use(places)
        prompt.at = end
        if lost:
            self.finish_prompt(number)

    @rule()
    def settle(self) -> None:
        """The worker has run everything that was planned."""
        for plan, _, _ in self.plans:
            self.table.commit(plan)
            self.cache.settle(plan.cells)
        self.plans.clear()
        self.planned.clear()

    @rule()
    def take_back(self) -> None:
        """The worker has refused everything that was planned."""
        self.cache.forget_planned()
        gone = {place for place, cell in self.cached.items() if cell in self.planned}
        for key, tokens in list(self.cached):
            if any((key, tokens[:end]) in gone for end in range(1, len(tokens) + 1)):
                del self.cached[key, tokens]
        self.planned.clear()
        for plan, prompt, at in reversed(self.plans):
            self.table.abort(plan)
            prompt.at = min(prompt.at, at)
        self.plans.clear()
        for prompt in list(self.prompts):
            place = self.cache.place(prompt.key, prompt.tokens, prompt.at)
            if place is None:
                self.finish_prompt(self.prompts.index(prompt))
            else:
                prompt.place = place
                self.misses += len(prompt.tokens) - prompt.at

    @rule(number=st.integers(0, PROMPTS_AT_ONCE - 1))
    def finish_prompt(self, number: int) -> None:
        if number < len(self.prompts):
            self.settle()
            self.table.remove(self.prompts.pop(number).sequence)

    @rule(number=st.integers(0, SEQUENCES - 1))
    def close(self, number: int) -> None:
        if number < len(self.sessions):
            self.table.remove(self.sessions.pop(number)[0])

    @rule(key=KEYS, tokens=PROMPTS)
    def peek(self, key: PrefixKey, tokens: list[int]) -> None:
        assert self.cache.peek(key, tokens) == len(self.longest(key, tokens[:-1]))

    @rule(needed=st.sampled_from([0, 1, 2, 3, 5, 9, 20, 1000]))
    def evict(self, needed: int) -> None:
        idle = {place for place in self.cached if self.is_idle(place)}
        expected = min(needed, len(idle))
        in_use: list[Place] = []
        freed = 0
        while freed < needed and idle & self.cached.keys():
            inner = {(key, tokens[:-1]) for key, tokens in self.cached}
            ends = [place for place in self.cached if place not in inner and place not in in_use]
            if ends:
                end = min(ends, key=self.stamps.__getitem__)
                if end in idle:
                    del self.cached[end]
                    freed += 1
                else:
                    in_use.append(end)
                continue
            # Nothing idle ends a path: of the paths that hide something idle, the one whose end was used least recently
            # is given up as far as it is in use and leads nowhere else.
            hiding = [(k, t) for k, t in in_use if any((k, t[:end]) in idle for end in range(1, len(t)))]
            key, tokens = min(hiding, key=self.stamps.__getitem__)
            in_use.remove((key, tokens))
            while (key, tokens) in self.cached and (key, tokens) not in idle and not self.leads_on(key, tokens):
                del self.cached[key, tokens]
                tokens = tokens[:-1]
        for key, tokens in sorted(in_use, key=self.stamps.__getitem__):
            self.use(self.prefixes(key, tokens))
        assert self.cache.evict(needed) == freed == expected

    def leads_on(self, key: PrefixKey, tokens: tuple[int, ...]) -> bool:
        return any(other == key and longer[:-1] == tokens for other, longer in self.cached)

    @invariant()
    def everything_agrees(self) -> None:
        assert self.cache.cached_cells == len(self.cached)
        idle = sum(map(self.is_idle, self.cached))
        assert self.cache.evictable_cells == self.table.idle_cells == idle
        live = [sequence for sequence, _, _ in self.sessions] + [prompt.sequence for prompt in self.prompts]
        owned = {cell for sequence in live for cell in self.table.cells(sequence)}
        assert self.planned >= self.cache._planned
        assert self.table.used_cells == len(owned | set(self.cached.values()))
        assert all(self.table.is_held(cell) for cell in self.cached.values())
        assert len(set(self.cached.values())) == len(self.cached)
        assert (self.cache.hit_tokens, self.cache.miss_tokens) == (self.hits, self.misses)
        inner = {(key, tokens[:-1]) for key, tokens in self.cached}
        for key, tokens in self.cached.keys() - inner:
            assert self.cache.peek(key, [*tokens, 99, 99]) == len(tokens)

    def teardown(self) -> None:
        while self.prompts:
            self.finish_prompt(0)
        for sequence, _, _ in self.sessions:
            self.table.remove(sequence)
        assert self.cache.evict(CELLS) == len(self.cached)
        assert (self.table.used_cells, self.cache.cached_cells, len(self.cache._roots)) == (0, 0, 0)


AgainstEveryPrefix.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=40)
test_the_cache_agrees_with_every_prefix = AgainstEveryPrefix.TestCase


KEY = ("weights",)


@pytest.fixture
def table() -> CellTable:
    return CellTable(usable_cells=4000, max_sequences=8)


def computed(table: CellTable, tokens: int) -> SequenceId:
    sequence = table.open()
    table.commit(table.plan([(sequence, 0, tokens)]))
    return sequence


def test_counts_that_differ_are_refused(table: CellTable) -> None:
    sequence = computed(table, 3)
    with pytest.raises(BadInput, match="2 tokens and 3 cells"):
        PrefixCache(table).insert(KEY, [1, 2], table.cells(sequence))


def test_a_cell_that_is_free_or_cached_under_another_key_is_refused_and_changes_nothing(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 3)
    cache.insert(("a",), [1, 2], table.cells(sequence, 0, 2))
    for cells in (table.cells(sequence), [*table.cells(sequence, 2), Cell(77), Cell(78)]):
        with pytest.raises(BadInput):
            cache.insert(("b",), [1, 2, 3], cells)
    assert cache.cached_cells == 2
    assert cache.peek(("b",), [1, 2, 3]) == 0


def test_clear_gives_up_everything_and_the_cache_goes_on(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 6)
    cache.insert(("a",), range(4), table.cells(sequence, 0, 4))
    cache.insert(("b",), range(2), table.cells(sequence, 4))
    cache.clear()
    assert (cache.cached_cells, table.references(table.cells(sequence)[0])) == (0, 1)
    assert cache.match(("a",), range(4)) == ()
    assert cache.insert(("a",), range(6), table.cells(sequence)) == 6
    table.remove(sequence)
    assert cache.evict(10) == 6


def test_nothing_is_inserted_where_nothing_is_given(table: CellTable) -> None:
    cache = PrefixCache(table)
    assert cache.insert(KEY, [], []) == 0
    assert cache.cached_cells == 0
    assert cache.evict(5) == 0


def test_a_prompt_and_a_transcript_may_be_any_sequence_of_tokens(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 40)
    tokens = range(40)
    cache.insert(KEY, tokens, table.cells(sequence))
    for same in (list(tokens), tuple(tokens), tokens):
        assert cache.peek(KEY, same) == 39


@pytest.mark.parametrize("matched", [1, 15, 16, 17, 47, 48, 49, 200, 1000, 2999])
def test_the_first_difference_is_found_wherever_it_is(table: CellTable, matched: int) -> None:
    cache, sequence = PrefixCache(table), computed(table, 3000)
    cache.insert(KEY, [7] * 3000, table.cells(sequence))
    assert cache.peek(KEY, [7] * matched + [8] * 50) == matched
    assert cache.match(KEY, [7] * matched + [8]) == tuple(table.cells(sequence, 0, matched))


class Counted(list[int]):
    """A prompt that counts the tokens somebody looks at."""

    looked = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.looked += len(found) if isinstance(index, slice) else 1
        return found


# holds K15
@pytest.mark.parametrize("matched", [1, 100, 1000])
def test_a_lookup_looks_at_as_many_tokens_as_it_matches(table: CellTable, matched: int) -> None:
    cache, sequence = PrefixCache(table), computed(table, 3500)
    cache.insert(KEY, [7] * 3500, table.cells(sequence))
    prompt = Counted([7] * matched + [8] * 3000)
    assert cache.peek(KEY, prompt) == matched
    assert prompt.looked <= 5 * matched + 64


def test_a_prefix_computed_twice_is_kept_once(table: CellTable) -> None:
    cache = PrefixCache(table)
    first, second = computed(table, 10), computed(table, 12)
    cache.insert(KEY, range(10), table.cells(first))
    table.remove(first)
    cache.insert(KEY, range(12), table.cells(second))
    # The cache went over to the cells of the session that lives; the others are free.
    assert table.used_cells == cache.cached_cells == 12
    assert cache.evictable_cells == 0
    assert cache.match(KEY, range(12)) == tuple(table.cells(second, 0, 11))


def hide(table: CellTable, cache: PrefixCache, token: int) -> SequenceId:
    """Cache eight tokens, of which a live session uses the last four, while nobody uses the cells of the first four."""
    first = computed(table, 4)
    cache.insert(KEY, [token] * 4, table.cells(first))
    second = computed(table, 8)
    cache.insert(KEY, [token] * 8, table.cells(second))  # the first session's cells are in use: the cache keeps them
    table.remove(first)
    return second


def test_idle_cells_in_front_of_a_tail_in_use_are_freed_at_the_price_of_the_tail(table: CellTable) -> None:
    cache = PrefixCache(table)
    older, newer = hide(table, cache, 1), hide(table, cache, 2)
    assert (cache.evictable_cells, table.used_cells) == (8, 24)
    assert cache.evict(3) == 3
    # The tail that was used least recently was let go, and then the end of what it hid.
    assert (cache.peek(KEY, [1] * 9), cache.peek(KEY, [2] * 9)) == (1, 8)
    assert cache.evict(100) == 5
    assert table.used_cells == table.length(older) + table.length(newer) == 16


def test_a_cell_cached_under_another_key_is_not_taken_over(table: CellTable) -> None:
    cache = PrefixCache(table)
    gone, running = computed(table, 3), computed(table, 3)
    cache.insert(("a",), [1, 2, 3], table.cells(gone))
    table.remove(gone)
    cache.insert(("b",), [1, 2, 3], table.cells(running))
    assert cache.insert(("a",), [1, 2, 3], table.cells(running)) == 0
    assert cache.match(("a",), [1, 2, 3, 4]) == (0, 1, 2)
    assert cache.match(("b",), [1, 2, 3, 4]) == (3, 4, 5)


def test_a_tail_in_use_is_not_met_again_by_every_eviction(table: CellTable) -> None:
    cache = PrefixCache(table)
    running = [computed(table, 5) for _ in range(4)]
    for number, sequence in enumerate(running):
        cache.insert(KEY, [number] * 5, table.cells(sequence))
    for number in range(10, 20):
        gone = computed(table, 5)
        cache.insert(KEY, [number] * 5, table.cells(gone))
        table.remove(gone)
    met: list[object] = []
    next_tail = cache._next_tail
    cache._next_tail = lambda: met.append(tail := next_tail()) or tail  # type: ignore[func-returns-value, method-assign]
    assert [cache.evict(5) for _ in range(10)] == [5] * 10
    assert len(met) == 4 + 10


# --- along a prompt ---


def test_a_place_in_the_middle_of_a_run_is_found_again_when_the_run_is_split_behind_it(table: CellTable) -> None:
    cache = PrefixCache(table)
    place = cache.find(KEY, [7] * 30)[1]
    reader = table.open()
    plan = table.begin()
    cache.grow(place, [7] * 30, table.grow(plan, reader, 0, 6))
    table.commit(plan)
    cache.settle(plan.cells)
    longer, other = computed(table, 20), computed(table, 14)
    cache.insert(KEY, [7] * 20, table.cells(longer))
    cache.insert(KEY, [7] * 12 + [1, 2], table.cells(other))
    assert cache.frontier(place, [7] * 30) == table.cells(reader)[5]
    assert cache.follow(place, [7] * 10 + [3] * 20) == list(table.cells(longer, 6, 10))
    assert place.position == 10


def test_a_place_is_lost_with_the_tokens_before_it_and_not_misled_by_what_grows_there_instead(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 10)
    cache.insert(KEY, [7] * 10, table.cells(sequence))
    place = cache.place(KEY, [7] * 30, 10)
    assert place is not None
    table.remove(sequence)
    cache.evict(4)  # of the same run that the place is in
    another = computed(table, 30)
    cache.insert(KEY, [7] * 6 + [8] * 24, table.cells(another))
    assert cache.frontier(place, [7] * 30) is None
    assert cache.follow(place, [7] * 30) == []
    assert cache.grow(place, [7] * 30, table.cells(another, 10, 12)) is None
    assert cache.place(KEY, [7] * 30, 10) is None


def test_a_prompt_that_finds_nothing_new_looks_at_no_token_behind_it(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 3000)
    cache.insert(KEY, [7] * 3000, table.cells(sequence))
    prompt = Counted([7] * 3000 + [8] * 3000)
    place = cache.find(KEY, prompt)[1]
    prompt.looked = 0
    assert cache.follow(place, prompt) == []
    assert prompt.looked <= 1


def test_growing_costs_the_tokens_that_are_added_and_not_those_before_them(table: CellTable) -> None:
    cache, sequence = PrefixCache(table), computed(table, 3000)
    cache.insert(KEY, [7] * 3000, table.cells(sequence))
    prompt = Counted([7] * 3000 + [8] * 500)
    place = cache.find(KEY, prompt)[1]
    prompt.looked = 0
    plan = table.begin()
    cells = table.grow(plan, sequence, 3000, 100)
    assert cache.grow(place, prompt, cells) == (3000, table.cells(sequence)[2999])
    assert prompt.looked <= 110
    assert cache.planned_from(table.cells(sequence)) == 3000


def test_what_hangs_on_a_planned_cell_goes_with_it(table: CellTable) -> None:
    cache = PrefixCache(table)
    writer, committed = table.open(), computed(table, 8)
    place = cache.find(KEY, [1] * 9)[1]
    plan = table.begin()
    cache.grow(place, [1] * 9, table.grow(plan, writer, 0, 4))
    cache.insert(KEY, [1] * 8, table.cells(committed))  # computed apart: its first four are not the cache's
    assert cache.cached_cells == 8
    cache.forget_planned()
    table.abort(plan)
    assert (cache.cached_cells, table.used_cells) == (0, 8)
    assert cache.insert(KEY, [1] * 8, table.cells(committed)) == 8
