"""A GGUF file as a checkpoint: its fields and tensors under their Hugging Face names.

Knows GGUF's names, and what its writers do to tensors. Quantised tensors are made float as they
are read, one at a time. The tokenizer is not taken from the file: `tokenizer.json` stands beside
it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from .fingerprint import StoredTensor, fingerprint
from .models.config import CheckpointError, UnsupportedModel
from .models.config_fields import ConfigFields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PREFIX = "model.layers."
# By how much each rotary frequency is divided, where a model's context was stretched.
_ROPE_FACTORS = "rope_freqs.weight"


def find_gguf(folder: Path) -> Path | None:
    """The folder's GGUF file, if that is how it has its weights."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds several GGUF files: {files[0].name}, …")
    return files[0]


class GgufCheckpoint:
    """`StoredWeights` of a GGUF file."""

    def __init__(self, path: Path) -> None:
        # Imported here: most models do not need it.
        from gguf import GGUFReader

        self._path = path
        try:
            # Private pages: torch wants memory that it could write to.
            reader = GGUFReader(path, "c")
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise CheckpointError(f"{path} is not a GGUF file, or is damaged: {error}") from error
        self._tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        self._unused = set(self._tensors)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = str(self._fields.get("general.architecture"))
        self.config = ConfigFields(self._config(), str(path))
        self._num_heads = {
            "attn_q": self.config.integer("num_attention_heads"),
            "attn_k": self.config.integer("num_key_value_heads"),
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding; bfloat16 where that is quantised."""
        kind = self._tensors["token_embd.weight"].tensor_type.name
        return {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)

    @property
    def progress(self) -> tuple[int, int]:
        """How many tensors were asked for, and how many there are."""
        return len(self._tensors) - len(self._unused), len(self._tensors)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Memory-mapped where it is stored as float32, else float32 in memory of its own."""
        stored_name = self._stored_name(name)
        stored = self._tensors.get(stored_name)
        if stored is None:
            raise CheckpointError(f"{self._path}: tensor {stored_name} ({name}) is missing")
        self._unused.discard(stored_name)
        tensor = self._float(stored_name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._path}: tensor {stored_name} has shape {list(tensor.shape)},"
                f" the configuration asks for {list(shape)}"
            )
        kind = stored_name.split(".")[-2]
        if self._architecture == "llama" and kind in self._num_heads:
            return _halves_from_pairs(tensor, self._num_heads[kind])
        return tensor

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._unused.discard(self._stored_name(name))

    def check_all_used(self) -> None:
        """A tensor nobody asked for is a feature that would be served wrong."""
        if self._unused:
            names = ", ".join(sorted(self._unused)[:3])
            raise UnsupportedModel(f"{self._path}: tensors without a use: {names}")

    def fingerprint(self) -> str:
        """See `fingerprint.fingerprint`."""
        return fingerprint(
            self.config.values,
            {
                name: StoredTensor(
                    self._path,
                    tensor.tensor_type.name,
                    tuple(int(size) for size in tensor.shape),
                    int(tensor.data_offset),
                    int(tensor.data_offset + tensor.n_bytes),
                )
                for name, tensor in self._tensors.items()
            },
        )

    def _float(self, stored_name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[stored_name]
        try:
            return torch.from_numpy(dequantize(stored.data, stored.tensor_type))
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self._path}: tensor {stored_name} of type {stored.tensor_type.name} is not"
                " supported"
            ) from error

    def _stored_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if not module.startswith(_LAYER_PREFIX):
            return f"{_TENSORS.get(module, module)}.{kind}"
        layer, _, rest = module.removeprefix(_LAYER_PREFIX).partition(".")
        return f"blk.{layer}.{_LAYER_TENSORS.get(rest, rest)}.{kind}"

    def _config(self) -> dict[str, object]:
        """The fields of config.json that the file's own say."""
        architecture = _ARCHITECTURES.get(self._architecture)
        prefix = f"{self._architecture}."
        if architecture is None or self._fields.get(f"{prefix}expert_count"):
            experts = " with experts" if architecture else ""
            raise UnsupportedModel(
                f"{self._path}: GGUF architecture {self._architecture!r}{experts} is not"
                f" supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        config: dict[str, object] = {
            "architectures": [architecture],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
        }
        config |= {
            name: self._fields[prefix + field]
            for field, name in _FIELDS.items()
            if prefix + field in self._fields
        }
        if "token_embd.weight" in self._tensors:
            config.setdefault("vocab_size", int(self._tensors["token_embd.weight"].shape[1]))
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        return config | {"rope_scaling": self._rope_scaling(prefix)}

    def _rope_scaling(self, prefix: str) -> dict[str, object] | None:
        if _ROPE_FACTORS in self._tensors:
            self._unused.discard(_ROPE_FACTORS)
            factors = cast(list[float], self._float(_ROPE_FACTORS).tolist())
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
        kind = self._fields.get(f"{prefix}rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._fields.get(f"{prefix}rope.scaling.factor")}


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF's Llama rotates neighbouring rows as a pair; a checkpoint pairs row i with i + d/2."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
