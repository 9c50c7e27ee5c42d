"""Weight-only quantised linears, AWQ's and GPTQ's layout, as codes or made float. Knows no file.

Both keep, for a weight [out, in], integers of 4 or 8 bits packed into int32, and a scale and a
zero point for each output and each group of inputs:

    GPTQ  qweight [in / n, out]   n inputs in a word, the lowest bits first
          qzeros [groups, out / n]  n outputs in a word; zero points are stored less one (in its
                                  second format as they are); g_idx [in]: each input's group
    AWQ   qweight [in, out / n], qzeros [groups, out / n]  n = 8 outputs in a word, interleaved
    both  scales [groups, out]
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.quantized_weight import QuantizedWeight
from .models.config import UnsupportedModel
from .models.config_fields import ConfigFields

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # in which nibble of a word each of 8 outputs is


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's linears are packed. group_size: None = one group of all inputs.

    zero_offset: what is to be added to stored zero points.
    """

    method: str
    bits: int
    group_size: int | None
    zero_offset: int

    @property
    def per_word(self) -> int:
        """Integers in one int32."""
        return 32 // self.bits

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of a linear's tensors, the one that must be there first."""
        names = ("qweight", "qzeros", "scales")
        return (*names, "g_idx") if self.method == "gptq" else names

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The shape that each part of a linear has."""
        groups, packed_out = self.num_groups(in_features), out_features // self.per_word
        packed = (in_features, packed_out)
        if self.method == "gptq":
            packed = (in_features // self.per_word, out_features)
        return {
            "qweight": packed,
            "qzeros": (groups, packed_out),
            "scales": (groups, out_features),
            "g_idx": (in_features,),
        }

    def num_groups(self, in_features: int) -> int:
        """Groups of inputs, the last one possibly smaller."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """From `quantization_config`; None = weights are stored as they are."""
    section = fields.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method", "unnamed")
    if method not in ("awq", "gptq"):
        raise UnsupportedModel(
            f"{section.source}: quant_method {method!r} is not supported; supported: awq, gptq"
        )
    if section.values.get("dynamic"):
        # Other bits or groups for some modules.
        raise UnsupportedModel(f"{section.source}: dynamic is not supported")
    bits = section.integer("bits", 4)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise UnsupportedModel(f"{section.source}: {bits} bits are not supported for {method}")
    if method == "awq" and section.text("version", "gemm").lower() != "gemm":
        version = section.text("version", "gemm")
        raise UnsupportedModel(f"{section.source}: version {version!r} of awq is not supported")
    offset = 1
    if method == "awq" or section.text("checkpoint_format", "gptq") == "gptq_v2":
        offset = 0
    whole = section.values.get("group_size") == -1
    group_size = None if whole else section.integer("group_size", 128)
    return Quantization(method, bits, group_size, offset)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """words: int32 [in, out]; zeros: int32 [groups, out]; scales: [groups, out]; groups: int64
    [in], each input's."""

    words: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor


def dequantize(
    quantization: Quantization, part: Callable[[str], Tensor | None], out_features: int
) -> Tensor:
    """float32 [out_features, in_features]. part: by name, None where it is not stored."""
    unpacked = _unpack_parts(quantization, part, out_features)
    groups = unpacked.groups
    weight = (unpacked.words - unpacked.zeros[groups]).float() * unpacked.scales.float()[groups]
    return weight.T.contiguous()


def read_codes(
    quantization: Quantization, part: Callable[[str], Tensor | None], out_features: int
) -> QuantizedWeight | None:
    """The linear as it is; None where an input's group is not told by its place."""
    unpacked = _unpack_parts(quantization, part, out_features)
    in_features = len(unpacked.words)
    size = quantization.group_size or in_features
    if not torch.equal(unpacked.groups, torch.arange(in_features) // size):
        return None
    return QuantizedWeight(
        codes=unpacked.words.to(torch.uint8).T.contiguous(),
        scales=unpacked.scales.float().T.contiguous(),
        zeros=unpacked.zeros.float().T.contiguous(),
        group_size=size,
        bits=quantization.bits,
    )


def _unpack_parts(
    quantization: Quantization, part: Callable[[str], Tensor | None], out_features: int
) -> _Unpacked:
    qweight, qzeros, scales = (_present(part, name) for name in ("qweight", "qzeros", "scales"))
    if quantization.method == "gptq":
        words = _unpack(qweight.T, quantization.bits).T  # [in, out]
        zeros = _unpack(qzeros, quantization.bits)
    else:
        words = _unpack(qweight, quantization.bits, _AWQ_ORDER)
        zeros = _unpack(qzeros, quantization.bits, _AWQ_ORDER)
    groups = part("g_idx")
    if groups is None:
        size = quantization.group_size or len(words)
        groups = torch.arange(len(words)) // size
    zeros = (zeros + quantization.zero_offset)[:, :out_features]
    return _Unpacked(words, zeros, scales, groups.long())


def _present(part: Callable[[str], Tensor | None], name: str) -> Tensor:
    tensor = part(name)
    assert tensor is not None, f"{name} is missing"
    return tensor


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, n] → int32 [rows, n * per word]. order: the place in its word of each."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    mask = (1 << bits) - 1
    return ((words.unsqueeze(-1) >> places) & mask).flatten(1)
