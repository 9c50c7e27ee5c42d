"""Moving blocks: copy-on-write inside a pool, whole blocks between two pools.

Knows the block-major layout (a block is one contiguous piece over all layers) and nothing of
who owns a block or when a copy may start.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def copy_slots(pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
    """The first num_slots[i] slots of block sources[i] → targets[i], over all layers.

    pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; the rest int64 [n].
    Copies of one call are independent: no target is also a source.
    """
    for source, target, slots in zip(
        sources.tolist(), targets.tolist(), num_slots.tolist(), strict=True
    ):
        pool[target, :, :, :slots].copy_(pool[source, :, :, :slots])


def coalesce(
    sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of every run in which both sides are consecutive ids."""
    if len(sources) == 0:
        return
    steps = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    starts = np.concatenate(([0], np.flatnonzero(steps) + 1))
    lengths = np.diff(np.append(starts, len(sources)))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        yield int(sources[start]), int(targets[start]), length


def copy_blocks(
    source_pool: Tensor,
    source_ids: NDArray[np.int32],
    target_pool: Tensor,
    target_ids: NDArray[np.int32],
) -> None:
    """Whole blocks source_ids[i] → target_ids[i], one copy per run of adjacent ids.

    Between host and device the copies are asynchronous on the current stream if the host side
    is pinned.
    """
    for source, target, length in coalesce(source_ids, target_ids):
        target_pool[target : target + length].copy_(
            source_pool[source : source + length], non_blocking=True
        )


def copy_bytes(
    source_pool: NDArray[np.uint8],
    source_ids: NDArray[np.int32],
    target_pool: NDArray[np.uint8],
    target_ids: NDArray[np.int32],
) -> None:
    """As `copy_blocks`, on byte views [num_blocks, block_bytes] in host memory.

    Plain memory copies that release the interpreter lock and start no OpenMP team, so a copy
    thread can run beside the model.
    """
    for source, target, length in coalesce(source_ids, target_ids):
        target_pool[target : target + length] = source_pool[source : source + length]
