"""What a waiting sequence could start from, and where it lies. Finds nothing itself."""

from collections.abc import Sequence as Array
from dataclasses import dataclass

from .content import Content
from .host_tier import Move


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence could start from, block by block.

    device_blocks: where each is, or is being loaded to; None = to be loaded from its host block.
    contents, host_blocks: None where there is none; host_blocks is empty if nothing is loaded.
    num_idle: device blocks that nobody holds, which cost capacity when they are taken.
    arriving: contents that are on their way for others.
    """

    num_computed: int = 0
    device_blocks: Array[int | None] = ()
    host_blocks: Array[int | None] = ()
    contents: Array[Content | None] = ()
    num_idle: int = 0
    arriving: Array[Content] = ()

    @property
    def num_resident(self) -> int:
        """Blocks that need not be allocated."""
        if not self.host_blocks:
            return len(self.device_blocks)
        return sum(block is not None for block in self.device_blocks)


def place_loads(prefix: Prefix, fresh: list[int]) -> tuple[list[int], list[Move]]:
    """The table with `fresh` where a block has to be loaded, and the loads."""
    table: list[int] = []
    moves: list[Move] = []
    supply = iter(fresh)
    for block, host_block, content in zip(
        prefix.device_blocks, prefix.host_blocks, prefix.contents, strict=True
    ):
        if block is None:
            block = next(supply)
            assert host_block is not None, f"{content} is nowhere"
            moves.append(Move(block, host_block, content, 0 if content is None else content.id))
        table.append(block)
    return table, moves
