"""Which strides of the route chain are resident on which tier, and what changed since last asked.

A stride is resident where all its blocks' contents are. Knows no block and no hash but these.
"""

from ..protos.messages import RouteEvents
from .content import Content, Stride, Tier


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
        self._tiers = (_TierLog(), _TierLog())

    def add(self, route_hash: bytes, members: list[Content]) -> None:
        """A stride became known. members: its contents, last one first.

        Nothing happens if it was known: another sequence of the same tokens came first.
        """
        last = members[0]
        if last.strides is not None and any(s.members[0] is last for s in last.strides):
            return
        stride = Stride(route_hash, members)
        for content in members:
            if content.strides is None:
                content.strides = [stride]
            else:
                content.strides.append(stride)
        for log, missing in zip(self._tiers, stride.missing, strict=True):
            if not missing:
                log.store(route_hash)

    def arrived(self, content: Content, tier: Tier) -> None:
        """The first copy of a content on this tier may be used now."""
        for stride in content.strides or ():
            stride.missing[tier] -= 1
            if not stride.missing[tier]:
                self._tiers[tier].store(stride.route_hash)

    def left(self, content: Content, tier: Tier) -> None:
        """The last copy of a content on this tier is gone."""
        for stride in content.strides or ():
            if not stride.missing[tier]:
                self._tiers[tier].remove(stride.route_hash)
            stride.missing[tier] += 1

    def retire(self, content: Content) -> None:
        """A content is on no tier any more: its strides can never be whole again."""
        for stride in content.strides or ():
            for member in stride.members:
                strides = member.strides
                assert strides is not None, f"{member} does not know its stride"
                if len(strides) == 1:
                    member.strides = None
                elif member is not content:
                    strides.remove(stride)
        content.strides = None

    def evicted(self, content: Content, tier: Tier) -> None:
        """The last copy of a content, on this tier, is gone: `left` and `retire` at once."""
        remove = self._tiers[tier].remove
        for stride in content.strides or ():
            if not stride.missing[tier]:
                remove(stride.route_hash)
        self.retire(content)

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
