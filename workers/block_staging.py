"""Blocks of one rank on their way between replicas: read from the host pool here, staged there.

What another replica sends is staged in buffers of its own, so that a transfer may be given up at
any moment; only a copy job that the scheduler orders brings it into the host pool. Every block has
a checksum, taken where it was read and compared where it has arrived. Knows bytes and ids; nothing
of prefixes, of Ray, or of who asks.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..scheduler.output import CopyJob, Int32Array
from .copier import ByteBlocks, CopyBytes, JobThread

_MAX_NUM_STAGED = 8  # transfers; what was abandoned is pushed out by what comes later


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Some blocks of one rank. blocks: uint8 [n, block_bytes]; checksums: uint64 [n]."""

    blocks: ByteBlocks
    checksums: NDArray[np.uint64]


def checksums_of(blocks: ByteBlocks) -> NDArray[np.uint64]:
    """XXH3-64 of each block: uint64 [n]."""
    return np.array([xxhash.xxh3_64_intdigest(block.data) for block in blocks], dtype=np.uint64)


def read_blocks(pool: ByteBlocks, block_ids: Int32Array, copy_bytes: CopyBytes) -> BlockBatch:
    """A copy of blocks that somebody has pinned meanwhile."""
    if not ((block_ids >= 0) & (block_ids < len(pool))).all():
        raise ValueError(f"blocks {block_ids} are not all in a pool of {len(pool)}")
    blocks = np.empty((len(block_ids), pool.shape[1]), dtype=np.uint8)
    copy_bytes(pool, block_ids, blocks, np.arange(len(block_ids), dtype=np.int32))
    return BlockBatch(blocks, checksums_of(blocks))


class StagedBlocks:
    """What has come for transfers that are under way, by their number. From any thread."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._staged: OrderedDict[int, list[BlockBatch]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._staged)

    def add(self, number: int, batch: BlockBatch) -> None:
        """The next blocks of a transfer. Raises ValueError where they are of another size."""
        shape = batch.blocks.shape
        if batch.blocks.ndim != 2 or shape[1] != self._block_bytes:
            raise ValueError(f"blocks of {self._block_bytes} bytes are due, {shape} has come")
        with self._lock:
            self._staged.setdefault(number, []).append(batch)
            while len(self._staged) > _MAX_NUM_STAGED:
                self._staged.popitem(last=False)

    def take(self, number: int) -> BlockBatch | None:
        """All that has come, forgotten here. None: nothing has."""
        with self._lock:
            batches = self._staged.pop(number, None)
        if batches is None:
            return None
        if len(batches) == 1:
            return batches[0]
        blocks = np.concatenate([batch.blocks for batch in batches])
        return BlockBatch(blocks, np.concatenate([batch.checksums for batch in batches]))


class StagedCopier(JobThread):
    """Brings staged blocks into the host pool, beside the steps, by one thread."""

    def __init__(self, staged: StagedBlocks, pool: ByteBlocks, copy_bytes: CopyBytes) -> None:
        self._staged = staged
        self._pool = pool
        self._copy_bytes = copy_bytes
        super().__init__("staged-blocks")

    def copy(self, job: CopyJob) -> bool:
        """Whether every block has arrived as it was sent."""
        batch = self._staged.take(job.staging)
        if batch is None or (job.sources >= len(batch.blocks)).any():
            return False  # another rank has got more than this one
        self._copy_bytes(batch.blocks, job.sources, self._pool, job.targets)
        arrived = [xxhash.xxh3_64_intdigest(self._pool[block].data) for block in job.targets]
        return bool((batch.checksums[job.sources] == np.array(arrived, dtype=np.uint64)).all())
