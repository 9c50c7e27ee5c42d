"""Block tables: which blocks a sequence holds, where it shares them, what of them is published.

Knows rows, tokens and both tiers' pools; not who runs next. A table is append-only while its
row runs; copy-on-write replaces its last entry, wrong guesses cut it. Every operation is atomic:
it takes all the blocks it needs, or none and nothing has changed.
"""

from collections.abc import Sequence as Array

import numpy as np

from .block_hash import extend_chain, num_equal, split_blocks, stride_blocks
from .block_pool import BlockPool
from .content import Content, Tier
from .content_index import ContentIndex
from .host_pool import HostPool
from .host_tier import HostTier, Move
from .integrity import check
from .output import DeviceCopy, Int32Array
from .prefix import Prefix, place_loads
from .request import HashChain, Publication, Sequence
from .running_batch import RunningBatch

# A row whose next block shall never be published.
_NEVER = np.iinfo(np.int32).max


_NOTHING = Prefix()


class KVCacheManager:
    """The tables of the rows in `batch` over one replica's pools."""

    def __init__(
        self,
        batch: RunningBatch,
        pool: BlockPool,
        host: HostPool,
        index: ContentIndex,
        block_size: int,
    ) -> None:
        self.block_size = block_size
        self._batch = batch
        self._pool = pool
        self._host = host
        self._index = index
        max_num_blocks = -(-batch.token_ids.shape[1] // block_size)
        self._tables: Int32Array = np.zeros((batch.num_rows, max_num_blocks), dtype=np.int32)
        self._num_blocks = [0] * batch.num_rows
        # Rows whose last block was shared by a fork and has not been written to since.
        self._shared_tails: set[int] = set()
        self._stride = stride_blocks(block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks(self, row: int) -> int:
        """Length of a row's table."""
        return self._num_blocks[row]

    def table(self, row: int) -> Int32Array:
        """A row's blocks in order: int32 [num_blocks], a copy."""
        return self._tables[row, : self._num_blocks[row]].copy()

    def blocks(self, row: int) -> list[int]:
        """A row's blocks in order."""
        return self._tables[row, : self._num_blocks[row]].tolist()

    def find_prefix(self, sequence: Sequence, tier: HostTier, loads_pay: bool) -> Prefix:
        """The longest published prefix of a waiting sequence that leaves a token to compute.

        loads_pay: whether blocks that are only on the host count.
        """
        limit = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_chain(sequence, sequence.token_ids, limit)
        root = self._index.root(sequence.request.root_hash)
        chain = sequence.chain
        contents = self._index.lookup(root, chain.hashes[:limit], chain.tokens[:limit])
        if not contents:
            return _NOTHING
        device_blocks = [b for content in contents if (b := content.blocks[0]) is not None]
        if len(device_blocks) == len(contents):
            num_idle = self._pool.count_idle(device_blocks)
            return Prefix(len(contents) * self.block_size, device_blocks, (), contents, num_idle)
        return self._two_tier_prefix(contents, tier, loads_pay)

    def num_coming(self, sequence: Sequence, prefix: Prefix, ends: Int32Array) -> int:
        """Positions after `prefix` that `sequence` shares with a row, all of which that row has
        computed and can publish when rows have come to `ends`. int32 [rows]."""
        batch, place = self._batch, prefix.num_computed // self.block_size
        limit = (len(sequence.token_ids) - 1) // self.block_size
        wanted = sequence.chain.hashes[:limit]
        if place == len(wanted):
            return 0
        publishes = (batch.sequence_ids != 0) & (batch.next_publish <= ends)
        for row in publishes.nonzero()[0].tolist():
            shared = num_equal(wanted, batch.sequence(row).chain.hashes)
            if place < shared <= int(ends[row]) // self.block_size:
                return (shared - place) * self.block_size
        return 0

    def _two_tier_prefix(self, contents: list[Content], tier: HostTier, loads_pay: bool) -> Prefix:
        device_blocks: list[int | None] = []
        for content in contents:
            block = content.blocks[Tier.DEVICE]
            if block is None:
                block = tier.arriving(content)
            if block is None and not loads_pay:
                break
            device_blocks.append(block)
        count = len(device_blocks)
        host_blocks = [content.blocks[Tier.HOST] for content in contents[:count]]
        return self._prefix(count * self.block_size, device_blocks, host_blocks, contents[:count])

    def find_swapped(self, sequence: Sequence, tier: HostTier) -> Prefix:
        """What a swapped sequence left, on the device where it still is."""
        swapped = sequence.swapped
        assert swapped is not None, f"{sequence} is not swapped"
        device_blocks: list[int | None] = []
        contents: list[Content | None] = []
        for entry in swapped.blocks:
            content, block = entry.content, None
            if content is not None and content.id != entry.content_id:
                content = None
            if content is not None:
                block = content.blocks[Tier.DEVICE]
                if block is None:
                    block = tier.arriving(content)
            device_blocks.append(block)
            contents.append(content)
        host_blocks = [entry.host_block for entry in swapped.blocks]
        return self._prefix(swapped.num_computed, device_blocks, host_blocks, contents)

    def admit(self, sequence: Sequence, prefix: Prefix, publishes: bool) -> list[Move]:
        """Take a row, and blocks for all known tokens; the caller has made sure of both.

        Returns the blocks that have to be loaded before the row may run.
        """
        resident = [block for block in prefix.device_blocks if block is not None]
        self._pool.reference(resident)  # before allocation, which would evict them
        num_fresh = self.num_blocks_for(len(sequence.token_ids)) - len(resident)
        fresh = self._pool.allocate(num_fresh)
        assert fresh is not None, f"{num_fresh} of {self._pool.num_free} blocks not to be had"
        row = self._batch.enter(sequence, prefix.num_computed)
        moves: list[Move] = []
        if len(resident) < len(prefix.device_blocks):
            num_loaded = len(prefix.device_blocks) - len(resident)
            resident, moves = place_loads(prefix, fresh[:num_loaded])
            del fresh[:num_loaded]
        self._set_table(row, resident + fresh)
        if sequence.swapped is None or sequence.publication is None:
            self._begin_publication(sequence, prefix, publishes)
        self._await_publication(row, sequence.publication)
        return moves

    def needs_block(self, rows: Int32Array) -> Int32Array:
        """Those of `rows`, each about to compute one position, whose tables must grow."""
        batch = self._batch
        return rows[batch.num_computed[rows] >= batch.capacity[rows]]

    def append(self, row: int, block: int) -> None:
        """Give a row one more block, already referenced."""
        count = self._num_blocks[row]
        self._tables[row, count] = block
        self._num_blocks[row] = count + 1
        self._batch.capacity[row] += self.block_size

    def num_draft_blocks(self) -> int:
        """Blocks that rows hold only for guessed tokens in flight."""
        return sum(
            self._num_blocks[row] - self.num_blocks_for(int(self._batch.num_computed[row]))
            for row in self._batch.drafting_rows()
        )

    def truncate(self, row: int) -> bool:
        """Give back a row's blocks behind its computed tokens, which wrong guesses were written
        to; no step in flight knows them. False: there are none."""
        count = self._num_blocks[row]
        keep = self.num_blocks_for(int(self._batch.num_computed[row]))
        if keep == count:
            return False
        self._pool.release(self._tables[row, keep:count].tolist())
        self._num_blocks[row] = keep
        self._batch.capacity[row] = keep * self.block_size
        return True

    def fork(self, parent: int, child: Sequence, num_computed: int) -> int:
        """A new row for `child` that shares all of the parent's blocks; copies nothing."""
        blocks = self.blocks(parent)
        self._pool.reference(blocks)
        row = self._batch.enter(child, num_computed)
        self._set_table(row, blocks)
        publication = self._batch.sequence(parent).publication
        assert publication is not None, f"row {parent} runs without a publication"
        child.publication = Publication(
            publication.last, publication.last_id, publication.num_blocks, publication.stopped
        )
        self._await_publication(row, child.publication)
        self._shared_tails.update((parent, row))
        return row

    def shared_tails(self, rows: Int32Array) -> list[int]:
        """Those of `rows` whose last block others hold too, so that they must not write to it."""
        if not self._shared_tails:
            return []
        return [row for row in rows.tolist() if row in self._shared_tails and self.shares_tail(row)]

    def shares_tail(self, row: int) -> bool:
        """Whether the row's next position lies in a block that others hold too."""
        tail = self._partial_tail(row)
        if tail is not None and self._pool.ref_count(tail) > 1:
            return True
        self._shared_tails.discard(row)
        return False

    def shares_full_block(self, row: int) -> bool:
        """Whether others hold any of the row's full, computed blocks too."""
        num_full = int(self._batch.num_computed[row]) // self.block_size
        return any(self._pool.ref_count(block) > 1 for block in self.blocks(row)[:num_full])

    def num_copies_on_write(self, rows: list[int]) -> int:
        """Blocks that `rows` need to write to their tails: the last sharer needs none."""
        writers: dict[int, int] = {}
        for row in rows:
            if (tail := self._partial_tail(row)) is not None:
                writers[tail] = writers.get(tail, 0) + 1
        return sum(min(n, self._pool.ref_count(tail) - 1) for tail, n in writers.items())

    def copy_on_write(self, row: int, fence: int) -> DeviceCopy:
        """Make a row's shared tail its own. The caller has made sure of a free block."""
        tail = self._partial_tail(row)
        fresh = self._pool.allocate(1)
        assert tail is not None and fresh is not None, f"row {row}: tail {tail}, block {fresh}"
        self._tables[row, self._num_blocks[row] - 1] = fresh[0]
        self._pool.release([tail], fence)
        self._shared_tails.discard(row)
        return DeviceCopy(tail, fresh[0], int(self._batch.num_computed[row]) % self.block_size)

    def release(self, row: int, fence: int) -> None:
        """Give a row's blocks back, deepest first."""
        count = self._num_blocks[row]
        self._pool.release(self._tables[row, :count].tolist(), fence)
        self._num_blocks[row] = 0
        self._batch.capacity[row] = 0
        self._shared_tails.discard(row)

    def publish(self, row: int, num_computed: int) -> None:
        """Let the row's full blocks be found: a step that wrote them has been processed."""
        sequence = self._batch.sequence(row)
        publication = sequence.publication
        assert publication is not None, f"row {row} runs without a publication"
        num_full = num_computed // self.block_size
        self._extend_chain(sequence, self._batch.token_ids[row], num_full)
        while publication.num_blocks < num_full and not publication.stopped:
            self._publish_next(row, sequence, publication)
        self._await_publication(row, publication)

    def stop_publishing(self, sequence: Sequence) -> None:
        """What it computes from here on is its own: the cache was reset under it."""
        if sequence.publication is not None:
            sequence.publication.stopped = True
        if sequence.row is not None:
            self._batch.next_publish[sequence.row] = _NEVER

    def check_integrity(self) -> None:
        """Every reference in the pool is one table's, and every table is long enough."""
        holders = [0] * self._pool.num_blocks
        for row in self._batch.rows():
            count = self._num_blocks[row]
            check(
                int(self._batch.capacity[row]) == count * self.block_size,
                f"row {row}: {count} blocks, capacity {self._batch.capacity[row]}",
            )
            blocks = self._tables[row, :count].tolist()
            check(len(set(blocks)) == count, f"row {row} holds a block twice: {blocks}")
            for block in blocks:
                holders[block] += 1
        self._pool.check_holders(holders)
        for row in self._shared_tails:
            check(self._batch.sequences[row] is not None, f"empty row {row} shares a tail")

    def _publish_next(self, row: int, sequence: Sequence, publication: Publication) -> None:
        place = publication.num_blocks
        block = int(self._tables[row, place])
        parent = publication.last
        content = self._pool.content(block)
        if parent.id != publication.last_id:
            publication.stopped = True  # its own past has been dropped from the index
            return
        if content is None:
            block_hash, tokens = sequence.chain.hashes[place], sequence.chain.tokens[place]
            content = self._publish_block(block, parent, block_hash, tokens)
            if content is None:
                publication.stopped = True
                return
            self.note_route(sequence.chain, place, content)
        publication.last = content
        publication.last_id = content.id
        publication.num_blocks = place + 1

    def _publish_block(
        self, block: int, parent: Content, block_hash: bytes, tokens: bytes
    ) -> Content | None:
        content = self._pool.publish(block, parent, block_hash, tokens)
        if content is None:
            orphan = self._index.find_unreachable(block_hash)
            if orphan is not None:
                self._forget(orphan)
                content = self._pool.publish(block, parent, block_hash, tokens)
        return content

    def _forget(self, content: Content) -> None:
        """Take a content from every block that holds it, on both tiers."""
        content_id = content.id
        self._host.forget(content)
        while content.id == content_id and (block := content.blocks[Tier.DEVICE]) is not None:
            self._pool.unpublish(block)

    def note_route(self, chain: HashChain, place: int, content: Content) -> None:
        """Where a stride of the route chain ends with this block, let it be reported."""
        number = place + 1
        if number <= self._stride:
            self._index.add_stride(content, 1, chain.hashes[place])
        elif number % self._stride == 0:
            self._index.add_stride(content, self._stride, self._route_hash(chain, number))

    def _route_hash(self, chain: HashChain, num_blocks: int) -> bytes:
        """The route chain's entry at a block count that ends a long stride."""
        stride = self._stride
        wanted = num_blocks // stride - 1  # the first long stride is number 1
        while len(chain.routes) < wanted:
            previous = chain.routes[-1] if chain.routes else chain.hashes[stride - 1]
            start = stride * (len(chain.routes) + 1)
            tokens = b"".join(chain.tokens[start : start + stride])
            chain.routes += extend_chain(previous, [tokens])
        return chain.routes[wanted - 1]

    def _extend_chain(self, sequence: Sequence, token_ids: Int32Array, num_blocks: int) -> None:
        """Hash what is not hashed yet of the first `num_blocks` full blocks."""
        chain = sequence.chain
        start = len(chain.hashes)
        if start >= num_blocks:
            return
        if chain is sequence.request.prompt_chain and (
            num_blocks * self.block_size > sequence.num_prompt_tokens
        ):
            chain = sequence.chain = chain.copy()  # samples part where their outputs begin
        size = self.block_size
        blocks = split_blocks(token_ids[start * size : num_blocks * size], size)
        previous = chain.hashes[-1] if start else sequence.request.root_hash
        chain.hashes += extend_chain(previous, blocks)
        chain.tokens += blocks

    def _prefix(
        self,
        num_computed: int,
        device_blocks: Array[int | None],
        host_blocks: Array[int | None],
        contents: Array[Content | None],
    ) -> Prefix:
        """With what is idle or arriving among the blocks found out."""
        resident = [block for block in device_blocks if block is not None]
        arriving = [
            content
            for content, block in zip(contents, device_blocks, strict=True)
            if content is not None and block is not None and content.blocks[Tier.DEVICE] is None
        ]
        num_idle = self._pool.count_idle(resident)
        return Prefix(num_computed, device_blocks, host_blocks, contents, num_idle, arriving)

    def _begin_publication(self, sequence: Sequence, prefix: Prefix, publishes: bool) -> None:
        last = prefix.contents[-1] if prefix.contents else None
        if last is None:
            last = self._index.root(sequence.request.root_hash)
        sequence.publication = Publication(last, last.id, len(prefix.contents), not publishes)

    def _partial_tail(self, row: int) -> int | None:
        """The block in which the row's next position lies, if something stands in it already."""
        num_computed = int(self._batch.num_computed[row])
        if num_computed % self.block_size == 0:
            return None
        return int(self._tables[row, num_computed // self.block_size])

    def _set_table(self, row: int, blocks: list[int]) -> None:
        self._tables[row, : len(blocks)] = blocks
        self._num_blocks[row] = len(blocks)
        self._batch.capacity[row] = len(blocks) * self.block_size

    def _await_publication(self, row: int, publication: Publication | None) -> None:
        assert publication is not None, f"row {row} runs without a publication"
        self._batch.next_publish[row] = (
            _NEVER if publication.stopped else (publication.num_blocks + 1) * self.block_size
        )
