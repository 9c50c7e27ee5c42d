"""What the compiled library does with plain memory: copies, huge pages, a yardstick."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .cpu_library import load_library, native_library


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a new tensor, before it is written: reading blocks in random order
    is a third faster with them. Only a hint; does nothing where the library is missing."""
    library = load_library()
    if library is not None and tensor.device.type == "cpu":
        library.pf_advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def copy_bytes(
    source_pool: NDArray[np.uint8],
    source_ids: NDArray[np.int32],
    target_pool: NDArray[np.uint8],
    target_ids: NDArray[np.int32],
) -> None:
    """`block_copy.copy_bytes` past the caches: half as fast again, and the model keeps its caches.

    One thread, the caller's, without the interpreter lock.
    """
    library = native_library()
    assert source_pool.shape[1] == target_pool.shape[1], "the pools' blocks differ in size"
    sources, targets = (np.ascontiguousarray(i, dtype=np.int32) for i in (source_ids, target_ids))
    library.pf_copy_blocks(
        source_pool.ctypes.data,
        sources.ctypes.data,
        target_pool.ctypes.data,
        targets.ctypes.data,
        len(sources),
        source_pool.shape[1],
    )


def sum_blocks(data: Tensor, order: Tensor, block: int, num_threads: int) -> float:
    """The sum of `block` floats at each of the offsets `order`, read as fast as memory allows.

    data: float32, contiguous; order: int64 [n]. What memory-bound kernels are measured against.
    """
    return native_library().pf_sum_blocks(
        data.data_ptr(), order.data_ptr(), order.shape[0], block, num_threads
    )
