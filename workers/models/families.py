"""From `config.json` to a `DecoderConfig`: one function per family, entered by architecture.

A family says how it differs from Llama. What is not covered is refused by name. Fields that a
file leaves out have the value that transformers gives them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from .config import (
    Activation,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    ModelError,
    QkNorm,
    RopeConfig,
    TensorNames,
    UnsupportedModel,
)
from .config_fields import ConfigFields
from .rope_config import read_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """adapt: from the fields, and the decoder they describe if read as a Llama's, to the
    family's own. defaults: of fields that are not in the file. activation: the field's name."""

    adapt: Callable[[ConfigFields, DecoderConfig], DecoderConfig]
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    activation: str = "hidden_act"
    may_be_partial: bool = False


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that a checkpoint folder describes."""
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(f"{folder} holds an adapter (LoRA), which is not supported")
    path = folder / "generation_config.json"
    generation = ConfigFields.read(path) if path.exists() else ConfigFields({}, str(path))
    return parse_config(ConfigFields.read(folder / "config.json"), generation)


def parse_config(fields: ConfigFields, generation: ConfigFields) -> DecoderConfig:
    """generation: of generation_config.json, whose token ids come first."""
    names = fields.values.get("architectures")
    architecture = str(cast(list[object], names)[0]) if isinstance(names, list) and names else ""
    family = _FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"{fields.source}: architecture {architecture or 'unnamed'!r} is not supported;"
            f" supported: {supported}"
        )
    fields = ConfigFields(fields.values, fields.source, family.defaults)
    base = _llama_like(architecture, family, fields, generation)
    return family.adapt(fields, base)


def _llama_like(
    architecture: str, family: Family, fields: ConfigFields, generation: ConfigFields
) -> DecoderConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"{fields.source}: num_attention_heads {num_heads} is not a multiple of"
            f" num_key_value_heads {num_kv_heads}"
        )
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    attention_bias = fields.flag("attention_bias", False)
    bos = generation.token_ids("bos_token_id") or fields.token_ids("bos_token_id")
    max_position = fields.integer("max_position_embeddings", 2048)
    rope = _rope(fields, head_dim, max_position, family.may_be_partial)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=(LayerConfig(rope),) * fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=head_dim**-0.5,
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        activation=_activation(fields, family.activation),
    )


