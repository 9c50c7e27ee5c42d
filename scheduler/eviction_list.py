"""The order in which cached-idle blocks are evicted. Knows block ids and nothing else.

A doubly linked list in two arrays made once: append, remove and pop are O(1) and make no object.

    head ─ next evicted                      tail ─ evicted last
    [num_blocks] ⇄ 17 ⇄ 4 ⇄ 9 ⇄ … ⇄ 3 ⇄ [num_blocks]        the ring closes in a node of its own
"""

from collections.abc import Iterable, Iterator

from .integrity import check


class EvictionList:
    """Least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._ring = num_blocks
        self._next = list(range(num_blocks + 1))  # a block out of the list points to itself
        self._previous = list(range(num_blocks + 1))
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._ring]
        while block != self._ring:
            yield block
            block = self._next[block]

    def __reversed__(self) -> Iterator[int]:
        block = self._previous[self._ring]
        while block != self._ring:
            yield block
            block = self._previous[block]

    def __contains__(self, block: int) -> bool:
        return self._next[block] != block

    def append(self, blocks: Iterable[int]) -> None:
        """Make them the last to be evicted, in this order."""
        following, previous, ring = self._next, self._previous, self._ring
        last = previous[ring]
        count = 0
        for block in blocks:
            following[last] = block
            previous[block] = last
            last = block
            count += 1
        following[last] = ring
        previous[ring] = last
        self._length += count

    def append_first(self, blocks: Iterable[int]) -> None:
        """Make each the next to be evicted, the last of them before the others."""
        following, previous, ring = self._next, self._previous, self._ring
        for block in blocks:
            first = following[ring]
            previous[first] = block
            following[block] = first
            previous[block] = ring
            following[ring] = block
            self._length += 1

    def remove(self, blocks: Iterable[int]) -> None:
        """Take them out, wherever they stand."""
        following, previous = self._next, self._previous
        count = 0
        for block in blocks:
            after, before = following[block], previous[block]
            following[before] = after
            previous[after] = before
            following[block] = block
            count += 1
        self._length -= count

    def pop(self, count: int) -> list[int]:
        """Take out the next `count` to be evicted; there must be so many."""
        assert count <= self._length, f"{count} of {self._length} blocks to evict"
        following, ring = self._next, self._ring
        blocks: list[int] = []
        block = following[ring]
        for _ in range(count):
            blocks.append(block)
            after = following[block]
            following[block] = block
            block = after
        following[ring] = block
        self._previous[block] = ring
        self._length -= count
        return blocks

    def count(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the list."""
        following = self._next
        return sum([following[block] != block for block in blocks])

    def check_integrity(self) -> None:
        """Both directions tell the same, and the length is right."""
        forward = list(self)
        check(len(forward) == self._length, f"{len(forward)} linked, {self._length} counted")
        block, backward = self._previous[self._ring], list[int]()
        while block != self._ring:
            backward.append(block)
            block = self._previous[block]
        check(forward == backward[::-1], "the eviction list differs between its directions")
