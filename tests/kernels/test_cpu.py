"""The compiled kernels against their plain-torch twins, at odd sizes, for every instruction set."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefleet.kernels import cpu, sampling
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.kernels.quantized_weight import QuantizedWeight
from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.sampling import DrawParams

INSTRUCTION_SETS = ["portable", "avx2", "avx512", "avx512_bf16"]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}
SHAPES = [(1, 1, 8), (4, 4, 20), (6, 2, 32), (9, 3, 64), (8, 1, 80), (32, 8, 128), (13, 1, 256)]


def test_the_library_is_there_when_the_build_was_required() -> None:
    if os.environ.get("PAGEFLEET_REQUIRE_NATIVE") != "1":
        pytest.skip("the native library is optional here")
    assert cpu.is_available()


@pytest.fixture(params=INSTRUCTION_SETS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    if not cpu.is_available():
        pytest.skip("the native library was not built")
    try:
        cpu.select_instruction_set(request.param)
    except cpu.NativeLibraryMissing:
        pytest.skip(f"no {request.param} here")
    yield CpuBackend(num_threads=2)
    cpu.select_instruction_set()


def assert_near(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


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


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 13, 16, 33, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 7), (96, 64), (190, 577)])
def test_linear_equals_its_twin(
    backend: CpuBackend,
    rows: int,
    out_features: int,
    in_features: int,
    weight_dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> None:
    torch.manual_seed(9)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(weight_dtype)
    bias = torch.randn(out_features).to(weight_dtype)
    x = torch.randn(rows, in_features).to(x_dtype)
    out = backend.linear(x, backend.pack_linear(weight, bias))
    expected = x.float() @ weight.float().T + bias.float()
    assert_near(out, expected.to(x_dtype))
    plain = backend.linear(x, backend.pack_linear(weight))
    assert_near(plain, (x.float() @ weight.float().T).to(x_dtype))


def test_linear_over_a_depth_of_several_blocks(backend: CpuBackend) -> None:
    torch.manual_seed(10)
    weight, x = torch.randn(40, 5001) / 70, torch.randn(90, 5001)
    for dtype in DTYPES:
        packed = backend.pack_linear(weight.to(dtype))
        expected = x.double() @ weight.to(dtype).double().T
        torch.testing.assert_close(
            backend.linear(x, packed), expected.float(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("rows", [1, 17])
def test_int8_weights_are_within_half_a_step(backend: CpuBackend, rows: int) -> None:
    torch.manual_seed(11)
    weight, x = torch.randn(70, 130), torch.randn(rows, 130)
    narrow = CpuBackend(num_threads=2, weight_dtype=torch.int8)
    packed = narrow.pack_linear(weight)
    step = weight.abs().amax(1) / 127
    stored = narrow.embedding(torch.arange(70), packed, torch.float32)
    assert ((stored - weight).abs() <= step[:, None] * 0.5001).all()
    torch.testing.assert_close(narrow.linear(x, packed), x @ stored.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_a_row_is_bitwise_the_same_among_any_others(
    backend: CpuBackend, weight_dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    torch.manual_seed(12)
    weight, x = torch.randn(700, 576), torch.randn(150, 576).to(x_dtype)
    narrow = CpuBackend(num_threads=2, weight_dtype=weight_dtype)
    packed = narrow.pack_linear(weight)
    expected = narrow.linear(x, packed)
    for rows in [[3], [0, 1], list(range(17)), [149, 5, 33], list(range(70, 140))]:
        assert torch.equal(narrow.linear(x[rows], packed), expected[rows]), rows


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_embedding_returns_the_rows_that_were_packed(
    backend: CpuBackend, weight_dtype: torch.dtype
) -> None:
    torch.manual_seed(13)
    weight = torch.randn(101, 77).to(weight_dtype)
    packed = backend.pack_linear(weight)
    ids = torch.tensor([100, 0, 31, 32, 100])
    assert torch.equal(backend.embedding(ids, packed, weight_dtype), weight[ids])


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


def test_one_openmp_runtime_serves_torch_and_the_kernels(backend: CpuBackend) -> None:
    backend.linear(torch.randn(4, 64), backend.pack_linear(torch.randn(64, 64)))
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    assert len(runtimes) <= 1, runtimes


@pytest.mark.parametrize("block_bytes", [1, 63, 64, 4096, 4096 + 64, 4096 + 8, 2**19])
def test_whole_blocks_move_between_pools(block_bytes: int) -> None:
    generator = np.random.default_rng(block_bytes)
    source = generator.integers(256, size=(9, block_bytes), dtype=np.uint8)
    target = np.zeros((7, block_bytes), dtype=np.uint8)
    sources, targets = np.array([8, 0, 3, 3], np.int32), np.array([6, 0, 1, 5], np.int32)
    cpu.copy_bytes(source, sources, target, targets)
    assert (target[targets] == source[sources]).all()
    assert not target[[2, 3, 4]].any()
    cpu.copy_bytes(source, sources[:0], target, targets[:0])


def test_blocks_that_begin_anywhere_in_memory_move_too() -> None:
    memory = np.zeros(4 * 128 + 1, dtype=np.uint8)
    source, target = np.full((4, 128), 7, dtype=np.uint8), memory[1:].reshape(4, 128)
    cpu.copy_bytes(source, np.array([1], np.int32), target, np.array([2], np.int32))
    assert (target[2] == 7).all()
    assert memory.sum() == 7 * 128


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(1, 8, 8), (33, 100, 200), (97, 256, 32), (70, 900, 136), (40, 1300, 1024)],
)
def test_packed_codes_equal_their_float_twin_row_by_row(
    backend: CpuBackend,
    out_features: int,
    in_features: int,
    group_size: int,
    symmetric: bool,
    bits: int,
    x_dtype: torch.dtype,
) -> None:
    torch.manual_seed(16)
    groups = -(-in_features // group_size)
    zeros = torch.full((out_features, groups), 2.0 ** (bits - 1))
    if not symmetric:
        zeros = torch.randint(2**bits + 1, (out_features, groups)).float()
    weight = QuantizedWeight(
        codes=torch.randint(2**bits, (out_features, in_features), dtype=torch.uint8),
        scales=torch.rand(out_features, groups) / 2**bits / in_features**0.5,
        zeros=zeros,
        group_size=group_size,
        bits=bits,
    )
    bias, x = torch.randn(out_features), torch.randn(150, in_features).to(x_dtype)
    packed = backend.pack_quantized(weight, bias)
    out = backend.linear(x, packed)
    expected = x.float() @ weight.dequantized().T + bias
    assert_near(out, expected.to(x_dtype))
    for rows in ([3], [0, 1], list(range(17)), list(range(70, 140))):
        assert torch.equal(backend.linear(x[rows], packed), out[rows]), rows


def test_packed_codes_take_their_bits_and_scales_and_no_more(backend: CpuBackend) -> None:
    codes, scales = torch.zeros(256, 1024, dtype=torch.uint8), torch.ones(256, 8)
    symmetric = backend.pack_quantized(QuantizedWeight(codes, scales, scales * 8, 128, 4))
    assert symmetric.num_bytes == 256 * 1024 // 2 + 256 * 8 * 4
    assert backend.pack_linear(torch.zeros(256, 1024)).num_bytes == 256 * 1024 * 4


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
