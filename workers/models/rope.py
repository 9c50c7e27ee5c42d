"""Tables of rotary embedding, scaled as the model's configuration says."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math

import torch
from torch import Tensor

from .config import RopeConfig, RopeKind


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of every frequency, then sines."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
