"""What a checkpoint's configuration says of its rotary embedding. Loads no torch."""

import math

from .config import RopeConfig, RopeKind, UnsupportedModel
from .config_fields import ConfigFields

_OTHER_NAMES = {"su": RopeKind.LONGROPE.value}  # what the first Phi-3 checkpoints call it


def read_rope(
    fields: ConfigFields,
    section: ConfigFields | None,
    head_dim: int,
    max_position: int,
    *,
    theta: float | None = None,
    may_be_partial: bool = False,
) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_scaling` (before it), else `fields` alone.

    theta: None = what `fields` say, where the section does not.
    """
    theta = fields.number("rope_theta", 10_000.0) if theta is None else theta
    if section is None:
        section = ConfigFields({}, fields.source)
    theta = section.number("rope_theta", theta)
    fraction = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if fraction != 1.0 and not may_be_partial:
        raise UnsupportedModel(f"{section.source}: partial_rotary_factor is not supported")
    name = section.text("rope_type", section.text("type", "default"))
    name = _OTHER_NAMES.get(name, name)
    if name not in tuple(RopeKind):
        supported = ", ".join(RopeKind)
        raise UnsupportedModel(
            f"{section.source}: RoPE type {name!r} is not supported; supported: {supported}"
        )
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta, rotary_fraction=fraction)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, section.number("factor"), rotary_fraction=fraction)
    original = section.integer("original_max_position_embeddings", max_position)
    if kind is RopeKind.LONGROPE:
        original = fields.integer("original_max_position_embeddings", original)
        return _longrope(section, theta, fraction, head_dim, max_position, original)
    return RopeConfig(
        theta,
        kind,
        section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position=original,
        rotary_fraction=fraction,
    )


def _longrope(
    section: ConfigFields,
    theta: float,
    fraction: float,
    head_dim: int,
    max_position: int,
    original: int,
) -> RopeConfig:
    """Both sets of factors; cosines and sines grow with the stretch of the context."""
    stretch = section.number("factor", max_position / original)
    grown = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    half = int(head_dim * fraction) // 2
    return RopeConfig(
        theta,
        RopeKind.LONGROPE,
        original_max_position=original,
        rotary_fraction=fraction,
        short_factors=section.numbers("short_factor", half),
        long_factors=section.numbers("long_factor", half),
        magnitude=section.number("attention_factor", grown),
    )
