"""The Triton backend: attention, cache writes, norms and block copies as our own GPU kernels.

Chooses grids and tiles; the arithmetic is `triton_kernels`. Products are torch's. Needs nothing but
torch and triton, takes every dtype and head size, and plans nothing on the host, so a CUDA graph
can hold all of it. On the CPU it runs in Triton's interpreter, for tests.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false
# pyright: reportFunctionMemberAccess=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
from torch import Tensor

from . import triton_kernels as device
from .metadata import AttentionMetadata, HostLayout
from .reference import ReferenceBackend

_MIN_DOT = 16  # the smallest side of a product on tensor cores
_PROGRAMS_PER_PROCESSOR = 8  # that keep the memory of a GPU busy while decoding
_DEFAULT_PROCESSORS = 128
_MAX_SPLITS = 64
_MIN_SPLIT = 256  # keys below which a split costs more than it gains
_TILE_ELEMENTS = 4096  # of a norm's tile
_GATE_BLOCK = 1024
_COPY_BLOCK = 2048
_ROPE_HEADS = 8
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class TritonBackend(ReferenceBackend):
    """`KernelBackend` in Triton.

    deterministic: products in tiles of fixed size, and keys never split: a row's result then
    depends neither on its batch nor on where its chunk began.
    """

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch_norm(x, None, weight, out, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "the residual is updated in place"
        out = torch.empty_like(residual)
        _launch_norm(x, residual, weight, out, eps)
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
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            assert tensor.stride()[1:] == (head_dim, 1), f"{name}'s heads are apart"
        assert cos_sin.is_contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tiles = -(-num_heads // _ROPE_HEADS) + 2 * -(-num_kv_heads // _ROPE_HEADS)
        is_narrow = kv_layer.dtype.itemsize < k.dtype.itemsize
        device.rope_and_cache[(num_tokens, num_tiles)](
            q,
            k,
            v,
            out,
            kv_layer,
            cos_sin,
            metadata.positions,
            metadata.slots,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            *kv_layer.stride()[:4],
            num_heads,
            num_kv_heads,
            torch.finfo(kv_layer.dtype).max if is_narrow else 0.0,
            HEAD_DIM=head_dim,
            HALF=cos_sin.shape[1] // 2,
            BLOCK_SIZE=kv_layer.shape[2],
            CLAMP=is_narrow,
            HEADS=_ROPE_HEADS,
            BLOCK_D=_power_of_two(head_dim),
        )
        return out

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_sequences, num_decodes = len(metadata.context_lens), metadata.num_decodes
        if num_decodes > 0:
            self._attend(q, kv_layer, metadata, (0, num_decodes), out, scale, window, soft_cap)
        if num_decodes < num_sequences:
            rest = (num_decodes, num_sequences)
            self._attend(q, kv_layer, metadata, rest, out, scale, window, soft_cap)
        return out

    def _attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        sequences: tuple[int, int],
        out: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        """Sequences [first, end): those that decode, or those that do not."""
        first, end = sequences
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = kv_layer.shape[3]
        group = num_heads // num_kv_heads
        is_decode = end <= metadata.num_decodes
        max_query_len = 1 if is_decode else metadata.max_query_len
        block_m, block_n, num_warps = self._tile(group, head_dim, q.dtype, is_decode)
        num_tiles = -(-max_query_len * group // block_m)
        num_splits = 1
        if is_decode and not self.deterministic:
            programs = (end - first) * num_kv_heads * num_tiles
            seen = metadata.max_context_len if window is None else window
            num_splits = _num_splits(programs, seen, q.device)
        partial = stats = out
        if num_splits > 1:
            shape = (end - first, num_heads, num_splits)
            partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
            stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        tables = metadata.block_tables[first:end]
        block_d = max(_MIN_DOT, _power_of_two(head_dim))
        device.attend[(end - first, num_kv_heads, num_tiles * num_splits)](
            q,
            kv_layer,
            out,
            partial,
            stats,
            metadata.query_starts[first:],
            metadata.context_lens[first:],
            tables,
            tables.stride(0),
            q.stride(0),
            q.stride(1),
            *kv_layer.stride()[:4],
            scale,
            window or 0,
            soft_cap or 1.0,
            num_splits,
            HEAD_DIM=head_dim,
            GROUP=group,
            BLOCK_SIZE=kv_layer.shape[2],
            HAS_WINDOW=window is not None,
            HAS_SOFT_CAP=soft_cap is not None,
            IS_SPLIT=num_splits > 1,
            # Products of float32 as they are, not rounded to 10 bits for the tensor cores.
            PRECISION="ieee",
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )
        if num_splits > 1:
            device.merge_splits[((end - first) * num_heads,)](
                partial,
                stats,
                out,
                num_splits,
                HEAD_DIM=head_dim,
                BLOCK_S=_power_of_two(num_splits),
                BLOCK_D=block_d,
            )

    def _tile(
        self, group: int, head_dim: int, dtype: torch.dtype, is_decode: bool
    ) -> tuple[int, int, int]:
        """(BLOCK_M, BLOCK_N, num_warps). One tile for all where results may not depend on it."""
        is_wide = dtype == torch.float32 or head_dim > 128
        block_n = 32 if is_wide else 64
        if is_decode and not self.deterministic:
            return max(_MIN_DOT, _power_of_two(group)), block_n, 4
        return 64 if is_wide else 128, block_n, 4 if is_wide else 8

    def plan_graph(self, metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
        """Nothing: the kernels read the layout themselves."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return _launch_gate(gate_up, is_gelu=False)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return _launch_gate(gate_up, is_gelu=True)

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        assert pool.is_contiguous(), "blocks are copied as one piece per plane"
        num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = pool.shape
        slot_bytes = num_kv_heads * head_dim * pool.element_size()
        word = next(dtype for dtype in _WORDS if slot_bytes % dtype.itemsize == 0)
        slot_words = slot_bytes // word.itemsize
        planes = num_layers * 2
        words = pool.view(num_blocks, -1).view(torch.uint8).view(word)
        device.copy_slots[(len(sources), planes)](
            words,
            sources,
            targets,
            num_slots,
            planes * block_size * slot_words,
            block_size * slot_words,
            slot_words,
            BLOCK=_COPY_BLOCK,
        )


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float
) -> None:
    num_rows, width = x.shape
    assert x.stride(1) == 1, f"a row's elements are apart: {x.stride()}"
    block = _power_of_two(width)
    # One row's tile always has the same shape, so its sum does not depend on the others.
    rows = max(1, _TILE_ELEMENTS // block)
    device.rms_norm[(-(-num_rows // rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        num_rows,
        eps,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=block,
    )


def _launch_gate(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    device.gate_and_mul[(num_rows, -(-width // _GATE_BLOCK))](
        gate_up, out, width, IS_GELU=is_gelu, BLOCK=_GATE_BLOCK
    )
    return out


def _num_splits(programs: int, num_keys: int, where: torch.device) -> int:
    """Into how many parts the keys are split, so that few sequences fill the GPU too."""
    processors = _DEFAULT_PROCESSORS
    if where.type == "cuda":
        processors = torch.cuda.get_device_properties(where).multi_processor_count
    wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // max(1, programs))
    return max(1, min(wanted, _MAX_SPLITS, -(-num_keys // _MIN_SPLIT)))


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
