"""Random-weight checkpoints of every model family, written by transformers itself, each with that
family's odd features switched on and of sizes small enough to matter: windows shorter than a
prompt, soft caps that bend, layers of every kind."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 131
WINDOW = 20
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
ORIGINAL_LENGTH = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 48}


def _config(kind: type[PreTrainedConfig], **fields: object) -> PreTrainedConfig:
    return kind(**(SIZES | fields))


CONFIGS: dict[str, PreTrainedConfig] = {
    "mistral": _config(MistralConfig, sliding_window=WINDOW, head_dim=24),
    "qwen2": _config(
        Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": _config(Qwen3Config, head_dim=32, attention_bias=True, tie_word_embeddings=True),
    "gemma2": _config(
        Gemma2Config,
        head_dim=24,
        sliding_window=WINDOW,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _config(
        Gemma3TextConfig,
        num_hidden_layers=3,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        query_pre_attn_scalar=20,
        tie_word_embeddings=True,
    ),
    "phi3": _config(
        Phi3Config,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=ORIGINAL_LENGTH,
        sliding_window=50,
    ),
    "smollm3": _config(
        SmolLM3Config,
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite": _config(
        GraniteConfig,
        embedding_multiplier=6.0,
        attention_multiplier=0.1,
        residual_multiplier=0.4,
        logits_scaling=0.5,
        attention_bias=True,
    ),
    "mixtral": _config(MixtralConfig, **EXPERTS, num_local_experts=5, sliding_window=WINDOW),
    "qwen3-moe": _config(
        Qwen3MoeConfig,
        head_dim=32,
        num_hidden_layers=3,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "olmoe": _config(OlmoeConfig, **EXPERTS, num_key_value_heads=4, num_experts=6, clip_qkv=1.5),
}


def make_checkpoint(folder: Path, family: str, **changes: object) -> Path:
    """What `save_pretrained` writes for a model with random weights; changes: of its config."""
    config = CONFIGS[family]
    if changes:
        config = type(config)(**(config.to_dict() | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight, generator))
    model.save_pretrained(folder)
    return folder


def _random(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if "norm" in name:
        return weight + 0.1 * noise  # 1 or, where the family adds 1 itself, 0
    if "embed_tokens" in name:
        return 0.3 * noise
    if weight.ndim == 1:
        return 0.1 * noise
    return 1.5 * noise * weight.shape[-1] ** -0.5


def load_reference(folder: Path) -> PreTrainedModel:
    """The same checkpoint as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
