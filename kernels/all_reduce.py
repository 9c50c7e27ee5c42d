"""The compiled collectives between the ranks of one host: where the library is, what it takes.

Knows the C interface of csrc/all_reduce.cpp and nothing of files, names or errors.
"""

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

_LIBRARY_PATH = Path(__file__).with_name("_all_reduce.so")
_CULPRIT = POINTER(c_int32)

# What a collective returns; the rank that it speaks of stands in its last argument.
OK, TIMEOUT, LOST, ABORTED, MISMATCH = range(5)

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pf_group_bytes": (c_int64, (c_int32, c_int64)),
    "pf_group_is_held": (c_int32, (c_int32, c_int32)),
    "pf_group_attach": (c_void_p, (c_int32, c_int32, c_int32, c_int64, c_int64, c_int32)),
    "pf_group_abort": (None, (c_void_p,)),
    "pf_group_close": (None, (c_void_p,)),
    "pf_group_check": (c_int32, (c_void_p, _CULPRIT)),
    "pf_group_barrier": (c_int32, (c_void_p, c_int64, _CULPRIT)),
    "pf_group_all_reduce": (c_int32, (c_void_p, c_void_p, c_int64, c_int32, _CULPRIT)),
    "pf_group_gather": (
        c_int32,
        (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, _CULPRIT),
    ),
    "pf_group_send": (c_int32, (c_void_p, c_void_p, c_int64, _CULPRIT)),
    "pf_group_await_message": (c_int32, (c_void_p, c_int64, POINTER(c_int64), _CULPRIT)),
    "pf_group_take_message": (c_int32, (c_void_p, c_void_p, c_int64, _CULPRIT)),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library with its signatures set; None where it was not compiled for this machine."""
    if not _LIBRARY_PATH.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(_LIBRARY_PATH), use_errno=True)
    except OSError:
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded
