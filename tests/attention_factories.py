"""Steps over a scattered paged cache, for tests of attention backends on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.kernels.metadata import AttentionMetadata

FAR_OUTSIDE = 1_000_000_000  # a block that no pool has: whoever reads it fails


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's heads are laid out."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step: where its tokens stand, a pool of which layer 1 holds the sequences, queries.

    pool: [num_blocks, 3, 2, block_size, num_kv_heads, head_dim], NaN wherever nothing was written.
    q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim], the step's own.
    """

    metadata: AttentionMetadata
    pool: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def layer(self) -> Tensor:
        """The middle layer's strided view."""
        return self.pool[:, 1]


def make_step(
    heads: Heads,
    block_size: int,
    context_lens: list[int],
    query_lens: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> PagedStep:
    """Sequences over blocks in random order, those of one query first; on `device` as if the step
    had been laid out there."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(needed), max(needed) + 2), FAR_OUTSIDE, dtype=torch.int32)
    for row, ids in enumerate(order[: sum(needed)].split(needed)):
        tables[row, : len(ids)] = ids
    pairs = list(zip(context_lens, query_lens, strict=True))
    positions = torch.cat([torch.arange(c - q, c) for c, q in pairs])
    rows = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(query_lens))
    blocks = tables[rows, positions // block_size].long()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        query_starts=starts.to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        positions=positions.to(device),
        slots=(blocks * block_size + positions % block_size).to(device),
        num_decodes=sum(q == 1 for q in query_lens),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    q, k, v = (
        torch.randn(sum(query_lens), count, heads.head_dim, generator=generator).to(dtype)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    pool = _fill(heads, block_size, context_lens, tables, num_blocks, generator)
    pool = pool.to(kv_dtype or dtype)
    return PagedStep(metadata, pool.to(device), q.to(device), k.to(device), v.to(device))


def _fill(
    heads: Heads,
    block_size: int,
    context_lens: list[int],
    tables: Tensor,
    num_blocks: int,
    generator: torch.Generator,
) -> Tensor:
    shape = (num_blocks, 3, 2, block_size, heads.num_kv_heads, heads.head_dim)
    pool = torch.full(shape, float("nan"))
    for row, length in enumerate(context_lens):
        at = torch.arange(length)
        values = torch.randn(2, length, heads.num_kv_heads, heads.head_dim, generator=generator)
        for part in (0, 1):
            pool[tables[row, at // block_size].long(), 1, part, at % block_size] = values[part]
    return pool


def make_cos_sin(num_positions: int, rotary_dim: int, device: str = "cpu") -> Tensor:
    """float32 [num_positions, rotary_dim], cosines then sines."""
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
