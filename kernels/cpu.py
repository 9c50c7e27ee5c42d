"""The compiled CPU backend: plain C++ called through ctypes on the tensors' own memory.

Knows the library's C interface and how tensors cross it; the arithmetic is in csrc/. A result of a
row depends on that row alone, whatever the batch, the chunks of a prompt or the number of
threads: the kernels always sum in one fixed order, so `deterministic` costs nothing here.

One thread at a time may use a backend and the weights it packed: argument blocks are kept and
reused, which makes a call cheap enough for small models.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .backend import LinearWeight
from .metadata import AttentionMetadata
from .quantized_weight import QuantizedWeight
from .reference import ReferenceBackend
from .sampling import DrawParams

_LIBRARY_PATH = Path(__file__).with_name("_cpu.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_CODES = {8: 2, 4: 3}  # by bits


class _PackArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "packed", "scale")),
        *((name, c_int64) for name in ("out_features", "in_features")),
        *((name, c_int32) for name in ("weight_dtype", "packed_dtype", "threads")),
    )


class _CodesArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scale", "zero")),
        *((name, c_void_p) for name in ("packed", "packed_scale", "packed_zero")),
        *((name, c_int64) for name in ("out_features", "in_features", "group")),
        *((name, c_int32) for name in ("packed_dtype", "threads")),
    )


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "packed", "scale", "zero", "bias", "out")),
        *((name, c_int64) for name in ("rows", "out_features", "in_features", "group")),
        *((name, c_int32) for name in ("x_dtype", "packed_dtype", "threads")),
    )


_CACHE_STRIDES = ("block_stride", "value_offset", "token_stride", "head_stride")


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "kv", "out")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, c_int64) for name in ("table_stride", *_CACHE_STRIDES)),
        *((name, c_int64) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "block_size", "window")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_int32) for name in ("dtype", "threads")),
    )


class _RopeArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "kv", "cos_sin")),
        *((name, c_void_p) for name in ("positions", "slots")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", *_CACHE_STRIDES)),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "rotary_dim", "block_size")),
        *((name, c_int32) for name in ("dtype", "threads")),
    )


class _FilterArgs(ctypes.Structure):
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
def _load_library() -> ctypes.CDLL | None:
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
    library.pf_panel.argtypes, library.pf_panel.restype = [], c_int64
    library.pf_sum_blocks.argtypes, library.pf_sum_blocks.restype = [_P, _P, _L, _L, _I], c_double
    library.pf_select(None)
    return library


def is_available() -> bool:
    """Whether the compiled library was built and loads here."""
    return _load_library() is not None


def select_instruction_set(name: str | None = None) -> str:
    """Use the named instruction set (None: the best) from now on; returns its name.

    For tests and comparisons, before any weight is packed: each set has its own packed layout.
    """
    library = _load_library()
    if library is None:
        raise NativeLibraryMissing(f"{_LIBRARY_PATH.name} was not built")
    chosen = library.pf_select(None if name is None else name.encode())
    if chosen is None:
        raise NativeLibraryMissing(f"{name} is not supported by this machine or this build")
    return chosen.decode()


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a new tensor, before it is written: reading blocks in random order
    is a third faster with them. Only a hint; does nothing where the library is missing."""
    library = _load_library()
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
    library = _load_library()
    if library is None:
        raise NativeLibraryMissing(f"{_LIBRARY_PATH.name} was not built")
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
    library = _load_library()
    if library is None:
        raise NativeLibraryMissing(f"{_LIBRARY_PATH.name} was not built")
    return library.pf_sum_blocks(
        data.data_ptr(), order.data_ptr(), order.shape[0], block, num_threads
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in panels of columns, as float32, bfloat16, int8 with a scale per output, or int8
    or int4 with a scale and a zero point for each group of inputs.

    packed: uint8 [bytes]; scale: float32, [out_features] for int8, by groups as the kernels like
    it; zero: likewise, None where all zero points are the middle of the codes; bias: float32
    [out_features].
    """

    out_features: int
    in_features: int
    weight_dtype: torch.dtype
    packed: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    arguments: _LinearArgs

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        parts = (self.packed, self.scale, self.zero, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


class CpuBackend:
    """`KernelBackend` in C++.

    Args:
        weight_dtype: how `pack_linear` stores weights; None keeps the dtype they come in.
            Narrower weights are widened as they are read: products are float32 all the same.
        num_threads: None takes torch's number at the time of construction.
        deterministic: compiled results always are.
    """

    name = "cpu"

    def __init__(
        self,
        deterministic: bool = False,
        *,
        weight_dtype: torch.dtype | None = None,
        num_threads: int | None = None,
    ) -> None:
        library = _load_library()
        if library is None:
            raise NativeLibraryMissing(f"{_LIBRARY_PATH.name} was not built")
        self.deterministic = deterministic
        self.num_threads = num_threads or torch.get_num_threads()
        self._weight_dtype = weight_dtype
        self._library = library
        self._attention = _AttentionArgs(threads=self.num_threads)
        self._rope = _RopeArgs(threads=self.num_threads)
        self._reference = ReferenceBackend(deterministic)  # for a cache narrower than the model
        self._attention_layout: tuple[object, ...] = ()
        self._rope_layout: tuple[object, ...] = ()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        weight = weight.contiguous()
        out_features, in_features = weight.shape
        dtype = self._weight_dtype or weight.dtype
        packed = self._room_for(out_features, in_features, _DTYPES[dtype])
        scale = torch.zeros(out_features) if dtype == torch.int8 else None
        arguments = _PackArgs(
            weight=weight.data_ptr(),
            packed=packed.data_ptr(),
            scale=_pointer(scale),
            out_features=out_features,
            in_features=in_features,
            weight_dtype=_DTYPES[weight.dtype],
            packed_dtype=_DTYPES[dtype],
            threads=self.num_threads,
        )
        self._library.pf_pack_linear(ctypes.byref(arguments))
        bias = None if bias is None else bias.float().contiguous()
        pointers = _LinearArgs(
            packed=packed.data_ptr(),
            scale=_pointer(scale),
            bias=_pointer(bias),
            out_features=out_features,
            in_features=in_features,
            packed_dtype=_DTYPES[dtype],
            threads=self.num_threads,
        )
        return PackedLinear(out_features, in_features, dtype, packed, scale, None, bias, pointers)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """Take a weight of codes as it is: never made float in memory."""
        assert weight.is_packable, f"groups of {weight.group_size}"
        codes = weight.codes.contiguous()
        out_features, in_features = codes.shape
        code = _CODES[weight.bits]
        # One group of all inputs may end inside a word.
        group = min(weight.group_size, -(-in_features // 8) * 8)
        packed = self._room_for(out_features, in_features, code)
        panel = self._library.pf_panel()
        panels, groups = -(-out_features // panel), -(-in_features // group)
        scale, zero = (torch.empty(panels, groups, panel) for _ in range(2))
        given = [part.float().contiguous() for part in (weight.scales, weight.zeros)]
        self._library.pf_pack_codes(
            ctypes.byref(
                _CodesArgs(
                    codes=codes.data_ptr(),
                    scale=given[0].data_ptr(),
                    zero=given[1].data_ptr(),
                    packed=packed.data_ptr(),
                    packed_scale=scale.data_ptr(),
                    packed_zero=zero.data_ptr(),
                    out_features=out_features,
                    in_features=in_features,
                    group=group,
                    packed_dtype=code,
                    threads=self.num_threads,
                )
            )
        )
        kept = zero if zero.any() else None
        bias = None if bias is None else bias.float().contiguous()
        pointers = _LinearArgs(
            packed=packed.data_ptr(),
            scale=scale.data_ptr(),
            zero=_pointer(kept),
            bias=_pointer(bias),
            out_features=out_features,
            in_features=in_features,
            group=group,
            packed_dtype=code,
            threads=self.num_threads,
        )
        return PackedLinear(
            out_features, in_features, torch.uint8, packed, scale, kept, bias, pointers
        )

    def _room_for(self, out_features: int, in_features: int, code: int) -> Tensor:
        num_bytes = self._library.pf_packed_bytes(out_features, in_features, code)
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.pf_advise_huge_pages(packed.data_ptr(), num_bytes)
        return packed

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight, PackedLinear), f"packed by another backend: {type(weight)}"
        rows, in_features = x.shape
        assert in_features == weight.in_features, f"{x.shape} against {weight.in_features}"
        x = x.contiguous()
        out = x.new_empty(rows, weight.out_features)
        arguments = weight.arguments
        arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
        arguments.rows, arguments.x_dtype = rows, _DTYPES[x.dtype]
        self._library.pf_linear(ctypes.byref(arguments))
        return out

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        """Rows token_ids (int64 [T]) of a packed weight → [T, in_features] of `dtype`.

        Lets a tied embedding and output layer live in one copy.
        """
        assert isinstance(weight, PackedLinear), f"packed by another backend: {type(weight)}"
        assert weight.weight_dtype in _DTYPES, "codes by groups are no embedding"
        token_ids = token_ids.to(torch.int64).contiguous()
        out = torch.empty(token_ids.shape[0], weight.in_features, dtype=dtype)
        self._library.pf_unpack_rows(
            weight.packed.data_ptr(),
            None if weight.scale is None else weight.scale.data_ptr(),
            weight.in_features,
            _DTYPES[weight.weight_dtype],
            token_ids.data_ptr(),
            token_ids.shape[0],
            out.data_ptr(),
            _DTYPES[dtype],
            self.num_threads,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight.dtype == x.dtype, f"a weight of {weight.dtype} for {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, hidden = x.shape
        self._library.pf_rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            _DTYPES[x.dtype],
            self.num_threads,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "the residual is updated in place"
        assert weight.dtype == residual.dtype == x.dtype, f"{weight.dtype}, {residual.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, hidden = x.shape
        self._library.pf_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            _DTYPES[x.dtype],
            self.num_threads,
        )
        return out

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        if kv_layer.dtype != q.dtype:
            return self._reference.rope_and_cache(q, k, v, cos_sin, kv_layer, metadata)
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments = self._rope
        layout = (metadata, cos_sin, q.shape, q.stride(), k.stride(), v.stride(), kv_layer.stride())
        if not _same(layout, self._rope_layout):
            self._describe_rope(q, k, v, cos_sin, kv_layer, metadata)
            self._rope_layout = layout
        arguments.q, arguments.k, arguments.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        arguments.q_out, arguments.kv = out.data_ptr(), kv_layer.data_ptr()
        self._library.pf_rope_and_cache(ctypes.byref(arguments))
        return out

    def _describe_rope(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Fill in what is the same for every layer of a step."""
        num_tokens, num_heads, head_dim = q.shape
        assert q.dtype == kv_layer.dtype, f"queries of {q.dtype} over a cache of {kv_layer.dtype}"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            assert tensor.stride()[1:] == (head_dim, 1), (
                f"{name}'s heads are apart: {tensor.stride()}"
            )
        assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
        assert metadata.positions.is_contiguous() and metadata.slots.is_contiguous()
        arguments = self._rope
        _describe_cache(arguments, kv_layer)
        arguments.cos_sin = cos_sin.data_ptr()
        arguments.positions = metadata.positions.data_ptr()
        arguments.slots = metadata.slots.data_ptr()
        arguments.q_stride, arguments.k_stride = q.stride(0), k.stride(0)
        arguments.v_stride = v.stride(0)
        arguments.num_tokens, arguments.num_heads = num_tokens, num_heads
        arguments.rotary_dim = cos_sin.shape[1]

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        if kv_layer.dtype != q.dtype:
            return self._reference.attention(q, kv_layer, metadata, scale, window, soft_cap)
        q = q.contiguous()
        out = torch.empty_like(q)
        arguments = self._attention
        layout = (metadata, q.shape, kv_layer.shape, kv_layer.stride())
        if not _same(layout, self._attention_layout):
            self._describe_attention(q, kv_layer, metadata)
            self._attention_layout = layout
        # Layers take turns with these.
        arguments.scale, arguments.soft_cap = scale, soft_cap or 0.0
        arguments.window = window or 0
        arguments.q, arguments.kv, arguments.out = q.data_ptr(), kv_layer.data_ptr(), out.data_ptr()
        self._library.pf_attention(ctypes.byref(arguments))
        return out

    def _describe_attention(self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata) -> None:
        """Fill in what is the same for every layer of a step."""
        tables = metadata.block_tables
        assert q.dtype == kv_layer.dtype, f"queries of {q.dtype} over a cache of {kv_layer.dtype}"
        assert tables.stride(1) == 1, f"the ids of a block table are apart: {tables.stride()}"
        arguments = self._attention
        _describe_cache(arguments, kv_layer)
        arguments.query_starts = metadata.query_starts.data_ptr()
        arguments.context_lens = metadata.context_lens.data_ptr()
        arguments.block_tables, arguments.table_stride = tables.data_ptr(), tables.stride(0)
        arguments.num_sequences = metadata.context_lens.shape[0]
        arguments.num_heads = q.shape[1]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, self._library.pf_silu_and_mul)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, self._library.pf_gelu_tanh_and_mul)

    def _gated(self, gate_up: Tensor, function: Callable[..., None]) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        function(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            _DTYPES[gate_up.dtype],
            self.num_threads,
        )
        return out

    def filtered_weights(self, logits: Tensor, params: DrawParams) -> Tensor:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.stride()}"
        rows, vocab_size = logits.shape
        weights = torch.empty(rows, vocab_size)
        given = [
            part.contiguous()
            for part in (params.temperature, params.top_k, params.top_p, params.min_p)
        ]
        self._library.pf_filter_logits(
            ctypes.byref(
                _FilterArgs(
                    logits.data_ptr(),
                    weights.data_ptr(),
                    *(part.data_ptr() for part in given),
                    rows,
                    vocab_size,
                    logits.stride(0),
                    self.num_threads,
                )
            )
        )
        return weights

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        assert pool.is_contiguous(), "blocks are copied as one piece per plane"
        num_layers, block_size = pool.shape[1], pool.shape[3]
        slot_bytes = pool.shape[4] * pool.shape[5] * pool.element_size()
        self._library.pf_copy_slots(
            pool.data_ptr(),
            sources.data_ptr(),
            targets.data_ptr(),
            num_slots.data_ptr(),
            sources.shape[0],
            num_layers * 2,
            block_size * slot_bytes,
            slot_bytes,
            self.num_threads,
        )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _same(layout: tuple[object, ...], known: tuple[object, ...]) -> bool:
    """Identity for tensors and metadata (kept alive by the tuple), equality for the rest."""
    return len(layout) == len(known) and all(
        a is b or (not isinstance(a, Tensor | AttentionMetadata) and a == b)
        for a, b in zip(layout, known, strict=True)
    )


def _describe_cache(arguments: _AttentionArgs | _RopeArgs, kv_layer: Tensor) -> None:
    block_stride, value_offset, token_stride, head_stride, element = kv_layer.stride()
    assert element == 1, f"a head's elements are apart: {kv_layer.stride()}"
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    arguments.block_stride, arguments.value_offset = block_stride, value_offset
    arguments.token_stride, arguments.head_stride = token_stride, head_stride
    arguments.block_size, arguments.num_kv_heads = block_size, num_kv_heads
    arguments.head_dim, arguments.dtype = head_dim, _DTYPES[kv_layer.dtype]
