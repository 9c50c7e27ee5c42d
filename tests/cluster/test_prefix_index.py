"""The exact index: prefixes, tiers, speculation, watching, self-audit and bounds."""

import random

from cluster_factories import make_hashes

from pagefleet.cluster.prefix_index import PrefixIndex, Tier, bits, hash_as_int
from pagefleet.protos.messages import RouteEvents


def make_index(num_slots: int = 3) -> PrefixIndex:
    index = PrefixIndex()
    for _ in range(num_slots):
        index.add_slot()
    return index


def test_depth_is_the_unbroken_prefix_of_each_slot() -> None:
    index, hashes = make_index(), make_hashes(6)
    index.apply(0, RouteEvents(stored_device=hashes))
    index.apply(1, RouteEvents(stored_device=hashes[:2] + hashes[3:]))
    assert index.device_depths(hashes, 0b111).tolist() == [6, 2, 0]
    assert index.device_depths(hashes, 0b110).tolist() == [0, 2, 0]
    assert index.device_depths((), 0b111).tolist() == [0, 0, 0]


def test_the_host_tier_continues_a_prefix() -> None:
    index, hashes = make_index(), make_hashes(6)
    assert index.reach(hashes, 0b111) is None
    index.apply(0, RouteEvents(stored_device=hashes[:2], stored_host=hashes[1:4]))
    index.apply(1, RouteEvents(stored_host=hashes))
    assert index.device_depths(hashes, 0b111).tolist() == [2, 0, 0]
    reach = index.reach(hashes, 0b111)
    assert reach is not None and reach.tolist() == [4, 6, 0]


def test_claims_count_until_every_prompt_that_made_them_has_gone() -> None:
    index, hashes = make_index(), make_hashes(4)
    index.claim(1, hashes)
    index.claim(1, hashes[:2])
    assert index.device_depths(hashes, 0b111).tolist() == [0, 4, 0]
    assert index.device_depths(hashes, 0b111, speculative=False).tolist() == [0, 0, 0]
    index.unclaim(1, hashes)
    assert index.device_depths(hashes, 0b111).tolist() == [0, 2, 0]
    index.unclaim(1, hashes[:2])
    index.unclaim(1, hashes)  # a second time harms nothing
    assert index.stats().claimed_entries == 0
    index.check_integrity()


def test_pinned_is_what_is_both_resident_and_claimed() -> None:
    index, hashes = make_index(), make_hashes(4)
    index.apply(0, RouteEvents(stored_device=hashes[:3]))
    index.claim(0, hashes[:2] + hashes[3:])
    assert index.pinned_depths(hashes, 0b111).tolist() == [2, 0, 0]


def test_clear_forgets_one_slot_only() -> None:
    index, hashes = make_index(), make_hashes(4)
    for slot in range(3):
        index.apply(slot, RouteEvents(stored_device=hashes, stored_host=hashes))
    index.claim(1, make_hashes(2, 7))
    index.clear(1)
    assert index.device_depths(hashes, 0b111).tolist() == [4, 0, 4]
    assert (index.num_held(1, Tier.DEVICE), index.num_held(1, Tier.HOST)) == (0, 0)
    assert index.digest(1, Tier.DEVICE) == 0
    index.check_integrity()


def test_a_snapshot_replaces_what_was_held() -> None:
    index, old, new = make_index(), make_hashes(4), make_hashes(3, 1)
    index.apply(0, RouteEvents(stored_device=old))
    index.replace(0, RouteEvents(stored_device=old[:2] + new))
    assert index.device_depths(old, 1).tolist() == [2, 0, 0]
    assert index.device_depths(new, 1).tolist() == [3, 0, 0]
    index.check_integrity()


def test_the_digest_is_the_xor_of_what_is_held() -> None:
    index, hashes = make_index(), make_hashes(5)
    index.apply(0, RouteEvents(stored_device=hashes))
    index.apply(0, RouteEvents(stored_device=hashes, removed_device=hashes[:2]))
    index.apply(0, RouteEvents(removed_device=(*hashes[3:], *hashes[3:])))
    expected = hash_as_int(hashes[0]) ^ hash_as_int(hashes[1]) ^ hash_as_int(hashes[2])
    assert index.digest(0, Tier.DEVICE) == expected


def test_watchers_are_named_when_their_hashes_change() -> None:
    index, hashes = make_index(), make_hashes(4)
    index.watch(hashes, "a")
    index.watch(hashes[:1], "b")
    index.apply(0, RouteEvents(stored_device=hashes[2:]))
    assert index.take_touched() == {"a"}
    index.claim(2, hashes[:1])
    assert index.take_touched() == {"a", "b"}
    index.apply(0, RouteEvents(stored_device=hashes[2:]))  # nothing new
    assert index.take_touched() == set()
    index.unwatch(hashes, "a")
    index.apply(0, RouteEvents(removed_device=hashes))
    assert index.take_touched() == set()
    assert index.stats().watched == 1


def test_c8_memory_is_flat_over_unique_prompts() -> None:
    index = make_index(1)
    pool: list[bytes] = []
    for number in range(20_000):
        fresh = f"{number:16d}".encode()
        removed = (pool.pop(0),) if len(pool) == 500 else ()
        index.apply(0, RouteEvents(stored_device=(fresh,), removed_device=removed))
        pool.append(fresh)
        assert index.stats().hashes <= 500 or number % 1000
    assert index.stats().hashes == 500
    index.check_integrity()


def test_random_events_agree_with_a_plain_model() -> None:
    rng = random.Random(1)
    index, hashes = make_index(4), make_hashes(12)
    held: list[set[bytes]] = [set() for _ in range(4)]
    for _ in range(500):
        slot = rng.randrange(4)
        stored = tuple(rng.sample(hashes, rng.randrange(4)))
        removed = tuple(h for h in rng.sample(hashes, rng.randrange(4)) if h not in stored)
        index.apply(slot, RouteEvents(stored_device=stored, removed_device=removed))
        held[slot] = (held[slot] - set(removed)) | set(stored)
        depths = []
        for slot_held in held:
            depth = 0
            while depth < len(hashes) and hashes[depth] in slot_held:
                depth += 1
            depths.append(depth)
        assert index.device_depths(hashes, 0b1111).tolist() == depths
    index.check_integrity()


def test_bits_are_listed_lowest_first() -> None:
    assert list(bits(0)) == []
    assert list(bits(1 << 999 | 0b1010)) == [1, 3, 999]


def test_depths_of_many_slots() -> None:
    index, hashes = PrefixIndex(), make_hashes(3)
    for _ in range(100):
        index.add_slot()
    for slot in range(10, 90):
        index.apply(slot, RouteEvents(stored_device=hashes[: 1 + slot % 3]))
    depths = index.device_depths(hashes, (1 << 100) - 1).tolist()
    assert depths == [1 + slot % 3 if 10 <= slot < 90 else 0 for slot in range(100)]
