"""The longest prefix of a prompt whose K and V lie in the pool already, and what to give up when room is short.

Owns a radix tree over token ids for one `CellTable`: an edge is a run of tokens and the cell of each. What it caches
it refers to in the table, so a cached token stays when its session goes, and a session keeps its cells when the cache
gives them up. Sharing is by the token, not by the block; the last token of a prompt is never taken from the cache,
because somebody has to compute the logits after it.

A key separates what must not be shared: whose, under which adapter, on which weights. Equal tokens under different keys
never meet.

Cells may be put in when they are planned (`grow`), before a worker has written them: who shares one is planned in the
same step or a later one, and steps run in order. They count as planned until `settle`; `forget_planned` takes out all
of them, when the steps that were to write them are taken back. A `Place` says where in the tree a prompt that is still
being prefilled has come to, so going on from there costs the tokens that follow, not those before.

Under pressure the token that nobody can reach past and that was used least recently goes first: so a tail goes from
its end, and is used up before another is touched. What a sequence refers to counts as used now. Lookups and insertions
cost time in proportion to the tokens they match or are given; evictions, to the tokens they free, times the logarithm
of the tails. One thread calls it.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from microtome.planner.cells import CellTable
from microtome.planner.errors import BadInput
from microtome.planner.types import Cell

PrefixKey = tuple[str, ...]


class _Node:
    """The run of tokens from its parent to it. The root's is empty."""

    __slots__ = ("cells", "children", "cuts", "end", "key", "parent", "queued", "serial", "tokens", "uses")

    def __init__(self, parent: "_Node | None", key: PrefixKey, serial: int) -> None:
        self.parent = parent  # None: the root of `key`, or thrown away
        self.key = key
        self.serial = serial  # settles equal stamps
        self.queued = False  # whether it has an entry in the heap of tails
        self.end = 0  # tokens from the root to its last one
        self.cuts = 0  # how often tokens of it were dropped
        self.tokens: list[int] = []
        self.cells: list[Cell] = []
        self.children: dict[int, _Node] = {}  # by first token
        # (count, stamp): the first `count` tokens were used then. Counts fall from all tokens on, stamps grow: a use is
        # kept only while some token has no later one.
        self.uses: list[tuple[int, int]] = []

    @property
    def stamp(self) -> int:
        """When the last token was used last."""
        return self.uses[0][1]

    def use(self, count: int, stamp: int) -> None:
        """The first `count` tokens are used, one at least."""
        if count == len(self.tokens):
            self.uses = [(count, stamp)]
            return
        while self.uses[-1][0] <= count:
            self.uses.pop()
        self.uses.append((count, stamp))

    def cut(self, count: int) -> None:
        """Drop the last `count` tokens."""
        self.end -= count
        self.cuts += 1
        del self.tokens[-count:], self.cells[-count:]
        length = len(self.tokens)
        while len(self.uses) > 1 and self.uses[1][0] >= length:
            self.uses.pop(0)
        self.uses[0] = (length, self.stamp)


class Place:
    """Where the first `position` tokens of a history end in the tree. Valid only with that history's tokens."""

    __slots__ = ("cuts", "key", "node", "position")

    def __init__(self, key: PrefixKey, node: _Node | None, position: int) -> None:
        self.key = key
        self.position = position
        self.move(node)

    def move(self, node: _Node | None) -> None:
        self.node = node  # of the last token, or one behind it; None at position 0
        self.cuts = node.cuts if node is not None else 0


