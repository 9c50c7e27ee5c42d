"""What the scheduler's tests share: parts without a scheduler around them."""

from dataclasses import dataclass

import numpy as np
import pytest
from scheduler_harness import make_request

from pagefleet.scheduler.block_pool import BlockPool
from pagefleet.scheduler.config import SchedulerConfig
from pagefleet.scheduler.content_index import ContentIndex
from pagefleet.scheduler.costs import CostModel
from pagefleet.scheduler.host_pool import HostPool
from pagefleet.scheduler.host_tier import HostTier
from pagefleet.scheduler.kv_cache_manager import KVCacheManager
from pagefleet.scheduler.prefix import Prefix
from pagefleet.scheduler.request import Request, Sequence
from pagefleet.scheduler.route_residency import RouteResidency
from pagefleet.scheduler.running_batch import RunningBatch

ROOT = bytes(16)


@dataclass
class Parts:
    """A pool with its index and tables, and sequences admitted by hand."""

    batch: RunningBatch
    routes: RouteResidency
    index: ContentIndex
    pool: BlockPool
    host: HostPool
    tier: HostTier
    manager: KVCacheManager
    num_sequences: int = 0

    def sequence(self, prompt: int | list[int]) -> Sequence:
        request = Request(make_request(prompt), self.num_sequences, 0.0, 4096, ROOT)
        self.num_sequences += 1
        return Sequence(self.num_sequences, request, 0, ())

    def admit(self, prompt: int | list[int]) -> int | None:
        """A row for a sequence whose whole prompt is computed."""
        sequence = self.sequence(prompt)
        if self.manager.num_blocks_for(len(sequence.token_ids)) > self.pool.num_free:
            return None
        self.manager.admit(sequence, Prefix(), publishes=True)
        row = sequence.row
        self.batch.num_computed[row] = self.batch.num_tokens[row]
        return row

    def fork(self, row: int) -> int:
        parent = self.batch.sequence(row)
        child = Sequence(self.num_sequences + 1, parent.request, 1, ())
        self.num_sequences += 1
        return self.manager.fork(row, child, int(self.batch.num_computed[row]))

    def append(self, row: int, count: int = 1) -> bool:
        """Write tokens at the row's end. False: there was no block for the next one."""
        for _ in range(count):
            rows = np.array([row], dtype=np.int32)
            if len(self.manager.needs_block(rows)):
                blocks = self.pool.allocate(1)
                if blocks is None:
                    return False
                self.manager.append(row, blocks[0])
            elif self.manager.shared_tails(rows):
                self.copies.append(self.manager.copy_on_write(row, fence=0))
            self.batch.num_tokens[row] += 1
            self.batch.num_computed[row] += 1
        return True

    def __post_init__(self) -> None:
        self.copies = []

    def find_prefix(self, sequence: Sequence) -> Prefix:
        return self.manager.find_prefix(sequence, self.tier, loads_pay=True)

    def found_blocks(self, prompt: int | list[int]) -> list[int]:
        """The device blocks that a sequence with this prompt would start from."""
        return list(self.find_prefix(self.sequence(prompt)).device_blocks)

    def num_stored(self) -> int:
        """Positions in referenced blocks that hold KV, a shared one counted once."""
        fill: dict[int, int] = {}
        size = self.manager.block_size
        for row in self.batch.rows():
            computed = int(self.batch.num_computed[row])
            for place, block in enumerate(self.manager.blocks(row)):
                used = min(size, computed - place * size)
                fill[block] = max(used, fill.get(block, 0))
        return sum(fill.values())

    def num_slots(self) -> int:
        """Positions that the referenced blocks could hold."""
        return self.pool.stats().referenced * self.manager.block_size

    def check(self) -> None:
        for part in (self.pool, self.index, self.batch, self.manager):
            part.check_integrity()


def make_parts(
    num_blocks: int,
    block_size: int,
    num_rows: int = 8,
    hash_bits: int = 128,
    num_host_blocks: int = 0,
) -> Parts:
    config = SchedulerConfig(num_blocks, block_size, num_host_blocks)
    batch = RunningBatch(num_rows, 4096)
    routes = RouteResidency()
    index = ContentIndex(num_blocks + num_host_blocks, routes, hash_bits)
    pool = BlockPool(num_blocks, index)
    host = HostPool(num_host_blocks, index)
    tier = HostTier(config, batch, pool, host, CostModel(config))
    manager = KVCacheManager(batch, pool, host, index, block_size)
    return Parts(batch, routes, index, pool, host, tier, manager)


@pytest.fixture
def parts_factory():
    return make_parts
