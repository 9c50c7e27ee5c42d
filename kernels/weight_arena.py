"""Memory for packed weights, one after the other on huge pages. Knows no layout."""
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from .cpu_memory import advise_huge_pages

_HUGE_PAGE = 2 * 2**20
_CHUNK = 16 * _HUGE_PAGE
_LINE = 64


class WeightArena:
    """Cuts tensors off large chunks, which live as long as any of them does.

    A layer's weights are of a few megabytes, so that each by itself would hardly hold a whole huge
    page; on small ones a decode step, which reads all of them once, waits for the next page's
    address every 4 KB. What of a chunk is not used is never touched, and takes no memory.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], not filled; begins with a cache line."""
        size = -(-num_bytes // _LINE) * _LINE
        if size > len(self._rest):
            self._rest = _new_chunk(max(size, _CHUNK))
        taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


def _new_chunk(num_bytes: int) -> Tensor:
    """Begins with a huge page."""
    room = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    chunk = room[-room.data_ptr() % _HUGE_PAGE :]
    advise_huge_pages(chunk)
    return chunk
