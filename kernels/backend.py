"""The operations a model is made of, behind one choice of backend.

`reference` is plain torch and runs anywhere; `cpu` is compiled C++; `flashinfer` and `triton` run
on a GPU. Each operation of each backend is tested against `reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .metadata import AttentionMetadata, HostLayout
from .quantized_weight import QuantizedWeight
from .sampling import DrawParams


class LinearWeight(Protocol):
    """A weight [out_features, in_features] in the layout that its backend likes best."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        ...


class KernelBackend(Protocol):
    """T = tokens of the step; every float tensor has the model's dtype unless said otherwise.

    kv_layer: one layer's strided view of the block-major pool,
    [num_blocks, 2, block_size, num_kv_heads, head_dim]; of the model's dtype or a narrower one,
    then rounded as it is written and widened as it is read.
    """

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """Take weight [out, in] (and bias [out]) once, at load. The caller drops its own copy."""
        ...

    def pack_table(self, table: Tensor) -> Tensor:
        """An embedding [vocab, hidden] that is not also the head, as it is kept for lookups; of the
        model's dtype or a narrower one."""
        ...

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """The same of a weight of small integers, kept as they are where the backend can. Needs
        `weight.is_packable`."""
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
        Returns the rotated q, as the same backend's `attention` takes it; q and k are used up.
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

    def filtered_weights(self, logits: Tensor, params: DrawParams) -> Tensor:
        """What may be drawn after temperature and filters, and how likely; a row's sum may be any.

        logits: float32 [n, vocab], unchanged → float32 [n, vocab].
        """
        ...

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        """Copy-on-write in one call: the first num_slots[i] slots of block sources[i] → targets[i].

        pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim];
        sources, targets, num_slots: int64 [n].
        """
        ...


@runtime_checkable
class GraphBackend(KernelBackend, Protocol):
    """A backend whose decode steps a CUDA graph can hold: kernels read the step's layout on the
    device, and never ask the host."""

    def plan_graph(self, metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
        """Before a graph's decode step is captured, and before each replay: what the host has to
        work out of the step's new layout.

        metadata: the object that the graph was captured with, whose tensors hold the new layout.
        max_num_pages: the most blocks that the tables of any graph's step name together.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer that is norm, attention, norm, gated MLP and nothing else. q_norm, k_norm: of runs as
    long as they are. cos_sin, window: as `rope_and_cache` and `attention` take them."""

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight
    cos_sin: Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers of a stack agree in. is_gelu: the MLP's activation, else SiLU."""

    num_heads: int
    eps: float
    scale: float
    soft_cap: float | None
    is_gelu: bool


class Stack(Protocol):
    """Layers that a backend has made ready to run one after the other."""

    @property
    def layers(self) -> tuple[PlainLayer, ...]: ...


@runtime_checkable
class StackBackend(KernelBackend, Protocol):
    """A backend that runs layer after layer by itself, to the same bit as one by one."""

    def stack_layers(self, layers: Sequence[PlainLayer], shape: StackShape) -> Stack:
        """A model's layers from the first on."""
        ...

    def run_stack(
        self,
        stack: Stack,
        num_layers: int,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Through the first `num_layers`. residual [T, hidden]: embedded tokens, updated in place,
        of the cache's dtype. Returns what the last of the layers adds to it, [T, hidden]."""
        ...
