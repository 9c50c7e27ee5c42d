"""A weight of small integers, as weight-only quantisers leave it. Knows no file and no backend."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SMALLEST_GROUP = 16  # below it scales take more than they save
_WORD = 8  # inputs that kernels take at once


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], with g = k // group_size.

    codes: uint8 [out_features, in_features], below 2 ** bits; scales, zeros: float32
    [out_features, groups]. bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    bits: int

    def dequantized(self) -> Tensor:
        """float32 [out_features, in_features]."""
        groups = torch.arange(self.codes.shape[1]) // self.group_size
        return (self.codes.float() - self.zeros[:, groups]) * self.scales[:, groups]

    def rows(self, begin: int, end: int) -> "QuantizedWeight":
        """Outputs begin .. end-1."""
        return replace(
            self,
            codes=self.codes[begin:end],
            scales=self.scales[begin:end],
            zeros=self.zeros[begin:end],
        )

    def columns(self, begin: int, end: int) -> "QuantizedWeight":
        """Inputs begin .. end-1; where they cut a group, groups become smaller."""
        size = math.gcd(begin, self.group_size)
        groups = torch.arange(begin, end, size) // self.group_size
        return replace(
            self,
            codes=self.codes[:, begin:end],
            scales=self.scales[:, groups],
            zeros=self.zeros[:, groups],
            group_size=size,
        )

    @property
    def is_packable(self) -> bool:
        """Whether its groups suit a kernel that reads it as it is."""
        if self.group_size >= self.codes.shape[1]:
            return True
        return self.group_size >= _SMALLEST_GROUP and self.group_size % _WORD == 0


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Outputs side by side; None where the parts' groups or bits differ."""
    first = parts[0]
    if any((part.group_size, part.bits) != (first.group_size, first.bits) for part in parts):
        return None
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )
