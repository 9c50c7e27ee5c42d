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


def checksums_of(pool: ByteBlocks, block_ids: Int32Array) -> NDArray[np.uint64]:
    """XXH3-64 of each of these blocks: uint64 [n]."""
    digests = [xxhash.xxh3_64_intdigest(pool[block].data) for block in block_ids]
    return np.array(digests, dtype=np.uint64)


def read_blocks(pool: ByteBlocks, block_ids: Int32Array, copy_bytes: CopyBytes) -> BlockBatch:
    """A copy of blocks that somebody has pinned meanwhile."""
    if not ((block_ids >= 0) & (block_ids < len(pool))).all():
        raise ValueError(f"blocks {block_ids} are not all in a pool of {len(pool)}")
    blocks = np.empty((len(block_ids), pool.shape[1]), dtype=np.uint8)
    places = np.arange(len(block_ids), dtype=np.int32)
    copy_bytes(pool, block_ids, blocks, places)
    return BlockBatch(blocks, checksums_of(blocks, places))


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

    def take(self, number: int) -> list[BlockBatch]:
        """All that has come, part by part, forgotten here."""
        with self._lock:
            return self._staged.pop(number, [])


class StagedCopier(JobThread):
    """Brings staged blocks into the host pool, beside the steps, by one thread."""

    def __init__(self, staged: StagedBlocks, pool: ByteBlocks, copy_bytes: CopyBytes) -> None:
        self._staged = staged
        self._pool = pool
        self._copy_bytes = copy_bytes
        super().__init__("staged-blocks")

    def copy(self, job: CopyJob) -> bool:
        """Whether every block has arrived as it was sent."""
        parts = self._staged.take(job.staging)
        if (job.sources >= sum(len(part.blocks) for part in parts)).any():
            return False  # another rank has got more than this one
        first, ok = 0, True
        for part in parts:
            chosen = (job.sources >= first) & (job.sources < first + len(part.blocks))
            places, targets = job.sources[chosen] - first, job.targets[chosen]
            self._copy_bytes(part.blocks, places, self._pool, targets)
            arrived = checksums_of(self._pool, targets)
            ok &= bool((part.checksums[places] == arrived).all())
            first += len(part.blocks)
        return ok
