"""A pool's blocks as a picture: the state of each, or of as many cells as a viewer has room for.

Made only while someone looks. Knows states and arithmetic, not where they come from.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..protos.messages import PoolMap

StateArray = NDArray[np.uint8]

_LEVELS = 31  # of the share of a cell's blocks that are in its state


class BlockState(IntEnum):
    """What a viewer tells apart; the four states of the pool, and two of them seen closer."""

    CLEAN = 0
    CACHED = 1
    REFERENCED = 2
    SHARED = 3  # referenced by more than one
    FENCED = 4
    HOST = 5  # cached, on the host tier


def make_map(states: StateArray, max_cells: int) -> PoolMap:
    """At most `max_cells` runs of blocks, each as the state that most of them are in.

    states: [num_blocks] uint8 of BlockState. Of states with equally many blocks the last one in
    the order above is shown: the rarer sight.
    """
    num_blocks = len(states)
    if not num_blocks:
        return PoolMap(0, b"")
    num_cells = min(num_blocks, max_cells)
    starts = np.arange(num_cells) * num_blocks // num_cells
    order = np.array(list(reversed(BlockState)), dtype=np.uint8)
    is_in = (states[None, :] == order[:, None]).astype(np.int32)
    counts = np.add.reduceat(is_in, starts, axis=1)
    most = counts.argmax(axis=0)
    sizes = np.diff(starts, append=num_blocks)
    levels = -(-counts.max(axis=0) * _LEVELS // sizes)  # rounded up: never 0
    cells = order[most] | (levels.astype(np.uint8) << 3)
    return PoolMap(num_blocks, cells.astype(np.uint8).tobytes())
