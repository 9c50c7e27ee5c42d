"""A decoder described by data, read from a checkpoint's `config.json`.

A family is a function from the fields of that file to one frozen `DecoderConfig`; the decoder
itself branches on the data, never on a family's name. What is not covered is refused by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast


class ModelError(Exception):
    """The model cannot be served as it stands; the message names the file and the field."""


class UnsupportedModel(ModelError):
    """An architecture or a feature that the decoder does not have."""


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the length a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling. The last three fields are read by LLAMA3 alone."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that the decoder's code branches on.

    intermediate_size: width of the gated MLP. attention_bias: on q, k, v;
    attention_output_bias: on the projection back.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def block_bytes(self, block_size: int, element_size: int) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.num_layers * 2 * block_size * self.kv_size * element_size


class ConfigFields:
    """One JSON object with typed access; errors name the file and the field."""

    def __init__(self, values: dict[str, object], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, path: Path) -> "ConfigFields":
        """Parse a JSON file."""
        try:
            values: object = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist: not a checkpoint folder") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        return cls(cast(dict[str, object], values), str(path))

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.values.get(name)
        ids = cast(list[object], value) if isinstance(value, list) else [value]
        if value is None:
            return ()
        if not all(isinstance(item, int) and item >= 0 for item in ids):
            raise self._wrong(name, "a token id or a list of them")
        return tuple(cast(list[int], ids))

    def section(self, name: str) -> "ConfigFields | None":
        """A nested object, or None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return ConfigFields(cast(dict[str, object], value), f"{self.source}, {name}")

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {name} is missing")
        return value

    def _wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {name} is {self.values.get(name)!r}, not {wanted}")


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that a checkpoint folder describes."""
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(f"{folder} holds an adapter (LoRA), which is not supported")
    fields = ConfigFields.read(folder / "config.json")
    names = fields.values.get("architectures")
    architecture = str(cast(list[object], names)[0]) if isinstance(names, list) and names else ""
    parse = _FAMILIES.get(architecture)
    if parse is None:
        supported = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"{fields.source}: architecture {architecture or 'unnamed'!r} is not supported;"
            f" supported: {supported}"
        )
    if fields.values.get("quantization_config") is not None:
        raise UnsupportedModel(f"{fields.source}: quantization_config is not supported")
    return parse(fields, _generation_fields(folder))


def _generation_fields(folder: Path) -> ConfigFields:
    path = folder / "generation_config.json"
    return ConfigFields.read(path) if path.exists() else ConfigFields({}, str(path))


def _llama(fields: ConfigFields, generation: ConfigFields) -> DecoderConfig:
    """Llama 2 and 3, and what shares their layout (SmolLM2, TinyLlama)."""
    _require(fields, "hidden_act", fields.text("hidden_act", "silu"), "silu")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"{fields.source}: num_attention_heads {num_heads} is not a multiple of"
            f" num_key_value_heads {num_kv_heads}"
        )
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", False)
    bos = generation.token_ids("bos_token_id") or fields.token_ids("bos_token_id")
    max_position = fields.integer("max_position_embeddings", 2048)
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )


_FAMILIES: dict[str, Callable[[ConfigFields, ConfigFields], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
}


def _rope(fields: ConfigFields, max_position: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before it)."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", 10_000.0)
    if scaling is None:
        return RopeConfig(theta)
    theta = scaling.number("rope_theta", theta)
    name = scaling.text("rope_type", scaling.text("type", "default"))
    if name not in tuple(RopeKind):
        supported = ", ".join(RopeKind)
        raise UnsupportedModel(
            f"{scaling.source}: RoPE type {name!r} is not supported; supported: {supported}"
        )
    for owner in (fields, scaling):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{owner.source}: partial_rotary_factor is not supported")
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta)
    factor = scaling.number("factor")
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, factor)
    return RopeConfig(
        theta,
        kind,
        factor,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings", max_position),
    )


def _require(fields: ConfigFields, name: str, value: str, wanted: str) -> None:
    if value != wanted:
        raise UnsupportedModel(
            f"{fields.source}: {name} {value!r} is not supported; supported: {wanted}"
        )
