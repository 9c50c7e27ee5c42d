"""Plain decoder layers one after the other in one call of the compiled library.

Between two products the interpreter costs a small step more than the arithmetic there: what it
needs has been driven out of the caches by the weights. A prompt goes through all but attention by
blocks of rows, so that what one kernel writes is still in the caches when the next reads it. The
kernels, and their order for every row, are those of a layer that is run operation by operation, so
results are equal bit for bit.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import LinearWeight, PlainLayer, StackShape
from .cache_arguments import describe_cache, describe_sequences, describe_tokens
from .cpu_library import LayerArgs, StackArgs, native_library
from .metadata import AttentionMetadata
from .packed_linear import PackedLinear


@dataclass(slots=True)
class LayerStack:
    """Layers that were made ready. room: what is written between two kernels, kept and grown."""

    layers: tuple[PlainLayer, ...]
    described: ctypes.Array[LayerArgs]  # points into `layers`, as `arguments` does into this
    arguments: StackArgs
    room: Tensor

    @classmethod
    def make(
        cls, layers: Sequence[PlainLayer], shape: StackShape, num_threads: int
    ) -> "LayerStack":
        """Of layers whose weights are packed."""
        first = layers[0]
        described = (LayerArgs * len(layers))(*map(_describe_layer, layers))
        arguments = StackArgs(
            layers=ctypes.addressof(described),
            hidden=first.qkv.in_features,
            ffn=first.down.in_features,
            q_norm_width=0 if first.q_norm is None else len(first.q_norm),
            k_norm_width=0 if first.k_norm is None else len(first.k_norm),
            eps=shape.eps,
            is_gelu=shape.is_gelu,
        )
        arguments.rope.num_heads = arguments.attention.num_heads = shape.num_heads
        arguments.rope.threads = arguments.attention.threads = num_threads
        arguments.attention.scale = shape.scale
        arguments.attention.soft_cap = shape.soft_cap or 0.0
        return cls(tuple(layers), described, arguments, torch.empty(0, dtype=torch.uint8))

    def run(
        self,
        num_layers: int,
        residual: Tensor,
        kv_layers: Sequence[Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `StackBackend.run_stack`."""
        assert num_layers <= len(self.layers), f"{num_layers} of {len(self.layers)} layers"
        assert residual.is_contiguous(), "the residual is updated in place"
        assert residual.dtype == kv_layers[0].dtype, f"{residual.dtype} over {kv_layers[0].dtype}"
        library, arguments = native_library(), self.arguments
        for part in (arguments.rope, arguments.attention):
            describe_cache(part, kv_layers[0])
        describe_tokens(arguments.rope, metadata)
        describe_sequences(arguments.attention, metadata)
        arguments.rope.num_tokens, arguments.num_layers = residual.shape[0], num_layers
        needed = library.pf_stack_room(ctypes.byref(arguments))
        if needed > len(self.room):
            self.room = torch.empty(needed, dtype=torch.uint8)
        x = torch.empty_like(residual)
        pointers = [layer.data_ptr() for layer in kv_layers[:num_layers]]
        cache = (ctypes.c_void_p * len(pointers))(*pointers)
        arguments.kv = ctypes.addressof(cache)
        arguments.residual, arguments.x = residual.data_ptr(), x.data_ptr()
        arguments.room = self.room.data_ptr()
        library.pf_run_stack(ctypes.byref(arguments))
        return x


def _describe_layer(layer: PlainLayer) -> LayerArgs:
    table = layer.cos_sin
    assert table.dtype == torch.float32 and table.is_contiguous()
    return LayerArgs(
        qkv=_product(layer.qkv),
        output=_product(layer.output),
        gate_up=_product(layer.gate_up),
        down=_product(layer.down),
        input_norm=layer.input_norm.data_ptr(),
        q_norm=_pointer(layer.q_norm),
        k_norm=_pointer(layer.k_norm),
        mlp_norm=layer.mlp_norm.data_ptr(),
        cos_sin=table.data_ptr(),
        rotary_dim=table.shape[1],
        window=layer.window or 0,
    )


def _product(weight: LinearWeight) -> int:
    assert isinstance(weight, PackedLinear), f"packed by another backend: {type(weight)}"
    return ctypes.addressof(weight.arguments)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
