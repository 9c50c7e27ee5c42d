"""Makers of checkpoints for tests: random weights of any Llama shape, and stories260K.

Everything is written as a Hugging Face folder, as a user would have it.
"""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

STORIES_FOLDERS = (
    Path(__file__).parents[2] / "shared" / "models" / "stories260K",
    Path(__file__).parents[1] / "shared" / "models" / "stories260K",
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama checkpoint with random weights. scale: of the weights; larger = peakier logits."""

    vocab_size: int = 131
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position: int = 512
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: dict[str, object] | None = None
    rope_theta: float = 10_000.0
    eos_token_id: int = 2
    seed: int = 0
    scale: float = 2.0


def make_llama(folder: Path, shape: LlamaShape | None = None, **fields: object) -> Path:
    """Write config.json and model.safetensors; `fields` change single fields of the shape."""
    shape = replace(shape or LlamaShape(), **fields)  # pyright: ignore
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(shape)))
    save_file(llama_tensors(shape), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llama_config(shape: LlamaShape) -> dict[str, object]:
    """What stands in config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": shape.eos_token_id,
        "torch_dtype": "float32",
    }


def llama_tensors(shape: LlamaShape) -> dict[str, torch.Tensor]:
    """float32 weights by their Hugging Face names."""
    generator = torch.Generator().manual_seed(shape.seed)
    width, q_size = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_size, ffn = shape.num_kv_heads * shape.head_dim, shape.intermediate_size

    def random(*sizes: int, spread: float | None = None) -> torch.Tensor:
        spread = shape.scale * sizes[-1] ** -0.5 if spread is None else spread
        return torch.randn(*sizes, generator=generator) * spread

    # A tied head would answer each token with itself if the layers could not outweigh it.
    spread = 0.3 if shape.tied else 1.0
    tensors = {
        "model.embed_tokens.weight": random(shape.vocab_size, width, spread=spread),
        "model.norm.weight": 1 + random(width, spread=0.1),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = random(shape.vocab_size, width, spread=2 * width**-0.5)
    linears = {
        "self_attn.q_proj": (q_size, width, shape.attention_bias),
        "self_attn.k_proj": (kv_size, width, shape.attention_bias),
        "self_attn.v_proj": (kv_size, width, shape.attention_bias),
        "self_attn.o_proj": (width, q_size, shape.attention_bias),
        "mlp.gate_proj": (ffn, width, shape.mlp_bias),
        "mlp.up_proj": (ffn, width, shape.mlp_bias),
        "mlp.down_proj": (width, ffn, shape.mlp_bias),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + random(width, spread=0.1)
        for name, (out_features, in_features, has_bias) in linears.items():
            tensors[f"{prefix}.{name}.weight"] = random(out_features, in_features)
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = random(out_features, spread=0.1)
    return tensors


def find_stories260k() -> Path | None:
    """The folder with the raw files, or None where this machine has none."""
    return next((folder for folder in STORIES_FOLDERS if folder.is_dir()), None)


def convert_stories260k(source: Path, folder: Path) -> Path:
    """llama2.c's raw floats and tokenizer → a Hugging Face folder with tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = (source / "stories260K.bin").read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", raw)
    shape = LlamaShape(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim // heads,
        max_position=context,
        tied=True,
    )
    values = np.frombuffer(raw, dtype="<f4", offset=28)
    tensors = _stories_tensors(shape, values)
    (folder / "config.json").write_text(json.dumps(llama_config(shape)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _stories_tokenizer(source / "tok512.bin").save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def _stories_tensors(shape: LlamaShape, values: np.ndarray) -> dict[str, torch.Tensor]:
    position = 0

    def take(*sizes: int) -> torch.Tensor:
        nonlocal position
        count = int(np.prod(sizes))
        part = values[position : position + count].reshape(sizes).copy()
        position += count
        return torch.from_numpy(part)

    def half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
        # The file has each head's rows as interleaved pairs; Hugging Face wants two halves.
        pairs = weight.view(num_heads, -1, 2, weight.shape[1])
        return pairs.transpose(1, 2).reshape(weight.shape).contiguous()

    count, dim, ffn = shape.num_layers, shape.hidden_size, shape.intermediate_size
    kv_size = shape.num_kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": take(shape.vocab_size, dim)}
    by_kind = {
        "input_layernorm": take(count, dim),
        "self_attn.q_proj": take(count, dim, dim),
        "self_attn.k_proj": take(count, kv_size, dim),
        "self_attn.v_proj": take(count, kv_size, dim),
        "self_attn.o_proj": take(count, dim, dim),
        "post_attention_layernorm": take(count, dim),
        "mlp.gate_proj": take(count, ffn, dim),
        "mlp.down_proj": take(count, dim, ffn),
        "mlp.up_proj": take(count, ffn, dim),
    }
    rotary = {"self_attn.q_proj": shape.num_heads, "self_attn.k_proj": shape.num_kv_heads}
    for name, stacked in by_kind.items():
        for layer in range(count):
            weight = stacked[layer].clone()
            if name in rotary:
                weight = half_split(weight, rotary[name])
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    tensors["model.norm.weight"] = take(dim)
    return tensors


def _stories_tokenizer(path: Path) -> Tokenizer:
    """SentencePiece-style BPE: the pair that makes the best-scored piece is merged first."""
    raw = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    offset = 4
    while offset < len(raw):
        score, length = struct.unpack_from("<fi", raw, offset)
        pieces.append(raw[offset + 8 : offset + 8 + length].decode())
        scores.append(score)
        offset += 8 + length
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    pieces = [piece if i < 259 else piece.replace(" ", "▁") for i, piece in enumerate(pieces)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[float, str, str]] = []
    for index in range(259, len(pieces)):
        piece = pieces[index]
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], left, right))
    merges.sort(key=lambda merge: merge[0])
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in merges],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer
