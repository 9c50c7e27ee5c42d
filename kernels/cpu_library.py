"""The compiled library: where it is, what its functions take, and which instruction set it uses.

Knows the C interface of `csrc/kernels.h` and `csrc/library.cpp`, which these structures repeat; no
tensor crosses here.
"""

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

_LIBRARY_PATH = Path(__file__).with_name("_cpu.so")
_PAUSE_SOFT = 1  # of OpenMP
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class PackArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "packed", "scale")),
        *((name, c_int64) for name in ("out_features", "in_features")),
        *((name, c_int32) for name in ("weight_dtype", "packed_dtype", "threads")),
    )


class CodesArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scale", "zero")),
        *((name, c_void_p) for name in ("packed", "packed_scale", "packed_zero")),
        *((name, c_int64) for name in ("out_features", "in_features", "group")),
        *((name, c_int32) for name in ("packed_dtype", "threads")),
    )


class LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "packed", "scale", "zero", "bias", "out")),
        *((name, c_int64) for name in ("rows", "out_features", "in_features", "group")),
        *((name, c_int32) for name in ("x_dtype", "packed_dtype", "threads", "is_exact")),
    )


_CACHE_STRIDES = ("block_stride", "value_offset", "token_stride", "head_stride")


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "kv", "out")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, c_int64) for name in ("table_stride", *_CACHE_STRIDES)),
        *((name, c_int64) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "block_size", "window")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_int32) for name in ("dtype", "threads")),
    )


class RopeArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "kv", "cos_sin")),
        *((name, c_void_p) for name in ("positions", "slots")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", *_CACHE_STRIDES)),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "rotary_dim", "block_size")),
        *((name, c_int32) for name in ("dtype", "threads")),
    )


class LayerArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm", "cos_sin")),
        *((name, c_int64) for name in ("rotary_dim", "window")),
    )


class StackArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "kv", "residual", "x", "room")),
        ("rope", RopeArgs),
        ("attention", AttentionArgs),
        *((name, c_int64) for name in ("num_layers", "hidden", "ffn")),
        *((name, c_int64) for name in ("q_norm_width", "k_norm_width")),
        ("eps", c_float),
        ("is_gelu", c_int32),
    )


class FilterArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "weights", "temperature")),
        *((name, c_void_p) for name in ("top_k", "top_p", "min_p")),
        *((name, c_int64) for name in ("rows", "vocab", "logits_stride")),
        ("threads", c_int32),
    )


_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float
_SIGNATURES: dict[str, list[type]] = {
    "pf_advise_huge_pages": [_P, _L],
    "pf_pack_linear": [_P],
    "pf_pack_codes": [_P],
    "pf_unpack_rows": [_P, _P, _L, _I, _P, _L, _P, _I, _I],
    "pf_linear": [_P],
    "pf_attention": [_P],
    "pf_rope_and_cache": [_P],
    "pf_run_stack": [_P],
    "pf_rms_norm": [_P, _P, _P, _L, _L, _F, _I, _I],
    "pf_add_rms_norm": [_P, _P, _P, _P, _L, _L, _F, _I, _I],
    "pf_silu_and_mul": [_P, _P, _L, _L, _I, _I],
    "pf_gelu_tanh_and_mul": [_P, _P, _L, _L, _I, _I],
    "pf_filter_logits": [_P],
    "pf_copy_slots": [_P, _P, _P, _P, _L, _L, _L, _L, _I],
    "pf_copy_blocks": [_P, _P, _P, _P, _L, _L],
}


class NativeLibraryMissing(RuntimeError):
    """The compiled library is not there, or does not run on this CPU."""


@cache
def load_library() -> ctypes.CDLL | None:
    """Loaded after torch, so that both share the OpenMP runtime that torch brought."""
    try:
        library = ctypes.CDLL(str(_LIBRARY_PATH))
    except OSError:
        return None
    for name, argument_types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argument_types, None
    library.pf_select.argtypes, library.pf_select.restype = [c_char_p], c_char_p
    library.pf_packed_bytes.argtypes = [_L, _L, _I]
    library.pf_packed_bytes.restype = c_int64
    library.pf_fits_bfloat16.argtypes, library.pf_fits_bfloat16.restype = [_P, _L, _I], c_int32
    library.pf_stack_room.argtypes, library.pf_stack_room.restype = [_P], c_int64
    library.pf_panel.argtypes, library.pf_panel.restype = [], c_int64
    library.pf_sum_blocks.argtypes, library.pf_sum_blocks.restype = [_P, _P, _L, _L, _I], c_double
    library.pf_select(None)
    return library


def native_library() -> ctypes.CDLL:
    """The library, where there has to be one."""
    library = load_library()
    if library is None:
        raise NativeLibraryMissing(f"{_LIBRARY_PATH.name} was not built")
    return library


def is_available() -> bool:
    """Whether the compiled library was built and loads here."""
    return load_library() is not None


def end_team() -> None:
    """End the threads that helped the calling one with its parallel parts; they come again when
    it needs them.

    Every thread that computes has a team of its own, and where a process has more of them than
    CPUs, libgomp's do not wait for a moment but sleep at once: a decode step, which is hundreds
    of short parts, then takes a fifth longer. Who has loaded a model for another thread to run
    must not keep its team.
    """
    library = load_library()
    pause = None if library is None else getattr(library, "omp_pause_resource_all", None)
    if pause is not None:
        pause(_PAUSE_SOFT)


def select_instruction_set(name: str | None = None) -> str:
    """Use the named instruction set (None: the best) from now on; returns its name.

    For tests and comparisons, before any weight is packed: each set has its own packed layout.
    """
    library = native_library()
    chosen = library.pf_select(None if name is None else name.encode())
    if chosen is None:
        raise NativeLibraryMissing(f"{name} is not supported by this machine or this build")
    return chosen.decode()
