"""The compiled kernels against their plain-torch twins, at odd sizes, for every instruction set."""

import numpy as np
import pytest
import torch
from kernel_twins import DTYPES, assert_near
from torch import Tensor

from pagefleet.kernels import sampling
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.sampling import DrawParams

SHAPES = [(1, 1, 8), (4, 4, 20), (6, 2, 32), (9, 3, 64), (8, 1, 80), (32, 8, 128), (13, 1, 256)]


def make_metadata(
    block_size: int, context_lens: list[int], query_lens: list[int]
) -> AttentionMetadata:
    """Sequences over scattered blocks; entries past a table's end point far outside the pool."""
    needed = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(needed)).int()
    tables = torch.full((len(needed), max(needed) + 2), 1_000_000_000, dtype=torch.int32)
    for row, ids in enumerate(order.split(needed)):
        tables[row, : len(ids)] = ids
    pairs = list(zip(context_lens, query_lens, strict=True))
    positions = torch.cat([torch.arange(c - q, c) for c, q in pairs])
    rows = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(query_lens))
    blocks = tables[rows, positions // block_size].long()
    return AttentionMetadata(
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(query_lens)),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


def make_cache(
    metadata: AttentionMetadata, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """One layer of a pool of three; NaN wherever no sequence has a token."""
    num_blocks = int((-(-metadata.context_lens // block_size)).sum())
    shape = (num_blocks, 3, 2, block_size, kv_heads, head_dim)
    layer = torch.full(shape, float("nan"), dtype=dtype)[:, 1]
    for row, length in enumerate(metadata.context_lens.tolist()):
        at = torch.arange(length)
        blocks = metadata.block_tables[row, at // block_size].long()
        layer[blocks, :, at % block_size] = torch.randn(length, 2, kv_heads, head_dim).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_attention_equals_its_twin_and_ignores_unused_slots(
    backend: CpuBackend,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    context_lens, query_lens = [1, 33, 128, 700, 129, 16, 513], [1, 1, 1, 1, 97, 16, 3]
    metadata = make_metadata(block_size, context_lens, query_lens)
    layer = make_cache(metadata, block_size, kv_heads, head_dim, dtype)
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    out = backend.attention(q, layer, metadata, head_dim**-0.5)
    expected = ReferenceBackend(deterministic=True).attention(q, layer, metadata, head_dim**-0.5)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "block_size"),
    [(8, 2, 64, 16), (9, 3, 20, 16), (4, 4, 80, 7)],
)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, None), (40, 5.0), (600, None), (5000, None), (None, 30.0)]
)
def test_attention_with_a_window_or_a_cap_equals_its_twin(
    backend: CpuBackend,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(15)
    context_lens, query_lens = [1, 700, 129, 513], [1, 1, 97, 3]
    metadata = make_metadata(block_size, context_lens, query_lens)
    layer = make_cache(metadata, block_size, kv_heads, head_dim, dtype)
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    twin = ReferenceBackend(deterministic=True)
    expected = twin.attention(q, layer, metadata, 0.3, window, soft_cap)
    if window is not None:  # what no query sees may hold anything
        hide_unseen(layer, metadata, block_size, window)
    assert_near(backend.attention(q, layer, metadata, 0.3, window, soft_cap), expected)


def hide_unseen(layer: Tensor, metadata: AttentionMetadata, block_size: int, window: int) -> None:
    """NaN where no query of a sequence looks any more."""
    query_lens = metadata.query_starts.diff()
    for row, first in enumerate((metadata.context_lens - query_lens - window + 1).tolist()):
        at = torch.arange(max(0, first))
        blocks = metadata.block_tables[row, at // block_size].long()
        layer[blocks, :, at % block_size] = float("nan")


def test_attention_of_long_contexts_and_chunks(backend: CpuBackend) -> None:
    torch.manual_seed(2)
    metadata = make_metadata(16, [3000, 1100, 900], [1, 5, 600])
    layer = make_cache(metadata, 16, 2, 64, torch.float32)
    q = torch.randn(606, 8, 64)
    expected = ReferenceBackend().attention(q, layer, metadata, 0.125)
    assert_near(backend.attention(q, layer, metadata, 0.125), expected)


def test_attention_survives_scores_far_from_zero(backend: CpuBackend) -> None:
    torch.manual_seed(3)
    metadata = make_metadata(16, [300, 300], [1, 40])
    layer = make_cache(metadata, 16, 1, 64, torch.float32)
    q = torch.randn(41, 2, 64) * 300
    expected = ReferenceBackend(deterministic=True).attention(q, layer, metadata, 1.0)
    torch.testing.assert_close(
        backend.attention(q, layer, metadata, 1.0), expected, rtol=1e-3, atol=1e-3
    )


def test_attention_reads_a_cache_with_swapped_inner_axes(backend: CpuBackend) -> None:
    torch.manual_seed(4)
    metadata = make_metadata(16, [50, 20], [1, 20])
    layer = make_cache(metadata, 16, 2, 32, torch.float32)
    swapped = layer.transpose(2, 3).contiguous().transpose(2, 3)
    q = torch.randn(21, 4, 32)
    assert torch.equal(
        backend.attention(q, layer, metadata, 0.2), backend.attention(q, swapped, metadata, 0.2)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (301, None), (70, 20.0)])
def test_attention_is_bitwise_equal_in_any_chunk_batch_and_number_of_threads(
    backend: CpuBackend, dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    torch.manual_seed(5)
    length = 1300
    whole = make_metadata(16, [length], [length])
    layer = make_cache(whole, 16, 3, 64, dtype)
    q = torch.randn(length, 9, 64).to(dtype)
    expected = backend.attention(q, layer, whole, 0.125, window, soft_cap)
    single = CpuBackend(num_threads=1)
    for begin, end in [(0, 1), (0, 7), (7, 300), (300, 301), (511, 514), (1299, 1300), (100, 1300)]:
        for batch in (1, 3):
            chunk = AttentionMetadata(
                query_starts=torch.arange(batch + 1, dtype=torch.int32) * (end - begin),
                context_lens=torch.full((batch,), end, dtype=torch.int32),
                block_tables=whole.block_tables.expand(batch, -1),
                positions=torch.arange(begin, end).repeat(batch),
                slots=whole.slots[begin:end].repeat(batch),
                num_decodes=batch if end - begin == 1 else 0,
                max_query_len=end - begin,
                max_context_len=end,
            )
            part = q[begin:end].repeat(batch, 1, 1)
            for kernels in (backend, single):
                out = kernels.attention(part, layer, chunk, 0.125, window, soft_cap)
                assert torch.equal(out[-(end - begin) :], expected[begin:end]), (begin, end, batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(6, 3, 64), (16, 1, 20)])
def test_blocks_that_sequences_share_are_read_once_for_the_same_result(
    backend: CpuBackend, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(22)
    context_lens = [1100, 1025, 1030, 600, 700, 900, 514, 512, 520, 1200]
    query_lens = [1, 1, 6, 1, 1, 300, 2, 1, 1, 1]
    metadata = make_metadata(16, context_lens, query_lens)
    tables = metadata.block_tables
    tables[1:5, :32] = tables[0, :32]  # three share two splits of 512, two more the first one
    tables[1:3, :64] = tables[0, :64]
    tables[7:9, :32] = tables[6, :32]  # one of them has nothing but these blocks
    layer = make_cache(metadata, 16, kv_heads, head_dim, dtype)
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    out = backend.attention(q, layer, metadata, 0.2)
    assert_near(out, ReferenceBackend(deterministic=True).attention(q, layer, metadata, 0.2))
    assert torch.equal(CpuBackend(num_threads=1).attention(q, layer, metadata, 0.2), out)
    for row, (context, length) in enumerate(zip(context_lens, query_lens, strict=True)):
        alone = make_metadata(16, [context], [length])
        alone.block_tables[0] = tables[row, : alone.block_tables.shape[1]]
        begin = int(metadata.query_starts[row])
        part = backend.attention(q[begin : begin + length], layer, alone, 0.2)
        assert torch.equal(part, out[begin : begin + length]), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (4, 2, 8, 8),
        (9, 3, 64, 64),
        (2, 1, 20, 20),
        (3, 1, 80, 32),
        (32, 8, 128, 128),
    ],
)
def test_rope_and_cache_equals_its_twin(
    backend: CpuBackend,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(6)
    metadata = make_metadata(5, [9, 1, 40], [1, 1, 30])
    fused = torch.randn(32, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
    parts = fused.split([heads * head_dim for heads in (num_heads, kv_heads, kv_heads)], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    angles = torch.rand(64, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    layer = make_cache(metadata, 5, kv_heads, head_dim, dtype)
    twin_layer = layer.clone()
    out = backend.rope_and_cache(q, k, v, cos_sin, layer, metadata)
    expected = ReferenceBackend().rope_and_cache(q, k, v, cos_sin, twin_layer, metadata)
    assert_near(out, expected)
    torch.testing.assert_close(layer, twin_layer, rtol=1e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 64), (3, 5), (7, 576), (130, 1000)])
def test_norms_equal_their_twins(
    backend: CpuBackend, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    x, residual = (torch.randn(rows, hidden).to(dtype) for _ in range(2))
    weight = torch.rand(hidden).to(dtype)
    twin = ReferenceBackend()
    assert_near(backend.rms_norm(x, weight, 1e-5), twin.rms_norm(x, weight, 1e-5))
    twin_residual = residual.clone()
    expected = twin.add_rms_norm(x, twin_residual, weight, 1e-5)
    assert_near(backend.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, twin_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "ffn"), [(0, 8), (1, 172), (5, 3), (64, 1536)])
def test_gated_activations_equal_their_twins(
    backend: CpuBackend, rows: int, ffn: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(8)
    gate_up = (torch.randn(rows, 2 * ffn) * 20).to(dtype)
    gate_up[:, 0] = -200.0  # exp overflows unless it is bounded
    twin = ReferenceBackend()
    assert_near(backend.silu_and_mul(gate_up), twin.silu_and_mul(gate_up))
    assert_near(backend.gelu_tanh_and_mul(gate_up), twin.gelu_tanh_and_mul(gate_up))
    assert_near(backend.gelu_tanh_and_mul(gate_up / 20), twin.gelu_tanh_and_mul(gate_up / 20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_slots_copies_those_slots_of_every_layer_and_no_other(
    backend: CpuBackend, dtype: torch.dtype
) -> None:
    torch.manual_seed(14)
    pool = torch.randn(6, 3, 2, 5, 2, 4).to(dtype)
    expected = pool.clone()
    sources, targets, counts = (torch.tensor(ids) for ids in ([0, 4], [1, 5], [2, 5]))
    ReferenceBackend().copy_slots(expected, sources, targets, counts)
    backend.copy_slots(pool, sources, targets, counts)
    assert torch.equal(pool, expected)


def make_draw(rows: int, **limits: float) -> DrawParams:
    """Parameters that are the same for all rows, but for the uniforms."""
    return DrawParams(
        temperature=torch.full((rows,), limits.get("temperature", 1.0)),
        top_k=torch.full((rows,), int(limits.get("top_k", 0))),
        top_p=torch.full((rows,), limits.get("top_p", 1.0)),
        min_p=torch.full((rows,), limits.get("min_p", 0.0)),
        uniforms=torch.rand(rows),
    )


@pytest.mark.parametrize("vocab_size", [1, 13, 512, 5003])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1e-9},
        {"top_k": 1},
        {"top_k": 40, "temperature": 2.0},
        {"top_k": 4000},
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 5.0},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 200, "top_p": 0.7, "min_p": 0.02},
    ],
    ids=str,
)
def test_filters_keep_and_draw_what_their_twin_does(
    backend: CpuBackend, vocab_size: int, limits: dict[str, float]
) -> None:
    torch.manual_seed(17)
    logits = torch.randn(19, vocab_size + 3)[:, :vocab_size] * 3
    logits[1] = 0.5  # equals: the lowest ids stay
    logits[2, ::2] = float("-inf")
    logits[2, 0] = 1.0
    params = make_draw(19, **limits)
    kept = backend.filtered_weights(logits, params)
    expected = sampling.filtered_weights(logits, params)
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-30)
    drawn = sampling.sample(logits, params, backend.filtered_weights)
    assert torch.equal(drawn, sampling.sample(logits, params))


def test_a_row_is_filtered_by_its_own_limits(backend: CpuBackend) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4, 1)
    params = DrawParams(
        temperature=torch.ones(4),
        top_k=torch.tensor([0, 2, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1]),
        uniforms=torch.zeros(4),
    )
    kept = backend.filtered_weights(logits, params) > 0
    assert kept.tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, False],
        [False, True, True, True],
    ]
