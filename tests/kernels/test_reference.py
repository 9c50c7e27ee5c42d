"""The plain-torch backend against formulas written out, on pools full of junk."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefleet.kernels import block_copy, cpu, cpu_library
from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.kernels.reference import ReferenceBackend, rotate

SHAPES = [(1, 1, 8), (4, 4, 16), (4, 2, 32), (8, 2, 64), (9, 3, 64), (8, 1, 128)]


def make_metadata(
    block_size: int, context_lens: list[int], query_lens: list[int], num_blocks: int, seed: int = 0
) -> AttentionMetadata:
    """Block tables in random order; entries past a sequence's blocks point outside the pool."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_blocks)
    needed = [-(-length // block_size) for length in context_lens]
    tables = np.full((len(context_lens), max(needed) + 2), 1_000_000, dtype=np.int32)
    taken = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    pairs = zip(context_lens, query_lens, strict=True)
    positions = np.concatenate([np.arange(c - q, c) for c, q in pairs])
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    leading = [q == 1 for q in query_lens]
    return AttentionMetadata(
        query_starts=torch.from_numpy(starts),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots + positions % block_size),
        num_decodes=leading.index(False) if False in leading else len(leading),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


def fill_cache(
    metadata: AttentionMetadata, num_blocks: int, block_size: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One layer of a pool that is NaN but for the sequences' slots; and their dense K, V."""
    pool = torch.full((num_blocks, 3, 2, block_size, kv_heads, head_dim), float("nan"))
    layer = pool[:, 1]
    dense: list[tuple[Tensor, Tensor]] = []
    for row, length in enumerate(metadata.context_lens.tolist()):
        k, v = torch.randn(length, kv_heads, head_dim), torch.randn(length, kv_heads, head_dim)
        blocks = metadata.block_tables[row, torch.arange(length) // block_size].long()
        layer[blocks, 0, torch.arange(length) % block_size] = k
        layer[blocks, 1, torch.arange(length) % block_size] = v
        dense.append((k, v))
    return layer, dense


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """Softmax attention of the last len(q) positions, head by head, in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        scores = q[:, head].double() @ keys.T / math.sqrt(q.shape[2])
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = torch.ones(scores.shape, dtype=torch.bool).triu(len(k) - len(q) + 1)
        if window is not None:
            hidden |= torch.ones(scores.shape, dtype=torch.bool).tril(len(k) - len(q) - window)
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    return out.float()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_attention_over_scattered_blocks_with_junk_equals_dense(
    num_heads: int, kv_heads: int, head_dim: int, block_size: int, deterministic: bool
) -> None:
    torch.manual_seed(1)
    context_lens, query_lens = [1, 33, 7, 300, 19, 16, 5], [1, 1, 1, 1, 17, 16, 2]
    num_blocks = sum(-(-length // block_size) for length in context_lens) + 3
    metadata = make_metadata(block_size, context_lens, query_lens, num_blocks)
    layer, dense = fill_cache(metadata, num_blocks, block_size, kv_heads, head_dim)
    q = torch.randn(sum(query_lens), num_heads, head_dim)
    out = ReferenceBackend(deterministic).attention(q, layer, metadata, head_dim**-0.5)
    starts = metadata.query_starts.tolist()
    for row, (k, v) in enumerate(dense):
        part = slice(starts[row], starts[row + 1])
        torch.testing.assert_close(out[part], dense_attention(q[part], k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "deterministic", "cpu"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 6, 40, 290, 301])
def test_attention_with_window_and_soft_cap_equals_dense(
    window: int | None, soft_cap: float | None, name: str
) -> None:
    if name == "cpu" and not cpu_library.is_available():
        pytest.skip("the compiled kernels were not built")
    torch.manual_seed(6)
    context_lens, query_lens = [1, 33, 300, 19, 16, 600, 5], [1, 1, 1, 17, 16, 290, 2]
    metadata = make_metadata(4, context_lens, query_lens, 250)
    layer, dense = fill_cache(metadata, 250, 4, 2, 16)
    q = 3 * torch.randn(sum(query_lens), 4, 16)
    backend = cpu.CpuBackend() if name == "cpu" else ReferenceBackend(name == "deterministic")
    starts = metadata.query_starts.tolist()
    for row, length in enumerate(context_lens):
        # Slots that no query sees any more may be anything.
        unseen = 0 if window is None else max(0, length - query_lens[row] - window + 1)
        blocks = metadata.block_tables[row, torch.arange(unseen) // 4].long()
        layer[blocks, :, torch.arange(unseen) % 4] = float("nan")
    out = backend.attention(q, layer, metadata, 0.25, window, soft_cap)
    for row, (k, v) in enumerate(dense):
        part = slice(starts[row], starts[row + 1])
        expected = dense_attention(q[part], k, v, window, soft_cap)
        torch.testing.assert_close(out[part], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (30, 2.0)])
def test_deterministic_attention_does_not_depend_on_chunk_or_batch(
    window: int | None, soft_cap: float | None
) -> None:
    torch.manual_seed(2)
    backend, block_size, length = ReferenceBackend(deterministic=True), 16, 600
    whole = make_metadata(block_size, [length], [length], 40)
    layer, _ = fill_cache(whole, 40, block_size, 2, 32)
    q = torch.randn(length, 4, 32)
    expected = backend.attention(q, layer, whole, 0.2, window, soft_cap)
    for begin, end in [(0, 1), (0, 7), (7, 300), (300, 301), (255, 257), (599, 600)]:
        chunk = make_metadata(block_size, [end], [end - begin], 40)
        chunk.block_tables[0, : -(-end // block_size)] = whole.block_tables[
            0, : -(-end // block_size)
        ]
        out = backend.attention(q[begin:end], layer, chunk, 0.2, window, soft_cap)
        assert torch.equal(out, expected[begin:end]), f"positions {begin}..{end} differ"


@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (172, 64), (576, 960)])
def test_deterministic_products_do_not_depend_on_the_number_of_rows(
    in_features: int, out_features: int
) -> None:
    torch.manual_seed(3)
    backend = ReferenceBackend(deterministic=True)
    weight = backend.pack_linear(
        torch.randn(out_features, in_features), bias=torch.randn(out_features)
    )
    x = torch.randn(70, in_features)
    expected = backend.linear(x, weight)
    for rows in [[3], [0, 1], list(range(17)), [69, 5, 33]]:
        assert torch.equal(backend.linear(x[rows], weight), expected[rows])


@pytest.mark.parametrize("rotary_dim", [0, 4, 6])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_dimensions_past_the_rotary_ones_pass_through(name: str, rotary_dim: int) -> None:
    if name == "cpu" and not cpu_library.is_available():
        pytest.skip("the compiled kernels were not built")
    torch.manual_seed(7)
    metadata = make_metadata(4, [6, 9], [1, 3], 6)
    pool = torch.zeros(6, 1, 2, 4, 2, 8)
    angles = torch.outer(torch.arange(16.0), torch.rand(rotary_dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q, k, v = torch.randn(4, 8, 8).split([4, 2, 2], dim=1)
    backend = cpu.CpuBackend() if name == "cpu" else ReferenceBackend()
    out = backend.rope_and_cache(q, k, v, cos_sin, pool[:, 0], metadata)
    keys = pool[:, 0].transpose(1, 2).reshape(24, 2, 2, 8)[metadata.slots, 0]
    for turned, x in ((out, q), (keys, k)):
        assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
        pairs = (y[..., :rotary_dim].unflatten(-1, (2, -1)).square().sum(-2) for y in (turned, x))
        torch.testing.assert_close(*pairs)


def test_rope_and_cache_writes_only_its_slots() -> None:
    torch.manual_seed(4)
    metadata = make_metadata(4, [6, 9], [1, 3], 6)
    pool = torch.full((6, 1, 2, 4, 2, 8), 7.0)
    angles = torch.outer(torch.arange(16.0), torch.rand(4))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    fused = torch.randn(4, 8, 8)
    q, k, v = fused.split([4, 2, 2], dim=1)
    out = ReferenceBackend().rope_and_cache(q, k, v, cos_sin, pool[:, 0], metadata)
    flat = pool[:, 0].transpose(1, 2).reshape(24, 2, 2, 8)
    cos, sin = cos_sin[metadata.positions].unsqueeze(1).chunk(2, -1)
    torch.testing.assert_close(flat[metadata.slots, 0], rotate(k, cos, sin))
    assert torch.equal(flat[metadata.slots, 1], v)
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[metadata.slots] = False
    assert (flat[untouched] == 7.0).all()
    half_turned = torch.cat([-q[..., 4:], q[..., :4]], -1)
    expected = q * torch.cat([cos, cos], -1) + half_turned * torch.cat([sin, sin], -1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_activation_equal_their_formulas(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    backend = ReferenceBackend()
    x, residual = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype)
    weight = torch.rand(40).to(dtype)
    total = x.float() + residual.float()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
    out = backend.add_rms_norm(x, residual, weight, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual.float(), total, rtol=tolerance, atol=tolerance)
    gate, up = x.float().chunk(2, -1)
    activated = backend.silu_and_mul(x).float()
    torch.testing.assert_close(
        activated, gate * torch.sigmoid(gate) * up, rtol=tolerance, atol=tolerance
    )
    bent = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(
        backend.gelu_tanh_and_mul(x).float(), bent * up, rtol=tolerance, atol=tolerance
    )


def test_copy_on_write_copies_the_valid_slots_of_all_layers_alone() -> None:
    pool = torch.randn(5, 3, 2, 4, 2, 8)
    before = pool.clone()
    ReferenceBackend().copy_slots(
        pool, torch.tensor([0, 3]), torch.tensor([4, 1]), torch.tensor([3, 1])
    )
    assert torch.equal(pool[4, :, :, :3], before[0, :, :, :3])
    assert torch.equal(pool[4, :, :, 3:], before[4, :, :, 3:])
    assert torch.equal(pool[1, :, :, :1], before[3, :, :, :1])
    assert torch.equal(pool[1, :, :, 1:], before[1, :, :, 1:])
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize(
    ("sources", "targets", "runs"),
    [
        ([], [], []),
        ([3], [9], [(3, 9, 1)]),
        ([3, 4, 5], [9, 10, 11], [(3, 9, 3)]),
        ([3, 4, 5], [9, 11, 12], [(3, 9, 1), (4, 11, 2)]),
        ([5, 4, 3], [1, 2, 3], [(5, 1, 1), (4, 2, 1), (3, 3, 1)]),
    ],
)
def test_adjacent_ids_become_one_run(
    sources: list[int], targets: list[int], runs: list[tuple[int, int, int]]
) -> None:
    pair = np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32)
    assert list(block_copy.coalesce(*pair)) == runs


def test_whole_blocks_move_between_pools_as_tensors_and_as_bytes() -> None:
    source, ids, places = torch.randn(6, 8), np.array([1, 2, 5]), np.array([0, 1, 3])
    by_tensor, by_bytes = torch.zeros(4, 8), torch.zeros(4, 8)
    block_copy.copy_blocks(source, ids, by_tensor, places)
    block_copy.copy_bytes(
        source.view(torch.uint8).numpy(), ids, by_bytes.view(torch.uint8).numpy(), places
    )
    assert torch.equal(by_tensor, by_bytes)
    assert torch.equal(by_tensor[[0, 1, 3]], source[[1, 2, 5]])
    assert (by_tensor[2] == 0).all()
