"""Which replica holds which prefix: route hash → replicas, as bit sets, one per tier.

Mirrors what the replicas report and is bounded by their pools. Knows nothing of requests, leases
or models; a replica is a slot number here. Audits itself: the XOR of what is held per slot and
tier must equal the digest that the replica reports.

    device        b1 b2 b3 b4 .            depth 4
    host          .  .  .  b4 b5 b6        reach 6: the host tier continues the prefix
    claimed       b1 b2 .  .  .  .  b7     by prompts under lease there: pinned, or on its way

A prefix counts as far as it is unbroken from the root.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..protos.messages import RouteEvents

IntArray = NDArray[np.int64]

_FEW_BITS = 8  # so many are written one by one


class Tier(IntEnum):
    """Where a block is resident."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes, for bounds and for tests. `entries` counts (hash, replica) pairs per tier."""

    device_entries: int
    host_entries: int
    claimed_entries: int
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
    """One tier: hash → bit set, and the same the other way round to empty a slot quickly.

    What a slot holds is a dictionary: the garbage collector would walk through a set.
    """

    def __init__(self) -> None:
        self.masks: dict[bytes, int] = {}
        self.held: list[dict[bytes, None]] = []
        self.digests: list[int] = []

    def grow(self) -> None:
        self.held.append({})
        self.digests.append(0)

    def add(self, slot: int, route_hash: bytes) -> bool:
        held = self.held[slot]
        if route_hash in held:
            return False
        held[route_hash] = None
        self.masks[route_hash] = self.masks.get(route_hash, 0) | (1 << slot)
        self.digests[slot] ^= hash_as_int(route_hash)
        return True

    def discard(self, slot: int, route_hash: bytes) -> bool:
        held = self.held[slot]
        if route_hash not in held:
            return False
        del held[route_hash]
        self.digests[slot] ^= hash_as_int(route_hash)
        _clear_bit(self.masks, route_hash, 1 << slot)
        return True

    def clear(self, slot: int) -> dict[bytes, None]:
        dropped = self.held[slot]
        for route_hash in dropped:
            _clear_bit(self.masks, route_hash, 1 << slot)
        self.held[slot] = {}
        self.digests[slot] = 0
        return dropped

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


