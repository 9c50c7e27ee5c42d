"""A GGUF file of the Llama family rewritten as a Hugging Face checkpoint folder.

Knows GGUF's names, quantisation and rotary layout, and which files a checkpoint has. Knows
nothing of where a GGUF file comes from or where the folder goes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from .config import CommandError

Float32Array = NDArray[np.float32]
Progress = Callable[[int, int], None]  # (tensors done, tensors in all)

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its kind

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class _Metadata:
    """The key-value section of a GGUF file, read with the types that its reader wants."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def _value(self, key: str) -> object:
        if key not in self._fields:
            raise CommandError(f"the GGUF file has no {key!r}")
        return self._fields[key].contents()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def text(self, key: str) -> str:
        return str(self._value(key))

    def integer(self, key: str) -> int:
        value = self._value(key)
        if not isinstance(value, int):
            raise CommandError(f"{key!r} in the GGUF file is {value!r}, not an integer")
        return value

    def number(self, key: str) -> float:
        value = self._value(key)
        if not isinstance(value, int | float):
            raise CommandError(f"{key!r} in the GGUF file is {value!r}, not a number")
        return float(value)

    def texts(self, key: str) -> list[str]:
        return [str(item) for item in self._items(key)]

    def integers(self, key: str) -> list[int]:
        return [item for item in self._items(key) if isinstance(item, int)]

    def _items(self, key: str) -> Sequence[object]:
        value = self._value(key)
        if not isinstance(value, list):
            raise CommandError(f"{key!r} in the GGUF file is not a list")
        return value  # pyright: ignore[reportUnknownVariableType]


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write float32 weights, config, tokenizer and chat template of `gguf_file` into `folder`."""
    reader = GGUFReader(gguf_file)
    metadata = _Metadata(reader)
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise CommandError(f"{gguf_file.name}: architecture {architecture!r}, expected 'llama'")
    tensors = _read_tensors(reader, metadata, progress)
    config = _model_config(metadata, tied="lm_head.weight" not in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_ids(metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))


def _read_tensors(
    reader: GGUFReader, metadata: _Metadata, progress: Progress
) -> dict[str, Float32Array]:
    num_heads = metadata.integer("llama.attention.head_count")
    num_kv_heads = metadata.integer("llama.attention.head_count_kv")
    tensors: dict[str, Float32Array] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        name = _checkpoint_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weight = _halves_from_pairs(weight, num_heads)
        elif name.endswith("k_proj.weight"):
            weight = _halves_from_pairs(weight, num_kv_heads)
        tensors[name] = np.ascontiguousarray(weight)
        progress(done, len(reader.tensors))
    return tensors


def _checkpoint_name(gguf_name: str) -> str:
    if gguf_name in _TENSOR_NAMES:
        return _TENSOR_NAMES[gguf_name]
    kind, _, rest = gguf_name.partition(".")
    layer, _, leaf = rest.partition(".")
    if kind != "blk" or leaf not in _LAYER_TENSOR_NAMES:
        raise CommandError(f"the GGUF file has a tensor {gguf_name!r} that Llama has not")
    return f"model.layers.{layer}.{_LAYER_TENSOR_NAMES[leaf]}"


def _halves_from_pairs(weight: Float32Array, num_heads: int) -> Float32Array:
    """GGUF rotates neighbouring rows as a pair; a checkpoint pairs row i with row i + d/2."""
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _model_config(metadata: _Metadata, *, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": metadata.integer("llama.vocab_size"),
        "hidden_size": metadata.integer("llama.embedding_length"),
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": metadata.integer("llama.attention.head_count"),
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv"),
        "head_dim": metadata.integer("llama.rope.dimension_count"),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rope_theta": metadata.number("llama.rope.freq_base"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_token_ids(metadata),
    }


def _token_ids(metadata: _Metadata) -> dict[str, object]:
    return {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer_config(metadata: _Metadata) -> dict[str, object]:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    special = {
        name: tokens[metadata.integer(f"tokenizer.ggml.{key}")]
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
        "chat_template": metadata.text("tokenizer.chat_template"),
        **special,
    }


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    """Byte-level BPE whose digits stand alone: GGUF's pre-tokenizer `smollm`."""
    flavour = metadata.text("tokenizer.ggml.pre")
    if metadata.text("tokenizer.ggml.model") != "gpt2" or flavour != "smollm":
        raise CommandError(f"the GGUF file has a tokenizer {flavour!r}, expected 'smollm'")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges = [
        (left, right)
        for left, _, right in (m.partition(" ") for m in metadata.texts("tokenizer.ggml.merges"))
    ]
    tokenizer = Tokenizer(
        BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.integers("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
