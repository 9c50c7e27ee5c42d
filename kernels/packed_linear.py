"""A weight as the compiled kernels read it, and how it is packed.

Knows the library's packed layouts by their sizes alone; see `csrc/packed_weight.h`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu_library import DTYPE_CODES, CodesArgs, LinearArgs, PackArgs, native_library
from .quantized_weight import QuantizedWeight
from .weight_arena import WeightArena

_CODES = {8: 2, 4: 3}  # by bits


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
    arguments: LinearArgs

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        parts = (self.packed, self.scale, self.zero, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def exact_dtype(weight: Tensor, num_threads: int) -> torch.dtype:
    """The narrowest dtype that holds every number of a float weight: published checkpoints are
    bfloat16, also where the model computes in float32."""
    if weight.dtype != torch.float32:
        return weight.dtype
    weight = weight.contiguous()
    fits = native_library().pf_fits_bfloat16(weight.data_ptr(), weight.numel(), num_threads)
    return torch.bfloat16 if fits else torch.float32


def pack_linear(
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    arena: WeightArena,
    num_threads: int,
) -> PackedLinear:
    """weight: [out_features, in_features], float32 or bfloat16. dtype: how it is stored; None = at
    the least width that loses nothing, and then products lose nothing either."""
    weight = weight.contiguous()
    is_exact = dtype is None
    dtype = dtype or exact_dtype(weight, num_threads)
    out_features, in_features = weight.shape
    packed = arena.take(_packed_bytes(out_features, in_features, DTYPE_CODES[dtype]))
    scale = torch.zeros(out_features) if dtype == torch.int8 else None
    arguments = PackArgs(
        weight=weight.data_ptr(),
        packed=packed.data_ptr(),
        scale=_pointer(scale),
        out_features=out_features,
        in_features=in_features,
        weight_dtype=DTYPE_CODES[weight.dtype],
        packed_dtype=DTYPE_CODES[dtype],
        threads=num_threads,
    )
    native_library().pf_pack_linear(ctypes.byref(arguments))
    bias = None if bias is None else bias.float().contiguous()
    pointers = LinearArgs(
        packed=packed.data_ptr(),
        scale=_pointer(scale),
        bias=_pointer(bias),
        out_features=out_features,
        in_features=in_features,
        packed_dtype=DTYPE_CODES[dtype],
        threads=num_threads,
        is_exact=is_exact,
    )
    return PackedLinear(out_features, in_features, dtype, packed, scale, None, bias, pointers)


def pack_codes(
    weight: QuantizedWeight, bias: Tensor | None, arena: WeightArena, num_threads: int
) -> PackedLinear:
    """A weight of codes by groups, as it is."""
    assert weight.is_packable, f"groups of {weight.group_size}"
    out_features, in_features = weight.codes.shape
    code = _CODES[weight.bits]
    # One group of all inputs may end inside a word.
    group = min(weight.group_size, -(-in_features // 8) * 8)
    packed = arena.take(_packed_bytes(out_features, in_features, code))
    scale, zero = _write_codes(weight, packed, group, num_threads)
    kept = zero if zero.any() else None
    bias = None if bias is None else bias.float().contiguous()
    pointers = LinearArgs(
        packed=packed.data_ptr(),
        scale=scale.data_ptr(),
        zero=_pointer(kept),
        bias=_pointer(bias),
        out_features=out_features,
        in_features=in_features,
        group=group,
        packed_dtype=code,
        threads=num_threads,
    )
    return PackedLinear(out_features, in_features, torch.uint8, packed, scale, kept, bias, pointers)


def _write_codes(
    weight: QuantizedWeight, packed: Tensor, group: int, num_threads: int
) -> tuple[Tensor, Tensor]:
    """Fill `packed`; → scales and zero points, float32 [panels, groups, panel]."""
    library = native_library()
    out_features, in_features = weight.codes.shape
    panel = library.pf_panel()
    panels, groups = -(-out_features // panel), -(-in_features // group)
    scale, zero = (torch.empty(panels, groups, panel) for _ in range(2))
    codes = weight.codes.contiguous()
    given_scale, given_zero = (p.float().contiguous() for p in (weight.scales, weight.zeros))
    arguments = CodesArgs(
        codes=codes.data_ptr(),
        scale=given_scale.data_ptr(),
        zero=given_zero.data_ptr(),
        packed=packed.data_ptr(),
        packed_scale=scale.data_ptr(),
        packed_zero=zero.data_ptr(),
        out_features=out_features,
        in_features=in_features,
        group=group,
        packed_dtype=_CODES[weight.bits],
        threads=num_threads,
    )
    library.pf_pack_codes(ctypes.byref(arguments))
    return scale, zero


def _packed_bytes(out_features: int, in_features: int, code: int) -> int:
    return native_library().pf_packed_bytes(out_features, in_features, code)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
