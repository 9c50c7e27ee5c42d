"""Blocks read here, staged there: bytes, checksums, and what was given up."""

from collections.abc import Iterator

import numpy as np
import pytest

from pagefleet.kernels.block_copy import copy_bytes
from pagefleet.scheduler.output import CopyDone, CopyJob, CopyKind
from pagefleet.workers.block_staging import BlockBatch, StagedBlocks, StagedCopier, read_blocks

BYTES = 64
WAIT_S = 10.0


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, BYTES), dtype=np.uint8)


class Target:
    def __init__(self) -> None:
        self.pool = make_pool(2)
        self.staged = StagedBlocks(BYTES)
        self.copier = StagedCopier(self.staged, self.pool, copy_bytes)

    def run(self, job: CopyJob) -> CopyDone:
        self.copier.submit(job)
        return self.copier._done.get(timeout=WAIT_S)


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.copier.close()


def test_blocks_arrive_as_they_were_read(target: Target) -> None:
    source = make_pool(1)
    target.staged.add(5, read_blocks(source, ints(3, 1), copy_bytes))
    target.staged.add(5, read_blocks(source, ints(7), copy_bytes))  # in parts
    before = target.pool.copy()
    done = target.run(CopyJob(1, CopyKind.IMPORT, ints(1, 2), ints(4, 0), staging=5))
    assert done.ok and done.elapsed_s > 0.0
    assert np.array_equal(target.pool[[4, 0]], source[[1, 7]])
    untouched = [1, 2, 3, 5, 6, 7]
    assert np.array_equal(target.pool[untouched], before[untouched])
    assert len(target.staged) == 0


def test_a_block_that_changed_on_the_way_is_found(target: Target) -> None:
    batch = read_blocks(make_pool(1), ints(0, 1), copy_bytes)
    batch.blocks[1, 17] ^= 1
    target.staged.add(1, batch)
    assert not target.run(CopyJob(1, CopyKind.IMPORT, ints(0, 1), ints(2, 3), staging=1)).ok


def test_what_is_not_staged_fails(target: Target) -> None:
    assert not target.run(CopyJob(1, CopyKind.IMPORT, ints(0), ints(2), staging=9)).ok
    target.staged.add(9, read_blocks(make_pool(1), ints(0), copy_bytes))
    assert not target.run(CopyJob(2, CopyKind.IMPORT, ints(0, 1), ints(2, 3), staging=9)).ok


def test_a_copy_does_not_follow_its_source() -> None:
    source = make_pool(1)
    batch = read_blocks(source, ints(2), copy_bytes)
    before = batch.blocks.copy()
    source[2] = 0
    assert np.array_equal(batch.blocks, before)


@pytest.mark.parametrize("block", [-1, 8])
def test_ids_out_of_the_pool_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match="pool of 8"):
        read_blocks(make_pool(1), ints(0, block), copy_bytes)


def test_blocks_of_another_size_are_refused() -> None:
    staged = StagedBlocks(BYTES + 1)
    with pytest.raises(ValueError, match="65 bytes"):
        staged.add(1, read_blocks(make_pool(1), ints(0), copy_bytes))


def test_what_was_abandoned_is_pushed_out() -> None:
    staged = StagedBlocks(BYTES)
    for number in range(20):
        staged.add(number, BlockBatch(make_pool(1), np.zeros(8, dtype=np.uint64)))
    assert len(staged) == 8
    assert not staged.take(0) and staged.take(19)
