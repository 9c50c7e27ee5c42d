"""States of a block, fences, eviction order, and what an allocation must leave alone."""

import pytest

from pagefleet.scheduler.integrity import IntegrityError


def publish(parts, blocks, first_token=0):
    """Give each block a content in one chain."""
    parent = parts.index.root(bytes(16))
    for place, block in enumerate(blocks):
        name = bytes([first_token, place]) * 8
        parent = parts.pool.publish(block, parent, name, name)
    return parent


def test_allocation_is_all_or_nothing(parts_factory):
    pool = parts_factory(4, 4).pool
    assert pool.allocate(5) is None
    assert pool.stats().clean == 4
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_published_blocks_become_idle_and_the_rest_clean(parts_factory):
    parts = parts_factory(4, 4)
    blocks = parts.pool.allocate(3)
    publish(parts, blocks[:2])
    parts.pool.release(blocks)
    stats = parts.pool.stats()
    assert (stats.clean, stats.cached_idle, stats.referenced, stats.fenced) == (2, 2, 0, 0)


def test_deepest_block_is_evicted_first(parts_factory):
    parts = parts_factory(4, 4)
    blocks = parts.pool.allocate(4)
    publish(parts, blocks)
    parts.pool.release(blocks)
    assert parts.pool.next_evicted(4) == blocks[::-1]
    assert set(parts.pool.allocate(2)) == {blocks[2], blocks[3]}
    assert len(parts.index) == 2
    parts.pool.check_integrity()


def test_clean_blocks_go_before_idle_ones(parts_factory):
    parts = parts_factory(4, 4)
    idle = parts.pool.allocate(1)
    publish(parts, idle)
    parts.pool.release(idle)
    assert idle[0] not in parts.pool.allocate(3)
    assert parts.pool.allocate(1) == idle


def test_hit_takes_an_idle_block_back(parts_factory):
    parts = parts_factory(4, 4)
    blocks = parts.pool.allocate(2)
    publish(parts, blocks)
    parts.pool.release(blocks)
    parts.pool.reference(blocks)
    assert parts.pool.stats().referenced == 2
    assert parts.pool.num_free == 2
    parts.pool.check_integrity()


def test_fenced_block_is_not_handed_out_before_its_step_ended(parts_factory):
    pool = parts_factory(2, 4).pool
    pool.release(pool.allocate(2), fence=7)
    assert pool.stats().fenced == 2
    assert pool.allocate(1) is None
    pool.finish_step(6)
    assert pool.allocate(1) is None
    pool.finish_step(7)
    assert pool.allocate(2) is not None
    pool.check_integrity()


def test_fenced_block_may_be_hit_and_given_back_again(parts_factory):
    parts = parts_factory(2, 4)
    blocks = parts.pool.allocate(1)
    publish(parts, blocks)
    parts.pool.release(blocks, fence=3)
    parts.pool.reference(blocks)
    parts.pool.finish_step(3)
    parts.pool.check_integrity()
    assert parts.pool.stats().referenced == 1
    parts.pool.release(blocks, fence=4)
    parts.pool.reference(blocks)
    parts.pool.release(blocks, fence=5)
    parts.pool.finish_step(4)
    assert parts.pool.stats().fenced == 1
    parts.pool.finish_step(5)
    assert parts.pool.stats().cached_idle == 1
    parts.pool.check_integrity()


def test_pinned_block_waits_for_its_copy(parts_factory):
    parts = parts_factory(2, 4)
    blocks = parts.pool.allocate(2)
    publish(parts, blocks[:1])
    for block in blocks:
        parts.pool.pin(block)
    parts.pool.release(blocks)
    assert parts.pool.stats().fenced == 2
    parts.pool.check_integrity()
    for block in blocks:
        parts.pool.unpin(block)
    stats = parts.pool.stats()
    assert (stats.clean, stats.cached_idle, stats.fenced) == (1, 1, 0)
    parts.pool.check_integrity()


def test_idle_block_under_a_copy_is_not_evicted(parts_factory):
    parts = parts_factory(2, 4)
    blocks = parts.pool.allocate(2)
    publish(parts, blocks)
    parts.pool.release(blocks)
    first = parts.pool.next_evicted(1)[0]
    parts.pool.pin(first)
    assert parts.pool.allocate(2) is None
    assert first not in parts.pool.allocate(1)
    parts.pool.unpin(first)
    parts.pool.check_integrity()
    assert parts.pool.next_evicted(1) == [first]


def test_releasing_twice_is_our_bug(parts_factory):
    pool = parts_factory(2, 4).pool
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_integrity_check_names_the_block(parts_factory):
    parts = parts_factory(2, 4)
    parts.pool.allocate(1)
    parts.pool._refs[0] = 0
    with pytest.raises(IntegrityError, match="block 0"):
        parts.pool.check_integrity()


def test_reset_drops_every_content(parts_factory):
    parts = parts_factory(4, 4)
    blocks = parts.pool.allocate(3)
    publish(parts, blocks)
    parts.pool.release(blocks[1:])
    assert parts.pool.unpublish_all() == 3
    assert len(parts.index) == 0
    stats = parts.pool.stats()
    assert (stats.clean, stats.cached_idle, stats.referenced) == (3, 0, 1)
    parts.pool.check_integrity()
    parts.index.check_integrity()
