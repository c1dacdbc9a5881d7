"""Finds the first of many waiting items that is narrow enough.

Owns items, each with a key and a width. It answers which item of at most a given width has the lowest key, in time
logarithmic in the widths and the items, however many items in front are too wide. Keys of different items differ.
Memory follows the items. Used where a step's last few tokens must not cost a walk past everybody who waits.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=int | str)
Key = TypeVar("Key", int, tuple[int, int])


class FirstFit(Generic[Item, Key]):
    def __init__(self, widest: int) -> None:
        """`widest`: no item is wider."""
        self._leaves = 1 << widest.bit_length()  # widths 0 to widest, rounded up to a power of two
        self._entries: dict[Item, tuple[Key, int]] = {}  # key and width of every item
        # By width: a heap of (key, item). An entry whose item has moved on stays until it comes to the top.
        self._heaps: dict[int, list[tuple[Key, Item]]] = {}
        self._moved_on = 0
        # A binary tree over the widths, as a sparse heap-ordered array: node i's children are 2i and 2i + 1, width w is
        # node leaves + w. A node holds the lowest (key, item) below it; a node with nothing below it is absent.
        self._lowest: dict[int, tuple[Key, Item]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item, key: Key, width: int) -> None:
        """Add an item, or move one that is there."""
        entry = (key, width)
        if self._entries.get(item) == entry:
            return
        self.remove(item)
        self._entries[item] = entry
        heappush(self._heaps.setdefault(width, []), (key, item))
        self._refresh(width)

    def remove(self, item: Item) -> None:
        """Take an item out; nothing happens if it is not there."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return
        self._moved_on += 1
        if self._moved_on > len(self._entries) + 64:
            self._sweep()
        self._refresh(entry[1])

    def key(self, item: Item) -> Key:
        return self._entries[item][0]

    def first(self, room: int) -> Item | None:
        """The item with the lowest key among those of width `room` at most."""
        if room < 0:
            return None
        lowest = self._lowest
        node = self._leaves + min(room, self._leaves - 1)
        best = lowest.get(node)
        while node > 1:
            if node & 1:  # everything below the left sibling is narrower
                other = lowest.get(node - 1)
                if other is not None and (best is None or other < best):
                    best = other
            node >>= 1
        return best[1] if best is not None else None

    def narrowest(self) -> int:
        """The least width of an item; there is one."""
        node = 1
        while node < self._leaves:
            node *= 2
            if node not in self._lowest:
                node += 1
        return node - self._leaves

    def keys(self) -> list[tuple[Key, Item]]:
        """Every item with its key, in no order."""
        return [(key, item) for item, (key, _) in self._entries.items()]

    def _refresh(self, width: int) -> None:
        """Work out a width's lowest item again, and what hangs on it up to the root."""
        heap, entries, lowest = self._heaps.get(width, []), self._entries, self._lowest
        while heap and entries.get(heap[0][1]) != (heap[0][0], width):
            heappop(heap)
            self._moved_on -= 1
        node = self._leaves + width
        best = heap[0] if heap else None
        if not heap:
            self._heaps.pop(width, None)
        while lowest.get(node) != best:
            if best is None:
                del lowest[node]
            else:
                lowest[node] = best
            other = lowest.get(node ^ 1)
            if other is not None and (best is None or other < best):
                best = other
            node >>= 1
            if not node:
                return

    def _sweep(self) -> None:
        """Throw out every entry whose item has moved on. Paid for by the moves since the last time."""
        for width, heap in self._heaps.items():
            heap[:] = {entry for entry in heap if self._entries.get(entry[1]) == (entry[0], width)}
            heapify(heap)
        self._moved_on = 0
