"""The plain-torch backend: runs on any device, and is what every other backend is tested against.

Gathers paged K/V into dense tensors and calls torch's attention. With `deterministic`, every
result depends only on its own row: products run in tiles of a fixed number of rows, attention
over splits of a fixed length, so batch, chunk and row count cannot change a bit.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import block_copy, sampling
from .backend import LinearWeight
from .metadata import AttentionMetadata
from .quantized_weight import QuantizedWeight

ROW_TILE = 16  # rows of one product in deterministic mode
QUERY_TILE = 16  # queries of one attention tile in deterministic mode
KV_SPLIT = 256  # keys of one attention split in deterministic mode
_LOWEST = -1e30  # below every score


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """weight [out_features, in_features] and bias [out_features] as torch likes them."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        parts = (self.weight, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of products of queries and keys; see `KernelBackend.attention`."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """The scaled scores, soft-capped where they are to be."""
        if self.soft_cap is None:
            return scores
        return torch.tanh(scores / self.soft_cap) * self.soft_cap

    def hidden(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Which positions `keys` [K] a query at `queries` [Q] does not see: bool [Q, K]."""
        hidden = keys > queries[:, None]
        if self.window is not None:
            hidden |= keys <= queries[:, None] - self.window
        return hidden


class ReferenceBackend:
    """`KernelBackend` in plain torch."""

    name = "reference"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """Keep the tensor itself: a tied embedding stays one tensor."""
        return TorchLinear(weight, bias, weight.shape[0], weight.shape[1])

    def pack_table(self, table: Tensor) -> Tensor:
        return table

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> LinearWeight:
        """As the float32 values that it stands for."""
        return self.pack_linear(weight.dequantized(), bias)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight, TorchLinear), f"packed by another backend: {type(weight)}"
        if not self.deterministic:
            return F.linear(x, weight.weight, weight.bias)
        return _tiled_linear(x, weight)

    def embedding(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        assert isinstance(weight, TorchLinear), f"packed by another backend: {type(weight)}"
        return F.embedding(token_ids, weight.weight).to(dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        cos, sin = cos_sin[metadata.positions].unsqueeze(1).chunk(2, dim=-1)
        block_size = kv_layer.shape[2]
        blocks, offsets = metadata.slots // block_size, metadata.slots % block_size
        kv_layer[blocks, 0, offsets] = stored(rotate(k, cos, sin), kv_layer.dtype)
        kv_layer[blocks, 1, offsets] = stored(v, kv_layer.dtype)
        return rotate(q, cos, sin)

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        scores = Scores(scale, window, soft_cap)
        first = 0 if self.deterministic else metadata.num_decodes
        if first > 0:
            out[:first] = _attend_decodes(q[:first], kv_layer, metadata, scores)
        starts = metadata.query_starts.tolist()
        context_lens = metadata.context_lens.tolist()
        attend = _attend_in_splits if self.deterministic else _attend_prefill
        for index in range(first, len(context_lens)):
            begin, end = starts[index], starts[index + 1]
            k, v = _gather(kv_layer, metadata.block_tables[index], context_lens[index], q.dtype)
            out[begin:end] = attend(q[begin:end], k, v, scores)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def filtered_weights(self, logits: Tensor, params: sampling.DrawParams) -> Tensor:
        return sampling.filtered_weights(logits, params)

    def copy_slots(self, pool: Tensor, sources: Tensor, targets: Tensor, num_slots: Tensor) -> None:
        block_copy.copy_slots(pool, sources, targets, num_slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over half-split pairs; dimensions past the rotary ones pass through.

    x: [T, heads, head_dim]; cos, sin: float32 [T, 1, rotary_dim / 2].
    """
    half = cos.shape[-1]
    wide = x.float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]]
    return torch.cat(parts, dim=-1).to(x.dtype)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` holds it. What a narrower float has no number for is the nearest that
    it has, not infinite."""
    if dtype.itemsize < x.dtype.itemsize:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _gather(
    kv_layer: Tensor, table: Tensor, context_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, each [context_len, num_kv_heads, head_dim]: no slot beyond it."""
    block_size = kv_layer.shape[2]
    blocks = table[: -(-context_len // block_size)]
    k = kv_layer[:, 0].index_select(0, blocks).flatten(0, 1)[:context_len]
    v = kv_layer[:, 1].index_select(0, blocks).flatten(0, 1)[:context_len]
    return k.to(dtype), v.to(dtype)


def _attend_decodes(
    q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, scores: Scores
) -> Tensor:
    """All sequences of one query at once, padded to the longest; the heads of a group are
    given to torch as queries, which needs no copy of K/V per head."""
    num_decodes, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_layer.shape[2:4]
    context_lens = metadata.context_lens[:num_decodes].to(torch.int64)
    num_blocks = -(-int(context_lens.max()) // block_size)
    needed = -(-context_lens // block_size)
    tables = metadata.block_tables[:num_decodes, :num_blocks].to(torch.int64)
    # Entries past a table's end may hold anything: read its first block there instead.
    inside = torch.arange(num_blocks, device=q.device) < needed[:, None]
    blocks = torch.where(inside, tables, tables[:, :1]).flatten()
    positions = torch.arange(num_blocks * block_size, device=q.device)
    hidden = scores.hidden(positions, context_lens - 1)
    shape = (num_decodes, num_blocks * block_size, num_kv_heads, head_dim)
    dense: list[Tensor] = []
    for part in (0, 1):
        gathered = kv_layer[:, part].index_select(0, blocks).view(shape).to(q.dtype)
        # A mask alone would let NaN through.
        gathered.masked_fill_(hidden[:, :, None, None], 0)
        dense.append(gathered.transpose(1, 2))
    grouped = q.view(num_decodes, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = _attend(grouped, dense[0], dense[1], ~hidden[:, None, None, :], scores)
    return out.reshape(num_decodes, num_heads, head_dim)


def _attend_prefill(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Causal attention of one sequence's last len(q) tokens over its whole context."""
    num_queries, num_heads, head_dim = q.shape
    if scores.window is not None:
        # What no query sees may hold anything.
        visible = min(len(k), num_queries + scores.window - 1)
        k, v = k[-visible:], v[-visible:]
    context_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, group, context_len, head_dim)
    keys = k.permute(1, 0, 2).unsqueeze(1).expand(shape)
    values = v.permute(1, 0, 2).unsqueeze(1).expand(shape)
    mask = None
    if num_queries != context_len or scores.window is not None:
        positions = torch.arange(context_len, device=q.device)
        mask = ~scores.hidden(positions, positions[context_len - num_queries :])
    out = _attend(grouped, keys, values, mask, scores)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """torch's attention, written out where scores are soft-capped. mask: True = seen,
    None = causal over as many queries as keys."""
    if scores.soft_cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale
        )
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    products = scores.capped(q.float() @ k.float().transpose(-1, -2) * scores.scale)
    weights = products.masked_fill_(~mask, float("-inf")).softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def _attend_in_splits(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """As `_attend_prefill`, by tiles of QUERY_TILE queries over splits of KV_SPLIT keys whose
    shapes never change; a split that a query does not see leaves its sums bitwise as they were."""
    num_queries, num_heads, head_dim = q.shape
    context_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    padded_len = -(-context_len // KV_SPLIT) * KV_SPLIT
    padding = (0, 0, 0, 0, 0, padded_len - context_len)
    keys = F.pad(k.float(), padding).permute(1, 2, 0)
    values = F.pad(v.float(), padding).permute(1, 0, 2)
    if scores.window is not None:
        # What no query sees may hold anything, and a product with zero lets NaN through.
        unseen = max(0, context_len - num_queries - scores.window + 1)
        keys[:, :, :unseen], values[:, :unseen] = 0.0, 0.0
    out = torch.empty_like(q)
    for begin in range(0, num_queries, QUERY_TILE):
        tile = q[begin : begin + QUERY_TILE]
        length = tile.shape[0]
        tile = F.pad(tile.float() * scores.scale, (0, 0, 0, 0, 0, QUERY_TILE - length))
        grouped = tile.view(QUERY_TILE, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        # Padded queries stand at the last position: they see something, so no row is empty.
        offsets = torch.arange(begin, begin + QUERY_TILE, device=q.device)
        positions = (offsets + context_len - num_queries).clamp_(max=context_len - 1)
        rows = positions.repeat(group)
        attended = _attend_tile(grouped.flatten(1, 2), keys, values, rows, scores)
        attended = attended.view(num_kv_heads, group, QUERY_TILE, head_dim).permute(2, 0, 1, 3)
        out[begin : begin + length] = attended.reshape(QUERY_TILE, num_heads, -1)[:length]
    return out


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scores: Scores
) -> Tensor:
    """Online softmax over the splits from the first visible one to the last.

    q: float32 [num_kv_heads, rows, head_dim], already scaled; keys: [num_kv_heads, head_dim, L];
    values: [num_kv_heads, L, head_dim]; positions: int64 [rows], the last key each row sees.
    """
    peak = q.new_full((*q.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(peak)
    out = torch.zeros_like(q)
    split = torch.arange(KV_SPLIT, device=q.device)
    first = 0 if scores.window is None else max(0, int(positions.min()) - scores.window + 1)
    for start in range(first // KV_SPLIT * KV_SPLIT, int(positions.max()) + 1, KV_SPLIT):
        products = scores.capped(torch.bmm(q, keys[:, :, start : start + KV_SPLIT].contiguous()))
        products.masked_fill_(scores.hidden(split + start, positions), float("-inf"))
        # Finite even for a row that sees nothing of its first splits.
        new_peak = torch.maximum(peak, products.amax(-1, keepdim=True)).clamp_(min=_LOWEST)
        weights = torch.exp(products - new_peak)
        fade = torch.exp(peak - new_peak)
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + torch.bmm(weights, values[:, start : start + KV_SPLIT].contiguous())
        peak = new_peak
    return out / total


def _tiled_linear(x: Tensor, weight: TorchLinear) -> Tensor:
    """Every product has ROW_TILE rows, so a row's sum does not depend on its neighbours."""
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    tiles = [F.linear(tile, weight.weight, weight.bias) for tile in padded.split(ROW_TILE)]
    return torch.cat(tiles)[:num_rows]
