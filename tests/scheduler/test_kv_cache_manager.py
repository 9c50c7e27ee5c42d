"""Tables, forks and copies on write; the worked traces of the paged attention reference."""

import pytest


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "num_slots", "waste", "fits"),
    [(8, 16, 128, 15, True), (16, 9, 144, 31, False), (32, 5, 160, 47, False)],
)
def test_lengths_17_31_32_33_in_a_pool_of_128_slots(
    parts_factory, block_size, num_blocks, num_slots, waste, fits
):
    lengths = (17, 31, 32, 33)
    small = parts_factory(128 // block_size, block_size)
    rows = [small.admit(length) for length in lengths]
    assert all(row is not None for row in rows) is fits
    small.check()

    roomy = parts_factory(64, block_size)
    for length in lengths:
        roomy.admit(length)
    assert roomy.pool.stats().referenced == num_blocks
    assert roomy.num_slots() == num_slots
    assert roomy.num_slots() - sum(lengths) == waste
    roomy.check()


def test_fork_of_35_tokens_copies_three_slots_then_writes_in_place(parts_factory):
    parts = parts_factory(20, 16)
    parts.pool.allocate(10)  # so that the first table is 10, 11, 12
    first = parts.admit(35)
    assert parts.manager.blocks(first) == [10, 11, 12]
    second = parts.fork(first)
    assert [parts.pool.ref_count(block) for block in (10, 11, 12)] == [2, 2, 2]

    parts.append(first)
    (copy,) = parts.copies
    assert (copy.source, copy.target, copy.num_slots) == (12, 13, 3)
    held = parts.num_slots() - 160  # the ten blocks above
    assert parts.num_stored() == 39
    assert held - parts.num_stored() == 25

    parts.append(second)
    assert len(parts.copies) == 1
    assert parts.manager.blocks(first) == [10, 11, 13]
    assert parts.manager.blocks(second) == [10, 11, 12]
    assert held // 16 == 4
    assert parts.num_stored() == 40
    assert held - parts.num_stored() == 24
    assert [parts.pool.ref_count(block) for block in (10, 11, 12, 13)] == [2, 2, 1, 1]

    parts.manager.release(first, fence=0)
    parts.batch.leave(parts.batch.sequence(first))
    assert [parts.pool.ref_count(block) for block in (10, 11, 12, 13)] == [1, 1, 1, 0]
    parts.pool.check_integrity()


def test_fork_of_22_tokens_and_ten_more(parts_factory):
    parts = parts_factory(8, 8)
    first = parts.admit(22)
    second = parts.fork(first)
    parts.append(first, 10)
    assert parts.pool.stats().referenced == 5
    blocks = dict.fromkeys(parts.manager.blocks(second) + parts.manager.blocks(first))
    assert [parts.pool.ref_count(block) for block in blocks] == [2, 2, 1, 1, 1]
    assert parts.num_stored() == 38
    assert parts.num_slots() - parts.num_stored() == 2
    parts.check()


def test_fifth_token_in_a_pool_of_one_block_of_four(parts_factory):
    parts = parts_factory(1, 4)
    row = parts.admit(4)
    before = (parts.manager.blocks(row), parts.pool.stats(), int(parts.batch.num_tokens[row]))
    assert not parts.append(row)
    assert before == (parts.manager.blocks(row), parts.pool.stats(), 4)
    parts.check()


def test_last_sharer_needs_no_copy(parts_factory):
    parts = parts_factory(8, 4)
    rows = [parts.admit(6)]
    rows += [parts.fork(rows[0]), parts.fork(rows[0])]
    assert parts.manager.num_copies_on_write(rows) == 2
    assert parts.manager.num_copies_on_write(rows[:2]) == 2
    for row in rows:
        parts.append(row)
    assert len(parts.copies) == 2
    assert parts.manager.shared_tails(parts.batch.sequence_ids[:0].astype("int32")) == []
    parts.check()


def test_fork_at_a_block_boundary_shares_everything(parts_factory):
    parts = parts_factory(8, 4)
    first = parts.admit(8)
    second = parts.fork(first)
    parts.append(first)
    parts.append(second)
    assert not parts.copies
    assert parts.manager.blocks(first)[:2] == parts.manager.blocks(second)[:2]
    assert parts.pool.stats().referenced == 4


def test_published_prefix_is_found_without_the_last_token(parts_factory):
    parts = parts_factory(16, 4)
    row = parts.admit(12)
    parts.manager.publish(row, 12)
    assert parts.found_blocks(12) == [0, 1]
    assert parts.found_blocks(13) == [0, 1, 2]
    assert parts.found_blocks([9] * 12) == []
    parts.check()


def test_idle_hits_cost_capacity(parts_factory):
    parts = parts_factory(4, 4)
    row = parts.admit(12)
    parts.manager.publish(row, 12)
    assert parts.find_prefix(parts.sequence(16)).num_idle == 0
    parts.manager.release(row, fence=0)
    assert parts.find_prefix(parts.sequence(16)).num_idle == 3


def test_duplicate_takes_over_when_the_first_is_evicted(parts_factory):
    parts = parts_factory(6, 4)
    first, second = parts.admit(8), parts.admit(8)  # both compute the same
    parts.manager.publish(first, 8)
    parts.manager.publish(second, 8)
    parts.manager.release(first, fence=0)
    parts.batch.leave(parts.batch.sequence(first))
    parts.pool.allocate(4)  # evicts the first's blocks
    parts.pool.check_integrity()
    assert parts.found_blocks(9) == parts.manager.blocks(second)


def test_duplicates_become_clean_when_given_back(parts_factory):
    parts = parts_factory(6, 4)
    first, second = parts.admit(8), parts.admit(8)
    parts.manager.publish(first, 8)
    parts.manager.publish(second, 8)
    parts.manager.release(second, fence=0)
    parts.batch.leave(parts.batch.sequence(second))
    assert parts.pool.stats().clean == 4
    parts.check()


def test_orphan_gives_way_to_the_same_tokens_under_a_living_parent(parts_factory):
    parts = parts_factory(8, 4)
    first = parts.admit(8)
    parts.manager.publish(first, 8)
    parts.pool.unpublish(parts.manager.blocks(first)[0])  # the second block is out of reach now
    assert parts.found_blocks(9) == []
    second = parts.admit(8)
    parts.manager.publish(second, 8)
    assert parts.found_blocks(9) == parts.manager.blocks(second)
    parts.check()


def test_collision_is_refused_with_its_descendants(parts_factory):
    parts = parts_factory(40, 4, hash_bits=1)  # two keys for everything
    rows = [parts.admit([value] * 12) for value in range(3)]
    for row in rows:
        parts.manager.publish(row, 12)
    assert parts.index.num_refused > 0
    assert len(parts.index) <= 2
    for value in range(3):
        for content in parts.find_prefix(parts.sequence([value] * 13)).contents:
            assert set(content.tokens[::4]) == {value}
    parts.check()
