"""Rotary embedding: the tables that follow from its configuration."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math

import torch
from torch import Tensor

from .config import RopeConfig, RopeKind


def cos_sin_table(rope: RopeConfig | None, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, rotary_dim]: cosines of every frequency, then sines.

    num_positions: the longest context; it also chooses between the two sets of LONGROPE.
    rope: None = a table of width 0, which rotates nothing.
    """
    if rope is None:
        return torch.zeros(num_positions, 0)
    frequencies = inverse_frequencies(rope, head_dim, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.magnitude


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """float32 [rotary_dim / 2]."""
    rotary_dim = int(head_dim * rope.rotary_fraction)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    powers = rope.theta**exponents
    if rope.kind is RopeKind.LONGROPE:
        is_long = num_positions > rope.original_max_position
        return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * powers)
    frequencies = 1.0 / powers
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
