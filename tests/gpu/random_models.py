"""Llama checkpoints of any size with random weights, made on the device: 8B in seconds."""

import json
from pathlib import Path

import torch
from factories import LlamaShape, llama_config
from safetensors.torch import save_file
from torch import Tensor

TINY = LlamaShape(max_position=4096)
SHAPE_1B = LlamaShape(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rope_theta=500_000.0,
)
SHAPE_8B = LlamaShape(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rope_theta=500_000.0,
)


def write_model(folder: Path, shape: LlamaShape, dtype: torch.dtype, device: torch.device) -> Path:
    """A Hugging Face folder whose answers differ from token to token."""
    folder.mkdir(parents=True)
    config = llama_config(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(shape.seed)

    def random(*sizes: int, spread: float) -> Tensor:
        values = torch.empty(sizes, dtype=dtype, device=device)
        return values.normal_(0.0, spread, generator=generator).cpu()

    width, ffn = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": random(shape.vocab_size, width, spread=1.0),
        "lm_head.weight": random(shape.vocab_size, width, spread=2 * width**-0.5),
        "model.norm.weight": 1 + random(width, spread=0.1),
    }
    linears = {
        "self_attn.q_proj": (q_size, width),
        "self_attn.k_proj": (kv_size, width),
        "self_attn.v_proj": (kv_size, width),
        "self_attn.o_proj": (width, q_size),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + random(width, spread=0.1)
        for name, sizes in linears.items():
            tensors[f"{prefix}.{name}.weight"] = random(*sizes, spread=sizes[1] ** -0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def num_parameters(shape: LlamaShape) -> int:
    """Of what every token is multiplied by: all but the embedding and the norms."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * q_size + 2 * kv_size)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size