def _llama(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Llama 2 and 3, and what shares their layout (SmolLM2, TinyLlama)."""
    return base


def _mistral(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """A window on every layer, where it is set."""
    return replace(base, mlp_bias=False, layers=_with_window(fields, base.layers))


def _qwen2(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Qwen 2 and 2.5: biases on q, k and v; the last layers may have a window."""
    return replace(
        base,
        attention_bias=True,
        attention_output_bias=False,
        mlp_bias=False,
        layers=_qwen_layers(fields, base.layers),
    )


def _qwen3(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """A norm on each head of q and k."""
    layers = _qwen_layers(fields, base.layers)
    return replace(base, mlp_bias=False, qk_norm=QkNorm.HEAD, layers=layers)


def _qwen3_moe(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Qwen 3 with experts on every `decoder_sparse_step`-th layer but those named dense."""
    dense = fields.integers("mlp_only_layers")
    step = fields.integer("decoder_sparse_step", 1)
    layers = base.layers
    if fields.flag("use_sliding_window", False):
        layers = _with_window(fields, layers)
    layers = tuple(
        replace(layer, has_experts=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    )
    return replace(
        base,
        mlp_bias=False,
        qk_norm=QkNorm.HEAD,
        layers=layers,
        experts=_experts(
            fields,
            _num_experts(fields, "num_experts", "num_local_experts"),
            fields.integer("moe_intermediate_size"),
            fields.flag("norm_topk_prob", False),
        ),
    )


def _mixtral(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Mistral with experts on every layer."""
    layers = _with_experts(_with_window(fields, base.layers))
    num_experts = _num_experts(fields, "num_local_experts", "num_experts")
    return replace(
        base,
        mlp_bias=False,
        layers=layers,
        experts=_experts(fields, num_experts, base.intermediate_size, True),
        names=TensorNames(experts="block_sparse_moe", expert_linears=("w1", "w3", "w2")),
    )


def _olmoe(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Experts on every layer, one norm over all heads of q and one over all of k."""
    num_experts = _num_experts(fields, "num_experts", "num_local_experts")
    normalise = fields.flag("norm_topk_prob", False)
    return replace(
        base,
        mlp_bias=False,
        qk_norm=QkNorm.ALL_HEADS,
        qkv_clip=fields.number("clip_qkv") if fields.has("clip_qkv") else None,
        layers=_with_experts(base.layers),
        experts=_experts(fields, num_experts, base.intermediate_size, normalise),
    )


def _gemma2(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Norms around both parts of a layer, soft caps, a window on every other layer."""
    types = fields.texts("layer_types") or tuple(
        _FULL if index % 2 else _SLIDING for index in range(base.num_layers)
    )
    cap = "attn_logit_softcapping"
    return replace(
        _gemma(fields, base),
        layers=_by_type(fields, base.layers, types),
        attention_soft_cap=fields.number(cap) if fields.has(cap) else None,
    )


def _gemma3(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Gemma 2 with a norm on each head of q and k instead of soft-capped attention, and with a
    rotary embedding of their own for layers with a window."""
    if fields.has("attn_logit_softcapping"):
        raise UnsupportedModel(f"{fields.source}: attn_logit_softcapping is not supported")
    pattern = fields.integer("sliding_window_pattern", 6)
    types = fields.texts("layer_types") or tuple(
        _FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(base.num_layers)
    )
    ropes = _gemma3_ropes(fields, base.head_dim, base.max_position)
    layers = tuple(
        replace(layer, rope=ropes[_FULL if layer.window is None else _SLIDING])
        for layer in _by_type(fields, base.layers, types)
    )
    return replace(_gemma(fields, base), layers=layers, qk_norm=QkNorm.HEAD)


def _gemma3_ropes(fields: ConfigFields, head_dim: int, max_position: int) -> dict[str, RopeConfig]:
    """By kind of layer, from nested `rope_parameters`, or from the older flat fields."""
    nested = fields.section("rope_parameters") or ConfigFields({}, fields.source)
    full = nested.section(_FULL) or fields.section("rope_scaling")
    sliding = nested.section(_SLIDING)
    full_theta = fields.number("rope_theta", 1_000_000.0)
    sliding_theta = fields.number("rope_local_base_freq", 10_000.0)
    return {
        _FULL: read_rope(fields, full, head_dim, max_position, theta=full_theta),
        _SLIDING: read_rope(fields, sliding, head_dim, max_position, theta=sliding_theta),
    }


def _gemma(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    if fields.values.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{fields.source}: use_bidirectional_attention is not supported")
    cap = "final_logit_softcapping"
    return replace(
        base,
        mlp_bias=False,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=1.0,
        post_norms=True,
        logits_soft_cap=fields.number(cap) if fields.has(cap) else None,
        embedding_scale=base.hidden_size**0.5,
    )


def _phi3(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Fused projections; the rotary embedding may cover a part of each head."""
    return replace(
        base,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        layers=_with_window(fields, base.layers),
        names=TensorNames(fused=True),
    )


def _smollm3(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Layers without rotary embedding, which may have a window."""
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.integers("no_rope_layers") or tuple(
        int((index + 1) % interval != 0) for index in range(base.num_layers)
    )
    if len(has_rope) < base.num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {base.num_layers} numbers")
    layers = tuple(
        layer if has_rope[index] else replace(layer, rope=None)
        for index, layer in enumerate(base.layers)
    )
    if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        types = fields.texts("layer_types") or tuple(
            _SLIDING if layer.rope is None else _FULL for layer in layers
        )
        layers = _by_type(fields, layers, types)
    return replace(base, layers=layers)


def _granite(fields: ConfigFields, base: DecoderConfig) -> DecoderConfig:
    """Llama with factors on embedding, attention, residuals and logits."""
    return replace(
        base,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_llama),
    "MistralForCausalLM": Family(
        _mistral,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "MixtralForCausalLM": Family(
        _mixtral,
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "Qwen2ForCausalLM": Family(_qwen2, _QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(_qwen3, {**_QWEN_DEFAULTS, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        _qwen3_moe,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
        },
    ),
    "OlmoeForCausalLM": Family(
        _olmoe,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
    ),
    "Gemma2ForCausalLM": Family(
        _gemma2,
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        activation="hidden_activation",
    ),
    "Gemma3ForCausalLM": Family(
        _gemma3,
        {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072},
        activation="hidden_activation",
    ),
    "Phi3ForCausalLM": Family(
        _phi3,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
        may_be_partial=True,
    ),
    "SmolLM3ForCausalLM": Family(
        _smollm3,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
    ),
    "GraniteForCausalLM": Family(_granite),
}


def _rope(
    fields: ConfigFields, head_dim: int, max_position: int, may_be_partial: bool
) -> RopeConfig:
    section = fields.section("rope_parameters")
    if section is None or section.has(_FULL) or section.has(_SLIDING):
        section = fields.section("rope_scaling")
    return read_rope(fields, section, head_dim, max_position, may_be_partial=may_be_partial)


def _activation(fields: ConfigFields, name: str) -> Activation:
    value = fields.text(name, "silu")
    if value not in tuple(Activation):
        supported = ", ".join(Activation)
        raise UnsupportedModel(
            f"{fields.source}: {name} {value!r} is not supported; supported: {supported}"
        )
    return Activation(value)


def _with_window(fields: ConfigFields, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    if not fields.has("sliding_window"):
        return layers
    window = fields.integer("sliding_window")
    return tuple(replace(layer, window=window) for layer in layers)


def _by_type(
    fields: ConfigFields, layers: tuple[LayerConfig, ...], types: tuple[str, ...]
) -> tuple[LayerConfig, ...]:
    """A window on the sliding layers alone."""
    if len(types) != len(layers):
        raise fields.wrong("layer_types", f"a list of {len(layers)} names")
    for name in types:
        if name not in (_SLIDING, _FULL):
            raise UnsupportedModel(f"{fields.source}: layer type {name!r} is not supported")
    windowed = _with_window(fields, layers)
    return tuple(
        windowed[index] if name == _SLIDING else layers[index] for index, name in enumerate(types)
    )


def _qwen_layers(fields: ConfigFields, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return layers
    first = fields.integer("max_window_layers", 28) if fields.values.get("max_window_layers") else 0
    types = fields.texts("layer_types") or tuple(
        _SLIDING if index >= first else _FULL for index in range(len(layers))
    )
    return _by_type(fields, layers, types)


def _with_experts(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    return tuple(replace(layer, has_experts=True) for layer in layers)


def _num_experts(fields: ConfigFields, name: str, other_name: str) -> int:
    return fields.integer(name if fields.has(name) else other_name)


def _experts(
    fields: ConfigFields, num_experts: int, intermediate_size: int, normalise: bool
) -> ExpertsConfig:
    num_active = fields.integer("num_experts_per_tok")
    if num_active > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most the {num_experts} experts")
    return ExpertsConfig(
        num_experts, num_active, intermediate_size, normalise, begin=0, end=num_experts
    )
