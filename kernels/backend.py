"""The operations a model is made of, behind one choice of backend.

`reference` is plain torch and runs anywhere; `cpu` is compiled C++; GPU backends come beside
them. Each operation of each backend is tested against `reference`.
"""

from typing import Protocol

import torch
from torch import Tensor

from .metadata import AttentionMetadata


class LinearWeight(Protocol):
    """A weight [out_features, in_features] in the layout that its backend likes best."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class KernelBackend(Protocol):
    """T = tokens of the step; every float tensor has the model's dtype unless said otherwise.

    kv_layer: one layer's strided view of the block-major pool,
    [num_blocks, 2, block_size, num_kv_heads, head_dim].
    """

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """Take weight [out, in] (and bias [out]) once, at load. The caller drops its own copy."""
        ...

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, in] → [T, out], accumulated in float32."""
        ...

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        """Rows token_ids (int64 [T]) of a packed weight → [T, in] of `dtype`: a tied embedding
        and output layer need one copy."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] → normalised [T, hidden]; statistics in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual)."""
        ...

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotate q and k by position (half-split pairs), write k and v to their slots.

        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; inputs may be strided
        views of one fused projection. cos_sin: float32 [max_positions, rotary_dim], cos then sin;
        dimensions from rotary_dim on pass through, so a table of width 0 rotates nothing.
        Returns the rotated q, contiguous.
        """
        ...

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention of q [T, num_heads, head_dim] over the paged cache → the same shape.

        Query head h reads KV head h // (num_heads // num_kv_heads). Softmax in float32.
        window: how many keys a query sees, its own included; older ones are masked, and their
        slots may hold anything. soft_cap: scaled scores become soft_cap * tanh(score / soft_cap).
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * ffn] (gate first) → silu(gate) * up, [T, ffn]."""
        ...

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_and_mul`, with GELU in its tanh approximation."""
        ...

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        """Copy-on-write in one call: the first num_slots[i] slots of block sources[i] → targets[i].

        pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim];
        sources, targets, num_slots: int64 [n].
        """
        ...