class _Claims:
    """What prompts under lease hold or will hold: hash → bit set, and how many more prompts of the
    same slot than one do. Few share more than the beginning, so most hashes cost one look-up."""

    def __init__(self) -> None:
        self.masks: dict[bytes, int] = {}
        self.more: list[dict[bytes, int]] = []

    def add(self, slot: int, hashes: Sequence[bytes]) -> None:
        masks, more, bit = self.masks, self.more[slot], 1 << slot
        for route_hash in hashes:
            mask = masks.get(route_hash, 0)
            if mask & bit:
                more[route_hash] = more.get(route_hash, 0) + 1
            else:
                masks[route_hash] = mask | bit

    def discard(self, slot: int, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns those that no prompt of the slot claims any more."""
        masks, more, bit = self.masks, self.more[slot], 1 << slot
        gone: list[bytes] = []
        for route_hash in hashes:
            if route_hash in more:
                more[route_hash] -= 1
                if not more[route_hash]:
                    del more[route_hash]
            elif masks.get(route_hash, 0) & bit:
                _clear_bit(masks, route_hash, bit)
                gone.append(route_hash)
        return gone

    def check(self) -> None:
        for slot, more in enumerate(self.more):
            for route_hash, count in more.items():
                assert count > 0, f"slot {slot} counts {count} more claims"
                assert self.masks[route_hash] >> slot & 1, f"slot {slot} counts beyond nothing"


def _clear_bit(masks: dict[bytes, int], route_hash: bytes, bit: int) -> None:
    mask = masks[route_hash] & ~bit
    if mask:
        masks[route_hash] = mask
    else:
        del masks[route_hash]


class PrefixIndex:
    """The exact index of one model's replicas."""

    def __init__(self) -> None:
        self._device = _Layer()
        self._host = _Layer()
        self._layers = (self._device, self._host)
        self._claims = _Claims()
        self._watchers: dict[bytes, set[Hashable]] = {}
        self._touched: set[Hashable] = set()

    @property
    def num_slots(self) -> int:
        """Slots ever added; a match has one entry for each."""
        return len(self._claims.more)

    def add_slot(self) -> int:
        """A new slot number; the caller reuses it after `clear`."""
        self._device.grow()
        self._host.grow()
        self._claims.more.append({})
        return self.num_slots - 1

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
            wanted = dict.fromkeys(stored)
            gone = layer.held[slot].keys() - wanted.keys()
            self._change(layer, slot, wanted, gone)

    def clear(self, slot: int) -> None:
        """Forget all that the slot held, on every tier; claims end with their leases."""
        for layer in self._layers:
            self._touch(layer.clear(slot))

    def num_holders(self, route_hash: bytes) -> tuple[int, int]:
        """How many slots hold it, on the device and on the host tier."""
        masks = (layer.masks.get(route_hash, 0) for layer in self._layers)
        device, host = (mask.bit_count() for mask in masks)
        return device, host

    def digest(self, slot: int, tier: Tier) -> int:
        """XOR of all hashes that the slot holds on the tier."""
        return self._layers[tier].digests[slot]

    def num_held(self, slot: int, tier: Tier) -> int:
        """Entries of one slot on one tier."""
        return len(self._layers[tier].held[slot])

    def claim(self, slot: int, hashes: Sequence[bytes]) -> None:
        """A prompt with these was granted a lease there: it pins what is resident and will make
        the rest resident."""
        self._claims.add(slot, hashes)
        self._touch(hashes)

    def unclaim(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The lease has ended."""
        self._touch(self._claims.discard(slot, hashes))

    def device_depths(
        self, hashes: Sequence[bytes], alive: int, *, speculative: bool = True
    ) -> IntArray:
        """How many leading hashes each slot holds on its device; 0 for slots outside `alive`."""
        held, claimed = self._device.masks.get, self._claims.masks.get
        if not speculative or not self._claims.masks:
            return self._walk((held(h, 0) for h in hashes), len(hashes), alive)
        return self._walk((held(h, 0) | claimed(h, 0) for h in hashes), len(hashes), alive)

    def pinned_depths(self, hashes: Sequence[bytes], alive: int) -> IntArray:
        """How many leading hashes are resident on each slot and in use by a prompt under lease."""
        held, claimed = self._device.masks.get, self._claims.masks.get
        return self._walk((held(h, 0) & claimed(h, 0) for h in hashes), len(hashes), alive)

    def reach(self, hashes: Sequence[bytes], alive: int) -> IntArray | None:
        """Leading hashes held on either tier; None when no host tier holds anything."""
        if not self._host.masks:
            return None
        device, host = self._device.masks.get, self._host.masks.get
        claimed = self._claims.masks.get
        masks = (device(h, 0) | host(h, 0) | claimed(h, 0) for h in hashes)
        return self._walk(masks, len(hashes), alive)

    def deepest(self, hashes: Sequence[bytes], among: int) -> tuple[int, int]:
        """Most leading hashes that a slot of `among` holds for certain, on either tier, and which
        slots hold so many."""
        device, host = self._device.masks.get, self._host.masks.get
        for depth, route_hash in enumerate(hashes):
            holders = among & (device(route_hash, 0) | host(route_hash, 0))
            if not holders:
                return depth, among
            among = holders
        return len(hashes), among

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
            claimed_entries=sum(mask.bit_count() for mask in self._claims.masks.values()),
            hashes=len(self._device.masks.keys() | self._host.masks.keys()),
            watched=len(self._watchers),
        )

    def check_integrity(self) -> None:
        """Assert that the masks, the sets and the digests say the same."""
        for layer in self._layers:
            layer.check()
        self._claims.check()
        assert all(self._watchers.values()), "an empty set of watchers was kept"

    def _change(
        self, layer: _Layer, slot: int, stored: Iterable[bytes], removed: Iterable[bytes]
    ) -> None:
        self._touch([route_hash for route_hash in removed if layer.discard(slot, route_hash)])
        self._touch([route_hash for route_hash in stored if layer.add(slot, route_hash)])

    def _touch(self, hashes: Iterable[bytes]) -> None:
        if self._watchers:
            for route_hash in hashes:
                self._touched.update(self._watchers.get(route_hash, ()))

    def _walk(self, masks: Iterable[int], num_hashes: int, alive: int) -> IntArray:
        """masks: of each hash in turn, who has it. Goes only as far as anybody has them all."""
        depths = np.zeros(self.num_slots, dtype=np.int64)
        for depth, mask in enumerate(masks):
            left = alive & mask
            if left != alive:
                if depth:  # slots that lack the first hash keep their 0
                    _assign(depths, alive ^ left, depth)
                if not left:
                    return depths
                alive = left
        _assign(depths, alive, num_hashes)
        return depths


def _assign(values: IntArray, mask: int, value: int) -> None:
    """Write `value` at the positions of the set bits."""
    if mask.bit_count() <= _FEW_BITS:
        for place in bits(mask):
            values[place] = value
    else:
        count = len(values)
        packed = np.frombuffer(mask.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
        values[np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)] = value
