"""The decoder: token ids and a paged cache in, hidden states and logits out.

One code path for every family; `DecoderConfig` says what differs. Knows no request, no row and
no block: where a token stands is `AttentionMetadata`, how products run is the kernel backend.

With tensor parallelism each rank runs it on its own heads, its part of the ffn and its part of the
vocabulary. Hidden states are whole and equal on all ranks: what a rank lacks is summed in after
the embedding, after attention and after the MLP.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import KernelBackend, PlainLayer, Stack, StackBackend, StackShape
from ...kernels.metadata import AttentionMetadata
from ..parallel import SingleRank, TensorParallelGroup
from ..shard_plan import Share
from .config import Activation, DecoderConfig, QkNorm
from .experts import mix_experts
from .rope import cos_sin_table
from .weights import DecoderWeights, ExpertsWeights, LayerWeights, MlpWeights


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
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        device = weights.final_norm.device
        tables = {
            rope: cos_sin_table(rope, config.head_dim, max_context).to(device)
            for rope in dict.fromkeys(layer.rope for layer in config.layers)
        }
        self._cos_sin = [tables[layer.rope] for layer in config.layers]
        self._qk_widths = self._sum_qk_widths()
        self._stack = self._make_stack()

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
        backend, config = self.backend, self.config
        eps, last = config.rms_norm_eps, config.num_layers - 1
        residual = self._embed(token_ids)
        all_wanted = output_rows is None or len(output_rows) == len(token_ids)
        num_stacked = self._num_stacked(kv_layers) - (not all_wanted)
        if num_stacked > 0:
            x = self._run_stack(num_stacked, residual, kv_layers, metadata)
        else:
            num_stacked = 0
            x = backend.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        for index in range(num_stacked, config.num_layers):
            layer = self._weights.layers[index]
            if index > 0:
                x = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            q = self._write_cache(x, index, kv_layers[index], metadata)
            if index == last and output_rows is not None and len(output_rows) == 0:
                return x[:0]
            x = self._attend(q, index, kv_layers[index], metadata)
            if index == last and output_rows is not None:
                x, residual = x[output_rows], residual[output_rows]
            x = backend.linear(x, layer.output)
            self._group.all_reduce(x)
            x = self._before_adding(x, layer.attention_post_norm)
            x = backend.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._feed_forward(x, layer)
            self._group.all_reduce(x)
            x = self._before_adding(x, layer.mlp_post_norm)
        if num_stacked > last and output_rows is not None:
            x, residual = x[output_rows], residual[output_rows]
        return backend.add_rms_norm(x, residual, self._weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [n, hidden_size] → float32 [n, vocab_size] on the leader, None on other ranks."""
        logits = self.backend.linear(hidden, self._weights.head)
        if self._vocabulary is not None:
            gathered = self._group.gather(logits, 1, self._vocabulary.sizes)
            if gathered is None:
                return None
            logits = gathered
        logits, cap = logits.float(), self.config.logits_soft_cap
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _make_stack(self) -> tuple[StackBackend, Stack] | None:
        """All layers, where the backend can run them by itself."""
        config, backend = self.config, self.backend
        layers = [self._plain_layer(index) for index in range(config.num_layers)]
        plain = [layer for layer in layers if layer is not None]
        if not plain or len(plain) < len(layers) or not isinstance(backend, StackBackend):
            return None
        shape = StackShape(
            config.num_heads,
            config.rms_norm_eps,
            config.attention_scale,
            config.attention_soft_cap,
            config.activation is not Activation.SILU,
        )
        return backend, backend.stack_layers(plain, shape)

    def _plain_layer(self, index: int) -> PlainLayer | None:
        """None where something is done in it that a stack does not know."""
        config, layer = self.config, self._weights.layers[index]
        has_post_norm = layer.attention_post_norm is not None or layer.mlp_post_norm is not None
        if has_post_norm or config.residual_scale != 1.0 or config.qkv_clip is not None:
            return None
        if self._group.world_size > 1 or isinstance(layer.mlp, ExpertsWeights):
            return None
        return PlainLayer(
            layer.input_norm,
            layer.qkv,
            layer.q_norm,
            layer.k_norm,
            layer.output,
            layer.mlp_norm,
            layer.mlp.gate_up,
            layer.mlp.down,
            self._cos_sin[index],
            config.layers[index].window,
        )

    def _num_stacked(self, kv_layers: Sequence[Tensor]) -> int:
        """How many layers can run in one call: all or none."""
        if self._stack is None:
            return 0
        is_narrower = kv_layers[0].dtype != self._weights.final_norm.dtype
        return 0 if is_narrower else self.config.num_layers

    def _run_stack(
        self,
        num_layers: int,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Through the first layers; what the last of them adds to the residual."""
        assert self._stack is not None, "there is no stack"
        backend, stack = self._stack
        return backend.run_stack(stack, num_layers, residual, kv_layers, metadata)

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = self._lookup_shared(token_ids)
        if self.config.embedding_scale == 1.0:
            return x
        # The factor is rounded to the model's dtype, as it was in training.
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)

    def _lookup_shared(self, token_ids: Tensor) -> Tensor:
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
        return F.embedding(token_ids, weights.embedding).to(weights.final_norm.dtype)

    def _write_cache(
        self, x: Tensor, index: int, kv_layer: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Project x [T, hidden_size]; K and V go to the cache → q [T, num_heads, head_dim]."""
        layer, clip = self._weights.layers[index], self.config.qkv_clip
        fused = self.backend.linear(x, layer.qkv).view(x.shape[0], -1, self.config.head_dim)
        q, k, v = torch.split_with_sizes(fused, self._heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normalise(q, k, layer.q_norm, layer.k_norm)
        if clip is not None:
            q, k, v = (part.clamp(-clip, clip) for part in (q, k, v))
        return self.backend.rope_and_cache(q, k, v, self._cos_sin[index], kv_layer, metadata)

    def _normalise(
        self, q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim]."""
        eps = self.config.rms_norm_eps
        pairs = ((q, q_norm), (k, k_norm))
        if self._qk_widths is None:
            q, k = (
                self.backend.rms_norm(heads.reshape(-1, len(norm)), norm, eps).view(heads.shape)
                for heads, norm in pairs
            )
            return q, k
        # Over heads that stand on several ranks: what they share is the sum of squares.
        wide = [heads.flatten(1).float() for heads, _ in pairs]
        squares = torch.stack([part.square().sum(-1) for part in wide])
        self._group.all_reduce(squares)
        scales = torch.rsqrt(squares / self._qk_widths + eps).unsqueeze(-1)
        q, k = (
            (norm * (part * scale).to(heads.dtype)).view(heads.shape)
            for (heads, norm), part, scale in zip(pairs, wide, scales, strict=True)
        )
        return q, k

    def _sum_qk_widths(self) -> Tensor | None:
        """float32 [2, 1]: over how many elements q and k are normalised, where those are on
        several ranks."""
        if self.config.qk_norm is not QkNorm.ALL_HEADS or self._group.world_size == 1:
            return None
        sizes = (self.config.q_size, self.config.kv_size)
        widths = torch.tensor(sizes, dtype=torch.float32, device=self._weights.final_norm.device)
        self._group.all_reduce(widths)
        return widths.unsqueeze(1)

    def _attend(
        self, q: Tensor, index: int, kv_layer: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """→ [T, num_heads * head_dim]."""
        config = self.config
        out = self.backend.attention(
            q,
            kv_layer,
            metadata,
            config.attention_scale,
            config.layers[index].window,
            config.attention_soft_cap,
        )
        return out.flatten(1)

    def _before_adding(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What attention or the MLP said, as the residual takes it."""
        if norm is not None:
            x = self.backend.rms_norm(x, norm, self.config.rms_norm_eps)
        return x if self.config.residual_scale == 1.0 else x * self.config.residual_scale

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> Tensor:
        if isinstance(layer.mlp, ExpertsWeights):
            assert self.config.experts is not None, "the model has no experts"
            return mix_experts(x, layer.mlp, self.config.experts, self.backend, self._run_mlp)
        return self._run_mlp(x, layer.mlp)

    def _run_mlp(self, x: Tensor, mlp: MlpWeights) -> Tensor:
        gate_up = self.backend.linear(x, mlp.gate_up)
        if self.config.activation is Activation.SILU:
            activated = self.backend.silu_and_mul(gate_up)
        else:
            activated = self.backend.gelu_tanh_and_mul(gate_up)
        return self.backend.linear(activated, mlp.down)
