"""The decoder: token ids and a paged cache in, hidden states and logits out.

One code path for every family; `DecoderConfig` says what differs. Knows no request, no row and
no block: where a token stands is `AttentionMetadata`, how products run is the kernel backend.

With tensor parallelism each rank runs it on its own heads, its part of the ffn and its part of the
vocabulary. Hidden states are whole and equal on all ranks: what a rank lacks is summed in after
the embedding, after attention and after the MLP.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import KernelBackend, LinearWeight
from ...kernels.metadata import AttentionMetadata
from ..parallel import SingleRank, TensorParallelGroup
from ..shard_plan import Share
from .config import DecoderConfig
from .rope import cos_sin_table


class TensorSource(Protocol):
    """Where weights come from, by their names in the checkpoint."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype on its device; raises `ModelError` on any mismatch."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv and gate_up are fused: one product instead of three and two."""

    input_norm: Tensor
    qkv: LinearWeight
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers, and what stands before and after them. embedding: None = the head's rows."""

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: LinearWeight


def load_weights(
    config: DecoderConfig, source: TensorSource, backend: KernelBackend
) -> DecoderWeights:
    """Layer by layer, so that no more than one layer is held twice."""
    width = config.hidden_size
    embedding = source.tensor("model.embed_tokens.weight", (config.vocab_size, width))
    if config.tie_word_embeddings:
        head, embedding = backend.pack_linear(embedding), None
    else:
        head = backend.pack_linear(source.tensor("lm_head.weight", (config.vocab_size, width)))
    layers = tuple(
        _load_layer(config, source, backend, f"model.layers.{index}")
        for index in range(config.num_layers)
    )
    final_norm = source.tensor("model.norm.weight", (width,))
    return DecoderWeights(embedding, layers, final_norm, head)


def _load_layer(
    config: DecoderConfig, source: TensorSource, backend: KernelBackend, prefix: str
) -> LayerWeights:
    width, ffn = config.hidden_size, config.intermediate_size

    def linear(sizes: dict[str, int], in_features: int, has_bias: bool) -> LinearWeight:
        parts = [
            source.tensor(f"{prefix}.{name}.weight", (size, in_features))
            for name, size in sizes.items()
        ]
        biases = [
            source.tensor(f"{prefix}.{name}.bias", (size,))
            for name, size in sizes.items()
            if has_bias
        ]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return backend.pack_linear(weight, torch.cat(biases) if biases else None)

    qkv = {
        "self_attn.q_proj": config.q_size,
        "self_attn.k_proj": config.kv_size,
        "self_attn.v_proj": config.kv_size,
    }
    return LayerWeights(
        input_norm=source.tensor(f"{prefix}.input_layernorm.weight", (width,)),
        qkv=linear(qkv, width, config.attention_bias),
        output=linear({"self_attn.o_proj": width}, config.q_size, config.attention_output_bias),
        mlp_norm=source.tensor(f"{prefix}.post_attention_layernorm.weight", (width,)),
        gate_up=linear({"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, width, config.mlp_bias),
        down=linear({"mlp.down_proj": width}, ffn, config.mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The token ids whose embedding and logits are this rank's; sizes: of all ranks' parts."""

    share: Share
    sizes: tuple[int, ...]


class Decoder:
    """A loaded model on one device, or one rank's part of it.

    config: what this rank computes. vocabulary: None = all of it is here.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        backend: KernelBackend,
        max_context: int,
        group: TensorParallelGroup | None = None,
        vocabulary: VocabularyShard | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self._weights = weights
        self._group = group or SingleRank()
        self._vocabulary = vocabulary
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        table = cos_sin_table(config.rope, config.head_dim, max_context)
        self._cos_sin = table.to(weights.final_norm.device)

    def forward(
        self,
        token_ids: Tensor,
        kv_layers: Sequence[Tensor],
        metadata: AttentionMetadata,
        output_rows: Tensor | None,
    ) -> Tensor:
        """Compute the step's tokens, write their K/V, return hidden states for `logits`.

        token_ids: int64 [T]. kv_layers: one strided view per layer.
        output_rows: int64 [n], the tokens whose hidden state is wanted, None = all; the last
        layer works on these alone.
        → [n, hidden_size].
        """
        backend, eps = self.backend, self.config.rms_norm_eps
        residual = self._embed(token_ids)
        x = backend.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            if index > 0:
                x = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            q = self._write_cache(x, layer, kv_layers[index], metadata)
            if index == last and output_rows is not None and len(output_rows) == 0:
                return x[:0]
            x = backend.attention(q, kv_layers[index], metadata, self._scale).flatten(1)
            if index == last and output_rows is not None:
                x, residual = x[output_rows], residual[output_rows]
            x = backend.linear(x, layer.output)
            self._group.all_reduce(x)
            x = backend.add_rms_norm(x, residual, layer.mlp_norm, eps)
            gate_up = backend.linear(x, layer.gate_up)
            x = backend.linear(backend.silu_and_mul(gate_up), layer.down)
            self._group.all_reduce(x)
        return backend.add_rms_norm(x, residual, self._weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden_size] → float32 [n, vocab_size] on the leader, None on other ranks."""
        logits = self.backend.linear(hidden, self._weights.head)
        if self._vocabulary is None:
            return logits.float()
        gathered = self._group.gather(logits, 1, self._vocabulary.sizes)
        return None if gathered is None else gathered.float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Of ids that are another rank's: zeros, and that rank's vector comes with the sum."""
        if self._vocabulary is None:
            return self._lookup(token_ids)
        share = self._vocabulary.share
        local = token_ids - share.begin
        is_elsewhere = (local < 0) | (local >= share.size)
        x = self._lookup(local.masked_fill(is_elsewhere, 0))
        x.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self._group.all_reduce(x)
        return x

    def _lookup(self, token_ids: Tensor) -> Tensor:
        weights = self._weights
        if weights.embedding is None:
            return self.backend.embedding(token_ids, weights.head, weights.final_norm.dtype)
        return F.embedding(token_ids, weights.embedding)

    def _write_cache(
        self, x: Tensor, layer: LayerWeights, kv_layer: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Project x [T, hidden_size]; K and V go to the cache → q [T, num_heads, head_dim]."""
        fused = self.backend.linear(x, layer.qkv).view(x.shape[0], -1, self.config.head_dim)
        q, k, v = torch.split_with_sizes(fused, self._heads, dim=1)
        return self.backend.rope_and_cache(q, k, v, self._cos_sin, kv_layer, metadata)
