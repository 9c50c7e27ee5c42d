"""What a load leaves in memory: the C library's heap, pages of files. Knows no tensor, no model."""

import ctypes
import mmap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_MAPS = Path("/proc/self/maps")
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
        give_back_freed()


def give_back_freed() -> None:
    """Let the system have what was freed and is kept for later; does nothing but with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_pages(path: Path) -> None:
    """Let go of a mapped file's pages, to which nothing has written; who reads them has them again.

    They count as this process's memory while they are here. Does nothing but on Linux.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or not _MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    name = str(path.resolve())
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            begin, end = (int(bound, 16) for bound in fields[0].split("-"))
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
