"""A GGUF file as a checkpoint: its fields and tensors under their Hugging Face names.

Knows GGUF's names, and what its writers do to tensors. Quantised tensors are made float as they
are read, one at a time. What else the file says, the tokenizer say, is for its user to read out
of `fields`; a model that is served from the file has `tokenizer.json` beside it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..kernels.quantized_weight import QuantizedWeight
from .fingerprint import StoredTensor, fingerprint
from .models.config import CheckpointError, UnsupportedModel
from .models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class _Family:
    """What GGUF calls an architecture, in Hugging Face's words.

    is_turned: rows of q and k stand as pairs that are rotated together. experts: the architecture
    if the file has experts. fields: of config.json that the file does not tell.
    """

    architecture: str | None
    experts: str | None = None
    is_turned: bool = False
    fields: Mapping[str, object] = field(default_factory=dict[str, object])


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "MixtralForCausalLM", is_turned=True),
    "granite": _Family("GraniteForCausalLM", is_turned=True),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "qwen3moe": _Family(None, "Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}),
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
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
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
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_NAMES = {stored: name for name, stored in _TENSORS.items()}
_LAYER_NAMES = {stored: name for name, stored in _LAYER_TENSORS.items()}
# All experts of a layer are one tensor.
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_EXPERT_TENSORS = {
    "gate_proj": "ffn_gate_exps",
    "w1": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "w3": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w2": "ffn_down_exps",
}
_LAYER_PREFIX = "model.layers."
_STORED_LAYER_PREFIX = "blk."
# By how much each rotary frequency is divided, where a model's context was stretched.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """`StoredWeights` of a GGUF file. fields: what it says beside its tensors, in GGUF's names."""

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
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = str(self.fields.get("general.architecture"))
        self._is_turned = False
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
        stored_name, expert = self._stored_name(name)
        if stored_name not in self._tensors:
            raise CheckpointError(f"{self._path}: tensor {stored_name} ({name}) is missing")
        self._unused.discard(stored_name)
        tensor = self._float(stored_name, expert)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._path}: tensor {stored_name} has shape {list(tensor.shape)},"
                f" the configuration asks for {list(shape)}"
            )
        return self._turned_back(stored_name, tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of a model without experts, each with its Hugging Face name."""
        for stored_name in self._tensors:
            self._unused.discard(stored_name)
            tensor = self._turned_back(stored_name, self._float(stored_name))
            yield self._name(stored_name), tensor

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """None: GGUF's own quantised types are made float."""
        return None

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._unused.discard(self._stored_name(name)[0])

    def check_all_used(self) -> None:
        """A tensor nobody asked for is a feature that would be served wrong."""
        if self._unused:
            names = ", ".join(sorted(self._unused)[:3])
            raise UnsupportedModel(f"{self._path}: tensors without a use: {names}")

    def forget_pages(self) -> None:
        """See `StoredWeights`. Nothing keeps the file once its tensors were made of it."""

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

    def _float(self, stored_name: str, expert: int | None = None) -> Tensor:
        """expert: None = the whole tensor."""
        from gguf.quants import dequantize

        stored = self._tensors[stored_name]
        data = stored.data if expert is None else stored.data[expert]
        try:
            return torch.from_numpy(dequantize(data, stored.tensor_type))
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self._path}: tensor {stored_name} of type {stored.tensor_type.name} is not"
                " supported"
            ) from error

    def _turned_back(self, stored_name: str, tensor: Tensor) -> Tensor:
        kind = stored_name.split(".")[-2]
        if self._is_turned and kind in self._num_heads:
            return _halves_from_pairs(tensor, self._num_heads[kind])
        return tensor

    def _name(self, stored_name: str) -> str:
        """What `_stored_name` undoes."""
        module, _, kind = stored_name.rpartition(".")
        if not module.startswith(_STORED_LAYER_PREFIX):
            return f"{_NAMES.get(module, module)}.{kind}"
        layer, _, rest = module.removeprefix(_STORED_LAYER_PREFIX).partition(".")
        return f"{_LAYER_PREFIX}{layer}.{_LAYER_NAMES.get(rest, rest)}.{kind}"

    def _stored_name(self, name: str) -> tuple[str, int | None]:
        """And which expert's part of it is asked for."""
        module, _, kind = name.rpartition(".")
        if not module.startswith(_LAYER_PREFIX):
            return f"{_TENSORS.get(module, module)}.{kind}", None
        layer, _, rest = module.removeprefix(_LAYER_PREFIX).partition(".")
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            return f"{_STORED_LAYER_PREFIX}{layer}.{_EXPERT_TENSORS[expert[2]]}.{kind}", int(
                expert[1]
            )
        return f"{_STORED_LAYER_PREFIX}{layer}.{_LAYER_TENSORS.get(rest, rest)}.{kind}", None

    def _config(self) -> dict[str, object]:
        """The fields of config.json that the file's own say."""
        family = _FAMILIES.get(self._architecture, _Family(None))
        prefix = f"{self._architecture}."
        has_experts = bool(self.fields.get(f"{prefix}expert_count"))
        architecture = family.experts if has_experts else family.architecture
        if architecture is None:
            experts = " with experts" if has_experts else ""
            raise UnsupportedModel(
                f"{self._path}: GGUF architecture {self._architecture!r}{experts} is not"
                f" supported; supported: {', '.join(_FAMILIES)}"
            )
        self._is_turned = family.is_turned
        config: dict[str, object] = {
            "architectures": [architecture],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": self.fields.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"),
        }
        config |= {
            name: self.fields[prefix + field]
            for field, name in _FIELDS.items()
            if prefix + field in self.fields
        }
        if "token_embd.weight" in self._tensors:
            config.setdefault("vocab_size", int(self._tensors["token_embd.weight"].shape[1]))
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        return config | {**family.fields, "rope_scaling": self._rope_scaling(prefix)}

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
        kind = self.fields.get(f"{prefix}rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self.fields.get(f"{prefix}rope.scaling.factor")}


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF's Llama rotates neighbouring rows as a pair; a checkpoint pairs row i with i + d/2."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
