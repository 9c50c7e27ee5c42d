"""The FlashInfer backend: attention, cache writes, RoPE, norms, activations and filters on a GPU.

Knows which of FlashInfer's functions does what and under which conditions; shapes and dtypes that
FlashInfer has no kernel for, and copies of blocks, are left to Triton's. What is planned on the
host is `flashinfer_plans`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Protocol, cast

import torch
from torch import Tensor

from .flashinfer_plans import HEAD_DIMS, AttentionLibrary, AttentionPlans, AttentionShape
from .metadata import AttentionMetadata, HostLayout
from .reference import stored
from .sampling import DrawParams
from .triton_backend import TritonBackend

_ALIGNMENT = 16  # bytes that one thread moves at a time
_HALF_WIDTHS = (torch.float16, torch.bfloat16)


class SamplingLibrary(Protocol):
    """The part of `flashinfer.sampling` that is used: the draw is ours."""

    def softmax(self, logits: Tensor, temperature: Tensor) -> Tensor: ...

    def top_k_renorm_probs(
        self, probs: Tensor, top_k: Tensor, is_deterministic: bool
    ) -> Tensor: ...

    def top_p_renorm_probs(
        self, probs: Tensor, top_p: Tensor, is_deterministic: bool
    ) -> Tensor: ...


class Library(AttentionLibrary, Protocol):
    """The part of FlashInfer that is used."""

    @property
    def sampling(self) -> SamplingLibrary: ...

    def rmsnorm(self, input: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def fused_add_rmsnorm(
        self, input: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> None: ...

    def silu_and_mul(self, input: Tensor) -> Tensor: ...

    def gelu_tanh_and_mul(self, input: Tensor) -> Tensor: ...

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
    ) -> None: ...

    def append_paged_kv_cache(
        self,
        append_key: Tensor,
        append_value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        paged_kv_cache: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
    ) -> None: ...


class FlashInferBackend(TritonBackend):
    """`KernelBackend` over FlashInfer, for models of half-width floats.

    library: None = the installed package.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        super().__init__()
        self._library = library or _import_library()
        self._plans = AttentionPlans(self._library, device)
        self._append_step: tuple[AttentionMetadata | None, bool] = (None, False)
        self._append_places: tuple[Tensor, ...] = ()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _is_aligned(x):
            return super().rms_norm(x, weight, eps)
        return self._library.rmsnorm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not (_is_aligned(x) and x.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        # In place on both; nobody reads x again.
        self._library.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotates q and k in place, which are parts of a projection that nobody reads again."""
        head_dim, rotary_dim = q.shape[2], cos_sin.shape[1]
        is_known = head_dim in HEAD_DIMS and rotary_dim % (2 * _ALIGNMENT) == 0
        if not (is_known and q.dtype in _HALF_WIDTHS):
            return super().rope_and_cache(q, k, v, cos_sin, kv_layer, metadata)
        if rotary_dim > 0:
            self._library.apply_rope_with_cos_sin_cache_inplace(
                metadata.positions, q, k, head_dim, cos_sin
            )
        if kv_layer.dtype != k.dtype:
            k, v = (stored(part, kv_layer.dtype) for part in (k, v))
        rows, offsets, blocks, starts, lens = self._places(metadata, kv_layer.shape[2])
        self._library.append_paged_kv_cache(k, v, rows, offsets, kv_layer, blocks, starts, lens)
        return q

    def _places(self, metadata: AttentionMetadata, block_size: int) -> tuple[Tensor, ...]:
        """Where each token goes, told as if it were a sequence with one block of its own: made of
        the slots alone, on the device, and again for a graph, which makes it anew each time."""
        is_capturing = metadata.slots.is_cuda and torch.cuda.is_current_stream_capturing()
        known, was_capturing = self._append_step
        if metadata is not known or is_capturing != was_capturing:
            slots = metadata.slots
            starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
            blocks = torch.div(slots, block_size, rounding_mode="floor").int()
            offsets = torch.remainder(slots, block_size).int()
            self._append_places = (starts[:-1], offsets, blocks, starts, torch.ones_like(blocks))
            self._append_step = (metadata, is_capturing)
        return self._append_places

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        shape = AttentionShape(
            num_heads=q.shape[1],
            num_kv_heads=kv_layer.shape[3],
            head_dim=q.shape[2],
            block_size=kv_layer.shape[2],
            dtype=q.dtype,
            kv_dtype=kv_layer.dtype,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        if not shape.is_supported:
            return super().attention(q, kv_layer, metadata, scale, window, soft_cap)
        plan = self._plans.of(metadata, shape)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = metadata.num_decodes
        if plan.decode is not None:
            plan.decode.run(q[:first], kv_layer, out=out[:first])
        if plan.prefill is not None:
            plan.prefill.run(q[first:], kv_layer, out=out[first:])
        return out

    def plan_graph(self, metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
        self._plans.plan_graph(metadata, host, max_num_pages)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if not (_is_aligned(gate_up) and gate_up.is_contiguous()):
            return super().silu_and_mul(gate_up)
        return self._library.silu_and_mul(gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        if not (_is_aligned(gate_up) and gate_up.is_contiguous()):
            return super().gelu_tanh_and_mul(gate_up)
        return self._library.gelu_tanh_and_mul(gate_up)

    def filtered_weights(self, logits: Tensor, params: DrawParams) -> Tensor:
        """Equal probabilities at a filter's border all stay; `sampling` keeps the lowest ids."""
        sampling = self._library.sampling
        weights = sampling.softmax(logits, params.temperature)
        if params.limits.top_k:
            everything = logits.shape[1]
            top_k = torch.where(params.top_k > 0, params.top_k, everything).clamp(max=everything)
            weights = sampling.top_k_renorm_probs(weights, top_k.int(), is_deterministic=True)
        if params.limits.top_p:
            weights = sampling.top_p_renorm_probs(weights, params.top_p, is_deterministic=True)
        if params.limits.min_p:
            least = params.min_p.clamp(max=1.0) * weights.amax(-1)
            weights = weights.masked_fill_(weights < least.unsqueeze(1), 0.0)
        return weights


def _is_aligned(x: Tensor) -> bool:
    """Whether each row can be read in whole pieces by FlashInfer's half-width kernels."""
    row_bytes = x.shape[-1] // 2 * x.element_size()
    is_whole = row_bytes % _ALIGNMENT == 0 and x.stride(-1) == 1
    return is_whole and x.dtype in _HALF_WIDTHS


def _import_library() -> Library:
    import flashinfer  # pyright: ignore[reportMissingImports]
    import flashinfer.sampling  # pyright: ignore[reportMissingImports, reportUnusedImport]

    return cast(Library, flashinfer)
