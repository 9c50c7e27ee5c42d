"""A decoder's weights, packed as the kernels like them, read layer by layer.

Knows the tensors' names and shapes; where they are stored, and which part is this rank's, is the
source's.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.backend import KernelBackend, LinearWeight
from ...kernels.quantized_weight import QuantizedWeight, stack
from .config import DecoderConfig, ExpertsConfig, QkNorm


class TensorSource(Protocol):
    """Where weights come from, by their names in a Llama checkpoint."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype on its device; raises `ModelError` on any mismatch."""
        ...

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """The weight as codes, where it is stored so and codes are wanted."""
        ...

    def skip(self, name: str) -> None:
        """This tensor is another rank's."""
        ...


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP. gate and up are fused: one product instead of two."""

    gate_up: LinearWeight
    down: LinearWeight

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A router over all experts, and the experts that are on this rank."""

    router: LinearWeight
    experts: tuple[MlpWeights, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.router.num_bytes + sum(expert.num_bytes for expert in self.experts)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv is one product instead of three.

    q_norm, k_norm: of heads, or of all heads together. *_post_norm: of what is added to the
    residual. None where the model has no such norm.
    """

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertsWeights
    mlp_post_norm: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        norms = (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.attention_post_norm,
            self.mlp_norm,
            self.mlp_post_norm,
        )
        linears = self.qkv.num_bytes + self.output.num_bytes + self.mlp.num_bytes
        return linears + sum(norm.nbytes for norm in norms if norm is not None)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers, and what stands before and after them. embedding: None = the head's rows."""

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: LinearWeight

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        table = 0 if self.embedding is None else self.embedding.nbytes
        layers = sum(layer.num_bytes for layer in self.layers)
        return table + layers + self.final_norm.nbytes + self.head.num_bytes


def load_weights(
    config: DecoderConfig, source: TensorSource, backend: KernelBackend
) -> DecoderWeights:
    """Layer by layer, so that no more than one layer is held twice."""
    width = config.hidden_size
    embedding = source.tensor("model.embed_tokens.weight", (config.vocab_size, width))
    if config.tie_word_embeddings:
        head, embedding = backend.pack_linear(embedding), None
    else:
        embedding = backend.pack_table(embedding)
        head = backend.pack_linear(source.tensor("lm_head.weight", (config.vocab_size, width)))
    layers = tuple(
        LayerLoader(config, source, backend, index).load() for index in range(config.num_layers)
    )
    final_norm = _shifted(source.tensor("model.norm.weight", (width,)), config.norm_offset)
    return DecoderWeights(embedding, layers, final_norm, head)


def _shifted(norm: Tensor, offset: float) -> Tensor:
    return norm if offset == 0.0 else norm + offset


class LayerLoader:
    """Reads one layer."""

    def __init__(
        self, config: DecoderConfig, source: TensorSource, backend: KernelBackend, index: int
    ) -> None:
        self._config = config
        self._source = source
        self._backend = backend
        self._layer = config.layers[index]
        self._prefix = f"model.layers.{index}"

    def load(self) -> LayerWeights:
        """Everything of the layer."""
        config, width = self._config, self._config.hidden_size
        qkv = {
            "self_attn.q_proj": config.q_size,
            "self_attn.k_proj": config.kv_size,
            "self_attn.v_proj": config.kv_size,
        }
        q_width, k_width = config.head_dim, config.head_dim
        if config.qk_norm is QkNorm.ALL_HEADS:
            q_width, k_width = config.q_size, config.kv_size
        # With norms around a part, the norm after attention has the name that Llama gives to the
        # one before the MLP.
        after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
        posts = config.post_norms
        has_experts = self._layer.has_experts
        return LayerWeights(
            input_norm=self._norm("input_layernorm", width),
            qkv=self._linear(qkv, width, config.attention_bias),
            q_norm=self._norm("self_attn.q_norm", q_width) if config.qk_norm else None,
            k_norm=self._norm("self_attn.k_norm", k_width) if config.qk_norm else None,
            output=self._linear(
                {"self_attn.o_proj": width}, config.q_size, config.attention_output_bias
            ),
            attention_post_norm=self._norm(after, width) if posts else None,
            mlp_norm=self._norm(before if posts else after, width),
            mlp=self._experts() if has_experts else self._mlp("mlp", config.intermediate_size),
            mlp_post_norm=self._norm("post_feedforward_layernorm", width) if posts else None,
        )

    def _norm(self, name: str, width: int) -> Tensor:
        weight = self._source.tensor(f"{self._prefix}.{name}.weight", (width,))
        return _shifted(weight, self._config.norm_offset)

    def _mlp(self, name: str, ffn: int) -> MlpWeights:
        width, has_bias = self._config.hidden_size, self._config.mlp_bias
        gate_up = {f"{name}.gate_proj": ffn, f"{name}.up_proj": ffn}
        return MlpWeights(
            gate_up=self._linear(gate_up, width, has_bias),
            down=self._linear({f"{name}.down_proj": width}, ffn, has_bias),
        )

    def _experts(self) -> ExpertsWeights:
        experts = self._config.experts
        assert experts is not None, f"{self._prefix} has experts and the model has none"
        self._skip_elsewhere(experts)
        return ExpertsWeights(
            router=self._linear({"mlp.gate": experts.num_experts}, self._config.hidden_size, False),
            experts=tuple(
                self._mlp(f"mlp.experts.{index}", experts.intermediate_size)
                for index in range(experts.begin, experts.end)
            ),
        )

    def _skip_elsewhere(self, experts: ExpertsConfig) -> None:
        for index in range(experts.num_experts):
            if not experts.begin <= index < experts.end:
                for linear in ("gate_proj", "up_proj", "down_proj"):
                    self._source.skip(f"{self._prefix}.mlp.experts.{index}.{linear}.weight")

    def _linear(self, sizes: dict[str, int], in_features: int, has_bias: bool) -> LinearWeight:
        """The named linears as one, their outputs side by side."""
        biases = [
            self._source.tensor(f"{self._prefix}.{name}.bias", (size,))
            for name, size in sizes.items()
            if has_bias
        ]
        bias = torch.cat(biases) if biases else None
        codes = self._codes(sizes, in_features)
        if codes is not None:
            return self._backend.pack_quantized(codes, bias)
        parts = [
            self._source.tensor(f"{self._prefix}.{name}.weight", (size, in_features))
            for name, size in sizes.items()
        ]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._backend.pack_linear(weight, bias)

    def _codes(self, sizes: dict[str, int], in_features: int) -> QuantizedWeight | None:
        """The named linears as one; None where that cannot be without making them float."""
        parts: list[QuantizedWeight] = []
        for name, size in sizes.items():
            part = self._source.quantized(f"{self._prefix}.{name}.weight", (size, in_features))
            if part is None or not part.is_packable:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else stack(parts)
