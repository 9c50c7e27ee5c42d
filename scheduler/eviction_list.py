"""The order in which cached-idle blocks are evicted. Knows block ids and nothing else.

A doubly linked list in two arrays made once: append, remove and pop are O(1) and make no object.

    head ─ next evicted                      tail ─ evicted last
    [num_blocks] ⇄ 17 ⇄ 4 ⇄ 9 ⇄ … ⇄ 3 ⇄ [num_blocks]        the ring closes in a node of its own
"""

from collections.abc import Iterator

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

    def __contains__(self, block: int) -> bool:
        return self._next[block] != block

    def append(self, block: int) -> None:
        """Make it the last to be evicted."""
        ring = self._ring
        last = self._previous[ring]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = ring
        self._previous[ring] = block
        self._length += 1

    def append_first(self, block: int) -> None:
        """Make it the next to be evicted."""
        ring = self._ring
        first = self._next[ring]
        self._previous[first] = block
        self._next[block] = first
        self._previous[block] = ring
        self._next[ring] = block
        self._length += 1

    def remove(self, block: int) -> None:
        """Take it out, wherever it stands."""
        following = self._next[block]
        before = self._previous[block]
        self._next[before] = following
        self._previous[following] = before
        self._next[block] = self._previous[block] = block
        self._length -= 1

    def pop(self) -> int:
        """Take out the next to be evicted. The list must not be empty."""
        block = self._next[self._ring]
        assert block != self._ring, "the eviction list is empty"
        self.remove(block)
        return block

    def check_integrity(self) -> None:
        """Both directions tell the same, and the length is right."""
        forward = list(self)
        check(len(forward) == self._length, f"{len(forward)} linked, {self._length} counted")
        block, backward = self._previous[self._ring], list[int]()
        while block != self._ring:
            backward.append(block)
            block = self._previous[block]
        check(forward == backward[::-1], "the eviction list differs between its directions")
