"""Which replica holds which prefix: route hash → replicas, as bit sets, one per tier.

Mirrors what the replicas report and is bounded by their pools. Knows nothing of requests, leases
or models; a replica is a slot number here. Audits itself: the XOR of what is held per slot and
tier must equal the digest that the replica reports.

    device        b1 b2 b3 b4 .            depth 4
    host          .  .  .  b4 b5 b6        reach 6: the host tier continues the prefix
    speculative   .  .  .  .  .  .  b7     on its way: routed there, not yet reported

A prefix counts as far as it is unbroken from the root.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..protos.messages import RouteEvents

Holders = Callable[[bytes], int]


class Tier(IntEnum):
    """Where a block is resident."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes, for bounds and for tests. `entries` counts (hash, replica) pairs per tier."""

    device_entries: int
    host_entries: int
    speculative_entries: int
    hashes: int
    watched: int


def bits(mask: int) -> Iterator[int]:
    """The positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def hash_as_int(route_hash: bytes) -> int:
    """A route hash as the digests count it."""
    return int.from_bytes(route_hash)


class _Layer:
    """One tier: hash → bit set, and the same the other way round to empty a slot quickly."""

    def __init__(self) -> None:
        self.masks: dict[bytes, int] = {}
        self.held: list[set[bytes]] = []
        self.digests: list[int] = []

    def grow(self) -> None:
        self.held.append(set())
        self.digests.append(0)

    def add(self, slot: int, route_hash: bytes) -> bool:
        held = self.held[slot]
        if route_hash in held:
            return False
        held.add(route_hash)
        self.masks[route_hash] = self.masks.get(route_hash, 0) | (1 << slot)
        self.digests[slot] ^= hash_as_int(route_hash)
        return True

    def discard(self, slot: int, route_hash: bytes) -> bool:
        held = self.held[slot]
        if route_hash not in held:
            return False
        held.remove(route_hash)
        self.digests[slot] ^= hash_as_int(route_hash)
        self._clear_bit(slot, route_hash)
        return True

    def clear(self, slot: int) -> list[bytes]:
        dropped = list(self.held[slot])
        for route_hash in dropped:
            self._clear_bit(slot, route_hash)
        self.held[slot] = set()
        self.digests[slot] = 0
        return dropped

    def _clear_bit(self, slot: int, route_hash: bytes) -> None:
        mask = self.masks[route_hash] & ~(1 << slot)
        if mask:
            self.masks[route_hash] = mask
        else:
            del self.masks[route_hash]

    def check(self) -> None:
        pairs = sum(mask.bit_count() for mask in self.masks.values())
        held = sum(len(hashes) for hashes in self.held)
        assert pairs == held, f"{pairs} bits set, {held} hashes held"
        for slot, hashes in enumerate(self.held):
            digest = 0
            for route_hash in hashes:
                assert self.masks[route_hash] >> slot & 1, f"slot {slot} lacks a bit"
                digest ^= hash_as_int(route_hash)
            assert digest == self.digests[slot], f"digest of slot {slot} has drifted"


class PrefixIndex:
    """The exact index of one model's replicas."""

    def __init__(self) -> None:
        self._device = _Layer()
        self._host = _Layer()
        self._layers = (self._device, self._host)
        self._speculative: dict[bytes, int] = {}
        self._speculations: list[dict[bytes, int]] = []
        self._watchers: dict[bytes, set[Hashable]] = {}
        self._touched: set[Hashable] = set()

    @property
    def num_slots(self) -> int:
        """Slots ever added; a match has one entry for each."""
        return len(self._speculations)

    def add_slot(self) -> int:
        """A new slot number; the caller reuses it after `clear`."""
        self._device.grow()
        self._host.grow()
        self._speculations.append({})
        return len(self._speculations) - 1

    def apply(self, slot: int, events: RouteEvents) -> None:
        """Add and remove what a report says; removals first, as a block may have been reused."""
        self._change(self._device, slot, events.stored_device, events.removed_device)
        self._change(self._host, slot, events.stored_host, events.removed_host)

    def replace(self, slot: int, snapshot: RouteEvents) -> None:
        """Make the slot hold exactly what the snapshot lists; touches only the difference."""
        for layer, stored in (
            (self._device, snapshot.stored_device),
            (self._host, snapshot.stored_host),
        ):
            wanted = set(stored)
            gone = layer.held[slot] - wanted
            self._change(layer, slot, tuple(wanted), tuple(gone))

    def clear(self, slot: int) -> None:
        """Forget all that the slot held, on every tier and speculative."""
        for layer in self._layers:
            for route_hash in layer.clear(slot):
                self._touch(route_hash)
        for route_hash in list(self._speculations[slot]):
            self._drop_speculation(slot, route_hash)

    def digest(self, slot: int, tier: Tier) -> int:
        """XOR of all hashes that the slot holds on the tier."""
        return self._layers[tier].digests[slot]

    def num_held(self, slot: int, tier: Tier) -> int:
        """Entries of one slot on one tier."""
        return len(self._layers[tier].held[slot])

    def speculate(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The replica will soon hold these: a request that brings them was routed there."""
        counts = self._speculations[slot]
        bit = 1 << slot
        for route_hash in hashes:
            count = counts.get(route_hash, 0)
            counts[route_hash] = count + 1
            if count == 0:
                self._speculative[route_hash] = self._speculative.get(route_hash, 0) | bit
                self._touch(route_hash)

    def retract(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Take back one `speculate` of each hash; those already dropped are passed over."""
        counts = self._speculations[slot]
        for route_hash in hashes:
            count = counts.get(route_hash, 0)
            if count > 1:
                counts[route_hash] = count - 1
            elif count == 1:
                self._drop_speculation(slot, route_hash)

    def device_depths(
        self, hashes: Sequence[bytes], alive: int, *, speculative: bool = True
    ) -> list[int]:
        """How many leading hashes each slot holds on its device; 0 for slots outside `alive`."""
        get = self._device.masks.get
        if not speculative or not self._speculative:
            return self._walk(hashes, alive, lambda route_hash: get(route_hash, 0))
        coming = self._speculative.get
        return self._walk(
            hashes, alive, lambda route_hash: get(route_hash, 0) | coming(route_hash, 0)
        )

    def reach(self, hashes: Sequence[bytes], alive: int) -> list[int] | None:
        """Leading hashes held on either tier; None when no host tier holds anything."""
        if not self._host.masks:
            return None
        device, host, coming = self._device.masks.get, self._host.masks.get, self._speculative.get
        return self._walk(
            hashes,
            alive,
            lambda route_hash: device(route_hash, 0) | host(route_hash, 0) | coming(route_hash, 0),
        )

    def watch(self, hashes: Sequence[bytes], watcher: Hashable) -> None:
        """Name `watcher` in `take_touched` when an entry of one of these hashes changes."""
        for route_hash in hashes:
            self._watchers.setdefault(route_hash, set()).add(watcher)

    def unwatch(self, hashes: Sequence[bytes], watcher: Hashable) -> None:
        """End a `watch`."""
        for route_hash in hashes:
            watchers = self._watchers.get(route_hash)
            if watchers is not None:
                watchers.discard(watcher)
                if not watchers:
                    del self._watchers[route_hash]
        self._touched.discard(watcher)

    def take_touched(self) -> set[Hashable]:
        """Watchers whose hashes changed since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def stats(self) -> IndexStats:
        """Sizes now."""
        return IndexStats(
            device_entries=sum(len(held) for held in self._device.held),
            host_entries=sum(len(held) for held in self._host.held),
            speculative_entries=sum(len(counts) for counts in self._speculations),
            hashes=len(self._device.masks.keys() | self._host.masks.keys()),
            watched=len(self._watchers),
        )

    def check_integrity(self) -> None:
        """Assert that the masks, the sets and the digests say the same."""
        for layer in self._layers:
            layer.check()
        pairs = sum(mask.bit_count() for mask in self._speculative.values())
        counted = sum(len(counts) for counts in self._speculations)
        assert pairs == counted, f"{pairs} speculative bits, {counted} counted"
        assert all(n > 0 for counts in self._speculations for n in counts.values())
        assert all(self._watchers.values()), "an empty set of watchers was kept"

    def _change(
        self, layer: _Layer, slot: int, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        for route_hash in removed:
            if layer.discard(slot, route_hash):
                self._touch(route_hash)
        for route_hash in stored:
            if layer.add(slot, route_hash):
                self._touch(route_hash)

    def _drop_speculation(self, slot: int, route_hash: bytes) -> None:
        del self._speculations[slot][route_hash]
        mask = self._speculative[route_hash] & ~(1 << slot)
        if mask:
            self._speculative[route_hash] = mask
        else:
            del self._speculative[route_hash]
        self._touch(route_hash)

    def _touch(self, route_hash: bytes) -> None:
        watchers = self._watchers.get(route_hash)
        if watchers is not None:
            self._touched |= watchers

    def _walk(self, hashes: Sequence[bytes], alive: int, holders: Holders) -> list[int]:
        depths = [0] * len(self._speculations)
        for depth, route_hash in enumerate(hashes):
            held = holders(route_hash) & alive
            if held != alive:
                if depth:  # slots that lack the first hash keep their 0
                    for slot in bits(alive ^ held):
                        depths[slot] = depth
                if not held:
                    return depths
                alive = held
        for slot in bits(alive):
            depths[slot] = len(hashes)
        return depths
