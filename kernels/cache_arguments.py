"""A step over the paged cache as the compiled library is told of it.

Fills in what is the same for every layer of the step; pointers to a layer's own tensors are left to
the caller.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from torch import Tensor

from .cpu_library import DTYPE_CODES, AttentionArgs, RopeArgs
from .metadata import AttentionMetadata


def describe_cache(arguments: AttentionArgs | RopeArgs, kv_layer: Tensor) -> None:
    """How one layer's blocks lie in memory."""
    block_stride, value_offset, token_stride, head_stride, element = kv_layer.stride()
    assert element == 1, f"a head's elements are apart: {kv_layer.stride()}"
    _, _, block_size, num_kv_heads, head_dim = kv_layer.shape
    arguments.block_stride, arguments.value_offset = block_stride, value_offset
    arguments.token_stride, arguments.head_stride = token_stride, head_stride
    arguments.block_size, arguments.num_kv_heads = block_size, num_kv_heads
    arguments.head_dim, arguments.dtype = head_dim, DTYPE_CODES[kv_layer.dtype]


def describe_sequences(arguments: AttentionArgs, metadata: AttentionMetadata) -> None:
    """What attention reads."""
    tables = metadata.block_tables
    assert tables.stride(1) == 1, f"the ids of a block table are apart: {tables.stride()}"
    arguments.query_starts = metadata.query_starts.data_ptr()
    arguments.context_lens = metadata.context_lens.data_ptr()
    arguments.block_tables, arguments.table_stride = tables.data_ptr(), tables.stride(0)
    arguments.num_sequences = metadata.context_lens.shape[0]


def describe_tokens(arguments: RopeArgs, metadata: AttentionMetadata) -> None:
    """Where each token stands, and where its K and V are written."""
    assert metadata.positions.is_contiguous() and metadata.slots.is_contiguous()
    arguments.positions = metadata.positions.data_ptr()
    arguments.slots = metadata.slots.data_ptr()