class PrefixCache:
    def __init__(self, table: CellTable) -> None:
        self._table = table
        self._roots: dict[PrefixKey, _Node] = {}
        self._tails: list[tuple[int, int, _Node]] = []  # heap by last use, perhaps outdated; one entry a node at most
        self._clock = 0
        self._serial = 0
        self._cached = 0
        self._planned: set[Cell] = set()  # of the cached cells, those that no worker is known to have written
        self.hit_tokens = 0  # of prompts matched: taken from the cache
        self.miss_tokens = 0  # of prompts matched: left to compute
        self.evicted_tokens = 0

    @property
    def cached_cells(self) -> int:
        return self._cached

    @property
    def evictable_cells(self) -> int:
        """Cells that `evict` can free: no sequence refers to them."""
        return self._table.idle_cells

    def match(self, key: PrefixKey, tokens: Sequence[int]) -> tuple[Cell, ...]:
        """The cells of the longest cached prefix of a prompt, all but its last token at most. Counts as a use.

        The caller refers to them (`CellTable.open`) before it evicts anything.
        """
        return self._match(key, tokens)[0]

    def find(self, key: PrefixKey, tokens: Sequence[int]) -> tuple[tuple[Cell, ...], Place]:
        """As `match`, and where in the tree that prefix ends."""
        cells, path = self._match(key, tokens)
        return cells, Place(key, path[-1] if path else None, len(cells))

    def peek(self, key: PrefixKey, tokens: Sequence[int]) -> int:
        """How many tokens `match` would find. No use, and not counted."""
        return self._descend(key, tokens, len(tokens) - 1)[1]

    def insert(self, key: PrefixKey, tokens: Sequence[int], cells: Sequence[Cell]) -> int:
        """Cache committed tokens and their cells; how many tokens were new. Counts as a use of the whole path.

        Where the cache has another cell for a token and nobody else uses that one, it takes the given cell instead, so
        a prefix computed twice is not kept twice.

        Raises `BadInput` if the counts differ, or if a cell is free or cached elsewhere; nothing has changed then.
        """
        if len(tokens) != len(cells):
            raise BadInput(f"{len(tokens)} tokens and {len(cells)} cells cannot be cached together")
        if not tokens:
            return 0
        path, at, count = self._descend(key, tokens, len(tokens))
        fresh = list(cells[at:])
        self._table.hold(fresh)  # refuses before the tree changes

        node = path[-1] if path else self._root(key)
        if fresh:
            if path and count < len(node.tokens):
                node = path[-1] = self._split(node, count)
            if node.parent is None or node.children:
                child = self._new_node(node, key)
                node.children[tokens[at]] = child
                path.append(child)
                node = child
            self._append(node, tokens[at:], fresh)
            count = len(node.tokens)
        self._use(path, count)
        self._adopt(path, cells)
        self._queue(node)
        return len(fresh)

    # --- along a prompt that is being prefilled ---

    def place(self, key: PrefixKey, tokens: Sequence[int], count: int) -> Place | None:
        """Where the first `count` tokens of a prompt end in the tree; None: not all of them are cached. No use.

        The rest counts as missed, as with `match`; what `follow` finds of it does not.
        """
        path, at, _ = self._descend(key, tokens, count)
        if at < count:
            return None
        self.miss_tokens += len(tokens) - count
        return Place(key, path[-1] if path else None, at)

    def follow(self, place: Place, tokens: Sequence[int]) -> list[Cell]:
        """As `match`, for what lies behind `place`: the cells of the longest cached run. The place moves to its end.

        Where nothing is, one look-up says so.
        """
        cells = self._go_on(place, tokens, len(tokens) - 1)
        self.hit_tokens += len(cells)
        self.miss_tokens -= len(cells)
        return cells

    def leads_on(self, place: Place, tokens: Sequence[int]) -> bool:
        """Whether `follow` would find something: one look-up. No use."""
        node = self._node_at(place, tokens) if place.position else self._roots.get(place.key)
        if node is None or place.position >= len(tokens) - 1:
            return False
        count = place.position - (node.end - len(node.tokens))
        token = tokens[place.position]
        return node.tokens[count] == token if count < len(node.tokens) else token in node.children

    def grow(self, place: Place, tokens: Sequence[int], cells: Sequence[Cell]) -> tuple[int, PrefixKey | Cell] | None:
        """Cache planned cells, one for each token behind `place`. The place moves to the end of them.

        What is cached there already stays as it is. Returns the position of the first token that was not, and the
        `frontier` there; None if all were, or the place is lost: then nothing was cached. The caller refers to the
        cells until they are settled.
        """
        begin = place.position
        end = begin + len(cells)
        self._go_on(place, tokens, end)
        at, frontier = place.position, self.frontier(place, tokens)
        fresh = list(cells[at - begin :])
        if frontier is None or not fresh:
            return None
        self._table.hold(fresh)
        node = place.node if place.node is not None else self._root(place.key)
        count = at - (node.end - len(node.tokens))
        if count < len(node.tokens):
            node = self._split(node, count)
        if node.parent is None or node.children:
            child = self._new_node(node, place.key)
            node.children[tokens[at]] = child
            node = child
        self._append(node, tokens[at:end], fresh)
        self._planned.update(fresh)
        place.position = end
        place.move(node)
        self._use(_path_to(node), len(node.tokens))
        self._queue(node)
        return at, frontier

    def frontier(self, place: Place, tokens: Sequence[int]) -> PrefixKey | Cell | None:
        """What two places have in common exactly if they are the same: the cell before it, or the key at the root.

        None: the tree was cut in front of it.
        """
        if not place.position:
            return place.key
        node = self._node_at(place, tokens)
        return None if node is None else node.cells[place.position - 1 - (node.end - len(node.tokens))]

    def planned_from(self, cells: Sequence[Cell]) -> int:
        """How many of these cells come before the first that is planned only."""
        planned = self._planned
        if not planned or planned.isdisjoint(cells):
            return len(cells)
        return next(at for at, cell in enumerate(cells) if cell in planned)

    def settle(self, cells: Sequence[Cell]) -> None:
        """A worker has written these cells, whether they are cached or not."""
        if self._planned:
            self._planned.difference_update(cells)

    def forget_planned(self) -> None:
        """Give up every planned cell and what hangs on it: no worker will write them.

        Costs the whole tree: for the rare step that a worker refused.
        """
        nodes = list(self._roots.values()) if self._planned else []
        while nodes:
            node = nodes.pop()
            first = self.planned_from(node.cells)
            if first == len(node.cells):
                nodes += node.children.values()
            else:
                self._fell(node, first)
        assert not self._planned, "every planned cell is in the tree"

    # --- giving up ---

    def evict(self, cells_needed: int) -> int:
        """Free at least `cells_needed` cells if so many can be freed, else all that can; how many were freed."""
        freed = 0
        in_use: list[_Node] = []
        while freed < cells_needed and self._table.idle_cells:
            node = self._next_tail()
            if node is None:
                # Only tails that sequences use are left. One with idle cells in front of it (its prefix was computed
                # twice) the cache lets go: that frees nothing of it, but what lies in front becomes a tail.
                hiding = [tail for tail in in_use if self._hides_idle(tail)]
                if not hiding:
                    break
                node = min(hiding, key=lambda tail: tail.stamp)
                in_use.remove(node)
                self._let_go(node)
                continue
            # As far as its tokens were used last at the same time.
            older = node.uses[0][0] - (node.uses[1][0] if len(node.uses) > 1 else 0)
            idle = self._idle_at_end(node, min(older, cells_needed - freed))
            if idle:
                self._cut(node, idle)
                freed += idle
                self._queue_if_tail(node)
            else:
                in_use.append(node)
        for node in sorted(in_use, key=lambda tail: tail.stamp):
            # What is in use is used now. So the next call does not meet it before it has met every other tail.
            # In front of it nothing can go before it anyway, whenever that was used.
            self._use([node], len(node.tokens))
            self._queue(node)
        self.evicted_tokens += freed
        return freed

    def clear(self) -> None:
        """Give up everything cached."""
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            self._table.release(node.cells)
            node.cuts += 1
        self._roots.clear()
        self._tails.clear()
        self._planned.clear()
        self._cached = 0

    # --- the tree ---

    def _match(self, key: PrefixKey, tokens: Sequence[int]) -> tuple[tuple[Cell, ...], list[_Node]]:
        cells: list[Cell] = []
        path, _, last = self._descend(key, tokens, len(tokens) - 1)
        for node in path[:-1]:
            cells += node.cells
        if path:
            cells += path[-1].cells[:last]
            self._use(path, last)
        self.hit_tokens += len(cells)
        self.miss_tokens += len(tokens) - len(cells)
        return tuple(cells), path

    def _root(self, key: PrefixKey) -> _Node:
        root = self._roots.get(key)
        if root is None:
            self._serial += 1
            root = self._roots[key] = _Node(None, key, self._serial)
        return root

    def _new_node(self, parent: _Node, key: PrefixKey) -> _Node:
        self._serial += 1
        node = _Node(parent, key, self._serial)
        node.end = parent.end
        return node

    def _descend(self, key: PrefixKey, tokens: Sequence[int], end: int) -> tuple[list[_Node], int, int]:
        """Where the first `end` tokens lead: nodes without the root; tokens matched in all; those of the last node."""
        path: list[_Node] = []
        node, at, count = self._roots.get(key), 0, 0
        while node is not None and at < end:
            node = node.children.get(tokens[at])
            if node is not None:
                count = _common(node.tokens, tokens, at, end)
                path.append(node)
                at += count
                if count < len(node.tokens):
                    break
        return path, at, count

    def _append(self, node: _Node, tokens: Sequence[int], cells: list[Cell]) -> None:
        node.tokens += tokens
        node.cells += cells
        node.end += len(cells)
        self._cached += len(cells)

    def _node_at(self, place: Place, tokens: Sequence[int]) -> _Node | None:
        """The node of the last token before a place that is not at the root; None: the tree was cut in front of it."""
        node = place.node
        assert node is not None
        if node.cuts != place.cuts:
            path, at, _ = self._descend(place.key, tokens, place.position)
            if at < place.position:
                return None
            node = path[-1]
        while place.position <= node.end - len(node.tokens):  # it was split
            assert node.parent is not None
            node = node.parent
        place.move(node)
        return node

    def _go_on(self, place: Place, tokens: Sequence[int], end: int) -> list[Cell]:
        """Move a place along what is cached up to position `end`; the cells passed. A use of all on the way."""
        at, cells = place.position, list[Cell]()
        node = self._node_at(place, tokens) if at else self._roots.get(place.key)
        if node is None:
            return cells
        count = at - (node.end - len(node.tokens))
        while at < end:
            if count == len(node.tokens):
                child = node.children.get(tokens[at])
                if child is None:
                    break
                node, count = child, 0
            more = _common(node.tokens, tokens, at, end, count)
            cells += node.cells[count : count + more]
            at += more
            count += more
            if count < len(node.tokens):
                break
        if cells:
            place.position = at
            place.move(node)
            self._use(_path_to(node), count)
        return cells

    def _split(self, node: _Node, count: int) -> _Node:
        """Put a node in front of `node` that takes its first `count` tokens, and return it. It is used next."""
        assert node.parent is not None
        front = self._new_node(node.parent, node.key)
        front.tokens, front.cells = node.tokens[:count], node.cells[:count]
        front.end = node.end - len(node.tokens) + count
        del node.tokens[:count], node.cells[:count]
        node.uses = [(used - count, stamp) for used, stamp in node.uses if used > count]
        node.parent.children[front.tokens[0]] = front
        front.children[node.tokens[0]] = node
        node.parent = front
        return front

    def _use(self, path: list[_Node], count: int) -> None:
        """All of a path is used now, of its last node the first `count` tokens."""
        self._clock += 1
        for node in path[:-1]:
            node.use(len(node.tokens), self._clock)
        path[-1].use(count, self._clock)

    def _adopt(self, path: list[_Node], cells: Sequence[Cell]) -> None:
        """Exchange idle cells along a path for the given ones of the same tokens."""
        table, at = self._table, 0
        for node in path:
            count = min(len(node.cells), len(cells) - at)
            given = list(cells[at : at + count])
            if node.cells[:count] != given:
                for i, cell in enumerate(given):
                    own = node.cells[i]
                    if own != cell and table.references(own) == 1 and not table.is_held(cell):
                        table.hold((cell,))
                        table.release((own,))
                        node.cells[i] = cell
            at += count

    # --- tails ---

    def _queue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._tails, (node.stamp, node.serial, node))

    def _queue_if_tail(self, node: _Node) -> None:
        """After a cut: queue what is now the end of the path, if it is one."""
        tail = node if node.tokens else node.parent
        if tail is not None and tail.parent is not None and not tail.children:
            self._queue(tail)

    def _next_tail(self) -> _Node | None:
        """Take out the least recently used tail."""
        while self._tails:
            stamp, _, node = heappop(self._tails)
            node.queued = False
            if node.children or not node.tokens:
                continue
            if node.stamp > stamp:
                self._queue(node)  # used since
                continue
            return node
        return None

    def _idle_at_end(self, node: _Node, limit: int) -> int:
        """How many cells at the end of a tail nobody else refers to, up to `limit`."""
        references, idle = self._table.references, 0
        while idle < min(limit, len(node.cells)) and references(node.cells[-1 - idle]) == 1:
            idle += 1
        return idle

    def _let_go(self, node: _Node) -> None:
        """Give up a tail that is in use, up to the first idle cell or the next branch."""
        references = self._table.references
        while True:
            used = 0
            while used < len(node.cells) and references(node.cells[-1 - used]) > 1:
                used += 1
            if used:
                self._cut(node, used)
            if node.tokens or node.parent is None:
                break
            node = node.parent
            if node.children:
                return
        if node.parent is not None:
            self._queue(node)

    def _hides_idle(self, tail: _Node) -> bool:
        """Whether there is an idle cell on the way to the end of a tail."""
        references, node = self._table.references, tail
        while node.parent is not None:
            if any(references(cell) == 1 for cell in node.cells):
                return True
            node = node.parent
        return False

    def _fell(self, node: _Node, first: int) -> None:
        """Give up a node's tokens from index `first` on and everything behind it."""
        below = list(node.children.values())
        node.children.clear()
        while below:
            gone = below.pop()
            below += gone.children.values()
            gone.children.clear()
            self._table.release(gone.cells)
            self.settle(gone.cells)
            self._cached -= len(gone.cells)
            gone.cut(len(gone.cells))
        self._cut(node, len(node.tokens) - first)
        self._queue_if_tail(node)

    def _cut(self, node: _Node, count: int) -> None:
        """Give up the last `count` tokens of a tail; with its last token the tail itself goes."""
        cells, first = node.cells[-count:], node.tokens[0]
        self._table.release(cells)
        self.settle(cells)
        node.cut(count)
        self._cached -= count
        if not node.tokens:
            assert node.parent is not None
            del node.parent.children[first]
            if node.parent.parent is None and not node.parent.children:
                del self._roots[node.key]


def _path_to(node: _Node) -> list[_Node]:
    """The nodes from the root, which is left out, to this one."""
    path = []
    at: _Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    path.reverse()
    return path


def _common(edge: list[int], tokens: Sequence[int], start: int, end: int, skip: int = 0) -> int:
    """How many tokens of `edge`, from `skip` on, equal those of `tokens` from `start` on, at most up to `end`.

    Compares runs that double in length, so that the time follows the answer and not the length of the edge.
    """
    limit = min(len(edge) - skip, end - start)
    low, run = 0, 16
    while low < limit:
        high = min(limit, low + run)
        if edge[skip + low : skip + high] != list(tokens[start + low : start + high]):
            while high - low > 1:
                middle = (low + high) // 2
                if edge[skip + low : skip + middle] == list(tokens[start + low : start + middle]):
                    low = middle
                else:
                    high = middle
            return low
        low, run = high, run * 2
    return low
