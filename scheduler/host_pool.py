"""The host tier's blocks: what is there, what is on its way, what a swapped sequence holds.

The same pool as on the device with other words for its states: pending = fenced by the copy that
fills it, ready = cached-idle, pinned or holding a swapped sequence = referenced. Least recently
used ready blocks make room. Decides about blocks; the copies are `TierCopies`'.
"""

from collections.abc import Iterator
from enum import Enum, auto

from ..protos.messages import BlockCounts
from .block_map import BlockState, StateArray
from .block_pool import BlockPool
from .content import Content, Tier
from .content_index import ContentIndex
from .integrity import check


class Lookup(Enum):
    """Whether a content is on the host."""

    MISS = auto()
    HIT_PENDING = auto()
    HIT = auto()


class HostPool:
    """Blocks of the host tier. A store that finds no room is refused, which is normal."""

    def __init__(self, num_blocks: int, index: ContentIndex) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks, index, Tier.HOST)
        self._pending: dict[int, int] = {}  # content id → the block being filled with it
        self.num_refused = 0

    def lookup(self, content: Content) -> Lookup:
        """Whether the content is here, or will be."""
        if content.blocks[Tier.HOST] is not None:
            return Lookup.HIT
        return Lookup.HIT_PENDING if content.id in self._pending else Lookup.MISS

    def block_of(self, content: Content) -> int:
        """Where a hit, pending or not, is or will be."""
        block = content.blocks[Tier.HOST]
        return self._pending[content.id] if block is None else block

    def begin_stores(self, contents: list[Content | None]) -> list[int] | None:
        """A block each, filled by a copy from now on and referenced by the caller; None among
        `contents` stands for a block that only its owner knows. None: refused, no room."""
        blocks = self._pool.allocate(len(contents))
        if blocks is None:
            self.num_refused += 1
            return None
        for block, content in zip(blocks, contents, strict=True):
            self._pool.pin(block)
            if content is not None:
                self._pending[content.id] = block
        return blocks

    def end_store(self, block: int, content: Content | None, content_id: int, ok: bool) -> None:
        """The copy into `block` has ended; only now can it be found, and only if it succeeded."""
        if content is not None:
            self._pending.pop(content_id, None)
            if ok and content.id == content_id and content.blocks[Tier.HOST] is None:
                self._pool.adopt(block, content)
        self._pool.unpin(block)

    def end_import(self, block: int) -> None:
        """The copy into a block that only its owner knows has ended, well or not."""
        self._pool.unpin(block)

    def publish(
        self, block: int, parent: Content, block_hash: bytes, tokens: bytes
    ) -> Content | None:
        """Let what was brought into a held block be found; where the content is on the host
        already, the block stays nobody's. None: refused, the hash collides."""
        return self._pool.publish(block, parent, block_hash, tokens)

    def begin_load(self, block: int) -> None:
        """A copy reads it: it must stay."""
        self._pool.touch(block)
        self._pool.pin(block)

    def end_load(self, block: int, ok: bool) -> None:
        """That copy has ended; what could not be read is not found again."""
        if not ok:
            self._pool.unpublish(block)
        self._pool.unpin(block)

    def reference(self, blocks: list[int]) -> None:
        """A swapped sequence holds them."""
        self._pool.reference(blocks)

    def release(self, blocks: list[int]) -> None:
        """It does no longer."""
        self._pool.release(blocks)

    def forget(self, content: Content) -> None:
        """The content may not be found any more."""
        block = content.blocks[Tier.HOST]
        if block is not None:
            self._pool.unpublish(block)

    def clear(self) -> int:
        """Drop every content. Returns how many there were."""
        return self._pool.unpublish_all()

    def ref_count(self, block: int) -> int:
        """How many swapped sequences hold it."""
        return self._pool.ref_count(block)

    def most_recent(self) -> Iterator[Content]:
        """Contents, last used first."""
        return self._pool.most_recent()

    @property
    def num_evicted(self) -> int:
        """Ready blocks that made room for others."""
        return self._pool.num_evicted

    def stats(self) -> BlockCounts:
        """The four states now."""
        return self._pool.stats()

    def states(self) -> StateArray:
        """The state of every block; what is ready counts as HOST."""
        states = self._pool.states()
        states[states == BlockState.CACHED] = BlockState.HOST
        return states

    def check_holders(self, holders: list[int]) -> None:
        """See BlockPool."""
        self._pool.check_holders(holders)

    def check_integrity(self) -> None:
        """The pool's books, and that what is pending is not found yet."""
        self._pool.check_integrity()
        check(
            len(set(self._pending.values())) == len(self._pending),
            f"a host block is filled twice: {self._pending}",
        )
