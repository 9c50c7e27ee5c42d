"""The records of what is published: contents, and the strides of the route chain over them."""

from enum import IntEnum


class Tier(IntEnum):
    """Where a block lives."""

    DEVICE = 0
    HOST = 1


_TIERS = tuple(Tier)


class Content:
    """One full block's tokens together with everything before it. Made once, recycled with a
    new id.

    id: 0 = this record is unused. parent_id: the id that `parent` had when this was published.
    blocks: by tier, the block that is found for it. duplicates: device blocks that hold the same.
    strides: those of the route chain that it is part of.
    """

    __slots__ = (
        "blocks",
        "duplicates",
        "hash",
        "id",
        "key",
        "parent",
        "parent_id",
        "strides",
        "tokens",
    )

    def __init__(self) -> None:
        self.id = 0
        self.hash = b""
        self.key = b""
        self.tokens = b""
        self.parent: Content | None = None
        self.parent_id = 0
        self.blocks: list[int | None] = [None, None]
        self.duplicates: list[int] | None = None
        self.strides: list[Stride] | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether a prefix can still lead here: the parent it was published under lives."""
        return self.parent is not None and self.parent.id == self.parent_id

    def __repr__(self) -> str:
        device, host = self.blocks
        return f"Content(id={self.id}, device={device}, host={host})"


class Stride:
    """One entry of the route chain. members: its contents, last one first. missing: per tier, how
    many of them are not there."""

    __slots__ = ("members", "missing", "route_hash")

    def __init__(self, route_hash: bytes, members: list[Content]) -> None:
        self.route_hash = route_hash
        self.members = members
        if len(members) == 1:
            device, host = members[0].blocks
            self.missing = [int(device is None), int(host is None)]
        else:
            blocks = [content.blocks for content in members]
            self.missing = [sum([b[tier] is None for b in blocks]) for tier in _TIERS]
