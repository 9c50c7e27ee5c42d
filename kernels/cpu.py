"""The compiled CPU backend: plain C++ called through ctypes on the tensors' own memory.

Knows how tensors cross the library's C interface; the arithmetic is in csrc/. A result of a
row depends on that row alone, whatever the batch, the chunks of a prompt or the number of
threads: the kernels always sum in one fixed order, so `deterministic` costs nothing here.

One thread at a time may use a backend and the weights it packed: argument blocks are kept and
reused, which makes a call cheap enough for small models.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .backend import LinearWeight, PlainLayer, Stack, StackShape
from .cache_arguments import describe_cache, describe_sequences, describe_tokens
from .cpu_library import DTYPE_CODES, AttentionArgs, FilterArgs, RopeArgs, native_library
from .layer_stack import LayerStack
from .metadata import AttentionMetadata
from .packed_linear import PackedLinear, exact_dtype, pack_codes, pack_linear
from .quantized_weight import QuantizedWeight
from .reference import ReferenceBackend
from .sampling import DrawParams
from .weight_arena import WeightArena


class CpuBackend:
    """`KernelBackend` in C++.

    Args:
        weight_dtype: how `pack_linear` stores weights; None: at the least width that loses nothing.
            Narrower weights are widened as they are read: products are float32 all the same.
        num_threads: None takes torch's number at the time of construction.
        deterministic: compiled results always are.
    """

    name = "cpu"

    def __init__(
        self,
        deterministic: bool = False,
        *,
        weight_dtype: torch.dtype | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.deterministic = deterministic
        self.num_threads = num_threads or torch.get_num_threads()
        self._weight_dtype = weight_dtype
        self._arena = WeightArena()
        self._library = native_library()
        self._attention = AttentionArgs(threads=self.num_threads)
        self._rope = RopeArgs(threads=self.num_threads)
        self._reference = ReferenceBackend(deterministic)  # for a cache narrower than the model
        self._attention_layout: tuple[object, ...] = ()
        self._rope_layout: tuple[object, ...] = ()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        return pack_linear(weight, bias, self._weight_dtype, self._arena, self.num_threads)

    def pack_table(self, table: Tensor) -> Tensor:
        """Rows are looked up: a scale for each would cost more than int8 saves."""
        is_narrow = self._weight_dtype is not None
        return table.to(torch.bfloat16 if is_narrow else exact_dtype(table, self.num_threads))

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """Take a weight of codes as it is: never made float in memory."""
        return pack_codes(weight, bias, self._arena, self.num_threads)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight, PackedLinear), f"packed by another backend: {type(weight)}"
        rows, in_features = x.shape
        assert in_features == weight.in_features, f"{x.shape} against {weight.in_features}"
        x = x.contiguous()
        out = x.new_empty(rows, weight.out_features)
        arguments = weight.arguments
        arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
        arguments.rows, arguments.x_dtype = rows, DTYPE_CODES[x.dtype]
        self._library.pf_linear(ctypes.byref(arguments))
        return out

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        """Rows token_ids (int64 [T]) of a packed weight → [T, in_features] of `dtype`.

        Lets a tied embedding and output layer live in one copy.
        """
        assert isinstance(weight, PackedLinear), f"packed by another backend: {type(weight)}"
        assert weight.weight_dtype in DTYPE_CODES, "codes by groups are no embedding"
        token_ids = token_ids.to(torch.int64).contiguous()
        out = torch.empty(token_ids.shape[0], weight.in_features, dtype=dtype)
        self._library.pf_unpack_rows(
            weight.packed.data_ptr(),
            None if weight.scale is None else weight.scale.data_ptr(),
            weight.in_features,
            DTYPE_CODES[weight.weight_dtype],
            token_ids.data_ptr(),
            token_ids.shape[0],
            out.data_ptr(),
            DTYPE_CODES[dtype],
            self.num_threads,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight.dtype == x.dtype, f"a weight of {weight.dtype} for {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, hidden = x.shape
        self._library.pf_rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            DTYPE_CODES[x.dtype],
            self.num_threads,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "the residual is updated in place"
        assert weight.dtype == residual.dtype == x.dtype, f"{weight.dtype}, {residual.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, hidden = x.shape
        self._library.pf_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            DTYPE_CODES[x.dtype],
            self.num_threads,
        )
        return out

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        if kv_layer.dtype != q.dtype:
            return self._reference.rope_and_cache(q, k, v, cos_sin, kv_layer, metadata)
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments = self._rope
        layout = (metadata, cos_sin, q.shape, q.stride(), k.stride(), v.stride(), kv_layer.stride())
        if not _same(layout, self._rope_layout):
            self._describe_rope(q, k, v, cos_sin, kv_layer, metadata)
            self._rope_layout = layout
        arguments.q, arguments.k, arguments.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        arguments.q_out, arguments.kv = out.data_ptr(), kv_layer.data_ptr()
        self._library.pf_rope_and_cache(ctypes.byref(arguments))
        return out

    def _describe_rope(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Fill in what is the same for every layer of a step."""
        num_tokens, num_heads, head_dim = q.shape
        assert q.dtype == kv_layer.dtype, f"queries of {q.dtype} over a cache of {kv_layer.dtype}"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            assert tensor.stride()[1:] == (head_dim, 1), (
                f"{name}'s heads are apart: {tensor.stride()}"
            )
        assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
        arguments = self._rope
        describe_cache(arguments, kv_layer)
        describe_tokens(arguments, metadata)
        arguments.cos_sin = cos_sin.data_ptr()
        arguments.q_stride, arguments.k_stride = q.stride(0), k.stride(0)
        arguments.v_stride = v.stride(0)
        arguments.num_tokens, arguments.num_heads = num_tokens, num_heads
        arguments.rotary_dim = cos_sin.shape[1]

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        if kv_layer.dtype != q.dtype:
            return self._reference.attention(q, kv_layer, metadata, scale, window, soft_cap)
        q = q.contiguous()
        out = torch.empty_like(q)
        arguments = self._attention
        layout = (metadata, q.shape, kv_layer.shape, kv_layer.stride())
        if not _same(layout, self._attention_layout):
            self._describe_attention(q, kv_layer, metadata)
            self._attention_layout = layout
        # Layers take turns with these.
        arguments.scale, arguments.soft_cap = scale, soft_cap or 0.0
        arguments.window = window or 0
        arguments.q, arguments.kv, arguments.out = q.data_ptr(), kv_layer.data_ptr(), out.data_ptr()
        self._library.pf_attention(ctypes.byref(arguments))
        return out

    def _describe_attention(self, q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata) -> None:
        """Fill in what is the same for every layer of a step."""
        assert q.dtype == kv_layer.dtype, f"queries of {q.dtype} over a cache of {kv_layer.dtype}"
        describe_cache(self._attention, kv_layer)
        describe_sequences(self._attention, metadata)
        self._attention.num_heads = q.shape[1]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, self._library.pf_silu_and_mul)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, self._library.pf_gelu_tanh_and_mul)

    def _gated(self, gate_up: Tensor, function: Callable[..., None]) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        function(
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            DTYPE_CODES[gate_up.dtype],
            self.num_threads,
        )
        return out

    def stack_layers(self, layers: Sequence[PlainLayer], shape: StackShape) -> Stack:
        return LayerStack.make(layers, shape, self.num_threads)

    def run_stack(
        self,
        stack: Stack,
        num_layers: int,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(stack, LayerStack), f"of another backend: {type(stack)}"
        return stack.run(num_layers, residual, kv_layers, metadata)

    def filtered_weights(self, logits: Tensor, params: DrawParams) -> Tensor:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.stride()}"
        rows, vocab_size = logits.shape
        weights = torch.empty(rows, vocab_size)
        given = [
            part.contiguous()
            for part in (params.temperature, params.top_k, params.top_p, params.min_p)
        ]
        self._library.pf_filter_logits(
            ctypes.byref(
                FilterArgs(
                    logits.data_ptr(),
                    weights.data_ptr(),
                    *(part.data_ptr() for part in given),
                    rows,
                    vocab_size,
                    logits.stride(0),
                    self.num_threads,
                )
            )
        )
        return weights

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        assert pool.is_contiguous(), "blocks are copied as one piece per plane"
        num_layers, block_size = pool.shape[1], pool.shape[3]
        slot_bytes = pool.shape[4] * pool.shape[5] * pool.element_size()
        self._library.pf_copy_slots(
            pool.data_ptr(),
            sources.data_ptr(),
            targets.data_ptr(),
            num_slots.data_ptr(),
            sources.shape[0],
            num_layers * 2,
            block_size * slot_bytes,
            slot_bytes,
            self.num_threads,
        )


def _same(layout: tuple[object, ...], known: tuple[object, ...]) -> bool:
    """Identity for tensors and metadata (kept alive by the tuple), equality for the rest."""
    return len(layout) == len(known) and all(
        a is b or (not isinstance(a, Tensor | AttentionMetadata) and a == b)
        for a, b in zip(layout, known, strict=True)
    )
