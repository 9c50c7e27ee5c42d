"""Which strides of the route chain are resident on which tier, and what changed since last asked.

A stride is resident where all its blocks' contents are. Knows contents by their ids only.
"""

from collections.abc import Iterable
from enum import IntEnum

from ..protos.messages import RouteEvents


class Tier(IntEnum):
    """Where a block lives."""

    DEVICE = 0
    HOST = 1


class _Stride:
    """missing: per tier, how many of `members` (content ids) are not there."""

    __slots__ = ("members", "missing", "route_hash")

    def __init__(self, route_hash: bytes, members: tuple[int, ...], missing: list[int]) -> None:
        self.route_hash = route_hash
        self.members = members
        self.missing = missing


class _TierLog:
    """The resident route hashes of one tier, and the net change since the last report."""

    __slots__ = ("digest", "removed", "resident", "stored")

    def __init__(self) -> None:
        self.resident: set[bytes] = set()
        self.stored: set[bytes] = set()
        self.removed: set[bytes] = set()
        self.digest = 0  # XOR of `resident` as of the last report

    def store(self, route_hash: bytes) -> None:
        self.resident.add(route_hash)
        if route_hash in self.removed:
            self.removed.discard(route_hash)
        else:
            self.stored.add(route_hash)

    def remove(self, route_hash: bytes) -> None:
        self.resident.discard(route_hash)
        if route_hash in self.stored:
            self.stored.discard(route_hash)
        else:
            self.removed.add(route_hash)

    def settle(self) -> None:
        for changed in (self.stored, self.removed):
            for route_hash in changed:
                self.digest ^= int.from_bytes(route_hash)
        self.stored = set()
        self.removed = set()


class RouteResidency:
    """Follows contents as they come to a tier and leave it."""

    def __init__(self) -> None:
        self._strides_of: dict[int, list[_Stride]] = {}
        self._known: set[bytes] = set()
        self._tiers = (_TierLog(), _TierLog())

    def add(self, route_hash: bytes, members: tuple[int, ...], missing: list[int]) -> None:
        """A stride became known. missing: per tier, how many members are not there now.

        Nothing happens if it was known: another sequence of the same tokens came first.
        """
        if route_hash in self._known:
            return
        self._known.add(route_hash)
        stride = _Stride(route_hash, members, missing)
        for content_id in members:
            self._strides_of.setdefault(content_id, []).append(stride)
        for tier in Tier:
            if not missing[tier]:
                self._tiers[tier].store(route_hash)

    def arrived(self, content_id: int, tier: Tier) -> None:
        """The first copy of a content on this tier may be used now."""
        for stride in self._strides_of.get(content_id, ()):
            stride.missing[tier] -= 1
            if not stride.missing[tier]:
                self._tiers[tier].store(stride.route_hash)

    def left(self, content_id: int, tier: Tier) -> None:
        """The last copy of a content on this tier is gone."""
        for stride in self._strides_of.get(content_id, ()):
            if not stride.missing[tier]:
                self._tiers[tier].remove(stride.route_hash)
            stride.missing[tier] += 1

    def retire(self, content_id: int) -> None:
        """A content is on no tier any more: its strides can never be whole again."""
        for stride in self._strides_of.pop(content_id, ()):
            self._known.discard(stride.route_hash)
            for member in stride.members:
                if member != content_id and (others := self._strides_of.get(member)) is not None:
                    others.remove(stride)
                    if not others:
                        del self._strides_of[member]

    def take_events(self) -> RouteEvents:
        """The net change since the last call. The digests now speak of after it."""
        device, host = self._tiers
        events = RouteEvents(
            stored_device=tuple(device.stored),
            removed_device=tuple(device.removed),
            stored_host=tuple(host.stored),
            removed_host=tuple(host.removed),
        )
        device.settle()
        host.settle()
        return events

    def snapshot(self) -> RouteEvents:
        """All that is resident; events not yet taken are in it and forgotten."""
        device, host = self._tiers
        device.settle()
        host.settle()
        return RouteEvents(stored_device=tuple(device.resident), stored_host=tuple(host.resident))

    @property
    def digests(self) -> tuple[int, int]:
        """XOR of the resident route hashes per tier, as of the last events or snapshot taken."""
        device, host = self._tiers
        return device.digest, host.digest

    def resident(self, tier: Tier) -> Iterable[bytes]:
        """The route hashes on this tier now."""
        return self._tiers[tier].resident

    @property
    def num_tracked(self) -> int:
        """Contents that belong to a stride."""
        return len(self._strides_of)
