"""The C library's heap while weights load. Knows no tensor and no model."""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_WHILE_LOADING = 256 * 2**10
_AFTERWARDS = 32 * 2**20  # as high as glibc raises it by itself


@contextmanager
def unfragmented_heap() -> Generator[None]:
    """Give large tensors pages of their own, which go back to the system with them.

    Weights are put together from pieces that are freed again; in the heap the holes they leave
    cost a quarter of the weights. Afterwards large tensors come from the heap again, so that a
    step does not fault in new pages for each. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)
        mallopt(_M_TRIM_THRESHOLD, 2 * _AFTERWARDS)
