"""The pool of one tier's blocks. Knows nothing of requests or tensors.

Each block is in one of four states, and the four always add up (I1):

    clean ──allocate──► referenced ──release──► fenced ──step or copy ends──► clean
      ▲                    ▲   │                  │ hit                         or
      │                    │   └──release, nothing in flight──►┐                │
      │                    └────────────── hit ────────────────┤                ▼
      └───────────────── eviction, inside allocation ──────── cached-idle ◄─────┘

Given back is not reusable: a block released while a step or copy in flight may touch it is
fenced until that has ended. The fence bars only rewriting; published content may still be hit.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..protos.messages import BlockCounts
from .block_map import BlockState, StateArray
from .content import Content, Tier
from .content_index import ContentIndex
from .eviction_list import EvictionList
from .integrity import IntegrityError, check


class BlockPool:
    """Hands out block ids, counts who holds them, and keeps idle content until it must go."""

    def __init__(self, num_blocks: int, index: ContentIndex, tier: Tier = Tier.DEVICE) -> None:
        self.num_blocks = num_blocks
        self._tier = tier
        self._index = index
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack; low ids come first
        self._idle = EvictionList(num_blocks)
        self._refs = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        # The step after which a given-back block may be rewritten; 0 = none.
        self._fences = [0] * num_blocks
        self._pins = [0] * num_blocks  # copies between the tiers that touch it
        self._fence_queue: deque[tuple[int, list[int]]] = deque()
        self._num_fenced = 0
        self.num_evicted = 0

    @property
    def num_clean(self) -> int:
        """Blocks without content."""
        return len(self._clean)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could have now."""
        return len(self._clean) + len(self._idle)

    @property
    def num_fenced(self) -> int:
        """Blocks given back that will be free when what is in flight has ended."""
        return self._num_fenced

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing changed."""
        clean = self._clean
        if count == 1 and clean:
            block = clean.pop()
            self._refs[block] = 1
            return [block]
        missing = count - len(clean)
        if missing > len(self._idle):
            return None
        if missing > 0:
            blocks = self._evict(missing)
            blocks += reversed(clean)
            clean.clear()
        elif count:
            blocks = clean[: -count - 1 : -1]
            del clean[-count:]
        else:
            return []
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def reference(self, blocks: Sequence[int]) -> None:
        """One more holder each. An idle or fenced block is taken back into use."""
        refs = self._refs
        unused = [block for block in blocks if not refs[block]]
        if unused:
            idle = [block for block in unused if block in self._idle]
            self._idle.remove(idle)
            self._num_fenced -= len(unused) - len(idle)
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: Sequence[int], fence: int = 0) -> None:
        """One holder less each; `blocks` in table order, given back deepest first.

        fence: the last step in flight that may touch them; 0 = none.
        """
        refs = self._refs
        given_back: list[int] = []
        for block in reversed(blocks):
            count = refs[block] - 1
            assert count >= 0, f"block {block} released more often than referenced"
            refs[block] = count
            if not count:
                given_back.append(block)
        if fence and given_back:
            for block in given_back:
                self._fences[block] = fence
            self._fence_queue.append((fence, given_back))
            self._num_fenced += len(given_back)
        else:
            self._settle(given_back)

    def finish_step(self, step: int) -> None:
        """Steps up to this one have ended: their fences fall."""
        queue = self._fence_queue
        while queue and queue[0][0] <= step:
            fence, blocks = queue.popleft()
            # A block hit meanwhile is in use again, or was given back under a later fence.
            due = [block for block in blocks if self._fences[block] == fence]
            for block in due:
                self._fences[block] = 0
            fallen = [block for block in due if not self._refs[block] and not self._pins[block]]
            self._num_fenced -= len(fallen)
            self._settle(fallen)

    def pin(self, block: int) -> None:
        """A copy between the tiers touches it: not to be rewritten before `unpin`."""
        if not self._pins[block] and block in self._idle:
            self._idle.remove((block,))
            self._num_fenced += 1
        self._pins[block] += 1

    def unpin(self, block: int, evict_first: bool = False) -> None:
        """One such copy has ended. evict_first: it was its turn before the copy began."""
        assert self._pins[block] > 0, f"block {block} is not pinned"
        self._pins[block] -= 1
        if self._pins[block] or self._refs[block] or self._fences[block]:
            return
        self._num_fenced -= 1
        self._settle((block,), evict_first)

    def ref_count(self, block: int) -> int:
        """How many tables hold it."""
        return self._refs[block]

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds or touches: taking them costs capacity."""
        return self._idle.count(blocks)

    def content(self, block: int) -> Content | None:
        """What it is known to hold."""
        return self._contents[block]

    def publish(
        self, block: int, parent: Content, block_hash: bytes, tokens: bytes
    ) -> Content | None:
        """Let a full block be found by its content. None: refused, the hash collides."""
        content = self._index.publish(parent, block_hash, tokens, block, self._tier)
        if content is not None and (self._tier is Tier.DEVICE or content.blocks[1] == block):
            self._contents[block] = content  # the host keeps no duplicates
        return content

    def adopt(self, block: int, content: Content) -> None:
        """A copy has brought a content here that is published on the other tier."""
        self._index.attach(content, self._tier, block)
        self._contents[block] = content

    def unpublish(self, block: int) -> None:
        """Its content may not be found any more; who holds the block keeps it."""
        content = self._contents[block]
        if content is None:
            return
        self._contents[block] = None
        self._index.detach(content, self._tier, block)
        if block in self._idle:
            self._idle.remove((block,))
            self._clean.append(block)

    def touch(self, block: int) -> None:
        """It was of use just now: if idle, let it be the last to be evicted."""
        if block in self._idle:
            self._idle.remove((block,))
            self._idle.append((block,))

    def unpublish_all(self) -> int:
        """Drop the content of every block. Returns how many blocks had some."""
        published = [b for b, content in enumerate(self._contents) if content is not None]
        for block in published:
            self.unpublish(block)
        return len(published)

    def next_evicted(self, count: int) -> list[int]:
        """The blocks whose turn it is, first one first."""
        blocks: list[int] = []
        for block in self._idle:
            if len(blocks) == count:
                break
            blocks.append(block)
        return blocks

    def most_recent(self) -> Iterator[Content]:
        """Published contents: those in use, then the idle ones, last used first."""
        for block, content in enumerate(self._contents):
            if content is not None and self._refs[block]:
                yield content
        for block in reversed(self._idle):
            content = self._contents[block]
            assert content is not None, f"idle block {block} has no content"
            yield content

    def stats(self) -> BlockCounts:
        """The four states now."""
        clean, idle = len(self._clean), len(self._idle)
        return BlockCounts(
            clean=clean,
            cached_idle=idle,
            referenced=self.num_blocks - clean - idle - self._num_fenced,
            fenced=self._num_fenced,
        )

    def states(self) -> StateArray:
        """The state of every block, [num_blocks] uint8 of BlockState: for viewers, costs a scan."""
        refs = np.array(self._refs)
        states = np.full(self.num_blocks, BlockState.FENCED, dtype=np.uint8)
        states[self._clean] = BlockState.CLEAN
        states[list(self._idle)] = BlockState.CACHED
        states[refs == 1] = BlockState.REFERENCED
        states[refs > 1] = BlockState.SHARED
        return states

    def check_integrity(self) -> None:
        """Count every block's state afresh and compare with the books."""
        self._idle.check_integrity()
        clean = set(self._clean)
        check(len(clean) == len(self._clean), "a block is clean twice")
        num_fenced = 0
        for block in range(self.num_blocks):
            refs, content = self._refs[block], self._contents[block]
            is_idle, is_clean = block in self._idle, block in clean
            is_fenced = not refs and bool(self._fences[block] or self._pins[block])
            is_found = content is not None and content.blocks[self._tier] == block
            agrees = (
                refs >= 0
                and self._pins[block] >= 0
                and (refs > 0) + is_idle + is_clean + is_fenced == 1
                and not (is_clean and content is not None)
                and (is_found or not is_idle)
                and (content is None or is_found or block in (content.duplicates or ()))
            )
            if not agrees:  # the message costs more than all checks
                fence = self._fences[block]
                raise IntegrityError(f"block {block}: refs {refs}, fence {fence}, {content}")
            num_fenced += is_fenced
        check(num_fenced == self._num_fenced, f"{num_fenced} fenced, {self._num_fenced} counted")

    def check_holders(self, holders: list[int]) -> None:
        """Every reference is somebody's. holders: who else counts, by block."""
        if self._refs != holders:
            refs = enumerate(zip(self._refs, holders, strict=True))
            wrong = {block: counts for block, counts in refs if counts[0] != counts[1]}
            raise IntegrityError(f"(references, holders) of blocks: {wrong}")

    def _settle(self, blocks: Iterable[int], evict_first: bool = False) -> None:
        """Blocks that nobody holds or touches: idle if they are worth finding, else clean."""
        contents, pins, tier = self._contents, self._pins, self._tier
        clean = self._clean.append
        idle: list[int] = []
        for block in blocks:
            content = contents[block]
            if pins[block]:
                self._num_fenced += 1  # a copy still touches it
            elif content is None:
                clean(block)
            elif content.blocks[tier] == block:
                idle.append(block)
            else:
                contents[block] = None
                self._index.detach(content, tier, block)
                clean(block)
        if evict_first:
            self._idle.append_first(idle)
        elif idle:
            self._idle.append(idle)

    def _evict(self, count: int) -> list[int]:
        """The next in turn, without their contents."""
        blocks = self._idle.pop(count)
        self._index.detach_all(self._contents, self._tier, blocks)
        self.num_evicted += count
        return blocks
