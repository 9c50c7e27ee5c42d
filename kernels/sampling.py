"""From logits to tokens: penalties, filters, the draw, log-probabilities. Plain torch.

The draw keeps no state: its uniform is a function of seed, sample index and token position, so
a sample repeats in any batch, after any interruption, wherever the logits repeat.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

DRAW_BLOCK = 256  # ids whose weights are summed together before the draw looks inside
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot carry

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_PIECE = 2**18  # weights handled at once on the CPU
_CANDIDATES = 64  # best weights in which top-p's border is looked for first
_HISTOGRAM_SHIFT = 20  # leaves sign, exponent and 3 bits of the mantissa
_MAXIMA_BLOCK = 32  # ids whose greatest weight stands for them in the search for the best
_COLDEST = 1e-6
_HOTTEST = 3.0e38
_LOG2_E = math.log2(math.e)
_TINY = 2.0**-126

UInt32Array = NDArray[np.uint32]


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Philox4x32-10 (Salmon et al., 2011). counter: uint32 [4, n]; key: uint32 [2, n] → [4, n]."""
    low32 = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = (word.astype(np.uint64) for word in key)
    for _ in range(_ROUNDS):
        product0 = c0 * np.uint64(_MULTIPLIERS[0])
        product1 = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k0,
            product1 & low32,
            (product0 >> shift) ^ c3 ^ k1,
            product0 & low32,
        )
        k0 = (k0 + np.uint64(_WEYL[0])) & low32
        k1 = (k1 + np.uint64(_WEYL[1])) & low32
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def uniforms(
    seeds: NDArray[np.uint64], sample_indices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """One uniform of [0, 1) per row, with 24 random bits.

    key = the seed's low and high word; counter = (position low, position high, sample index, 0);
    the uniform is made of the first word's upper 24 bits. position: where in its sequence
    (prompt and output) the token will stand.
    """
    low32 = np.int64(0xFFFFFFFF)
    zeros = np.zeros(len(seeds), dtype=np.uint32)
    counter = np.stack(
        [
            (positions & low32).astype(np.uint32),
            (positions >> np.int64(32)).astype(np.uint32),
            sample_indices.astype(np.uint32),
            zeros,
        ]
    )
    key = np.stack(
        [
            (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32),
            (seeds >> np.uint64(32)).astype(np.uint32),
        ]
    )
    bits = philox4x32(counter, key)[0] >> np.uint32(8)
    return bits.astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True)
class Limits:
    """Which filters any of the rows has; False spares asking the device."""

    top_k: bool = True
    top_p: bool = True
    min_p: bool = True


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each of n rows chooses among its logits. Every tensor is [n], on the logits' device.

    temperature: float32, above 0. top_k: int64, 0 = off. top_p, min_p: float32, 1 and 0 = off.
    uniforms: float32 in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    limits: Limits = Limits()

    def part(self, begin: int, end: int) -> "DrawParams":
        """Those of rows begin .. end-1."""
        return DrawParams(
            self.temperature[begin:end],
            self.top_k[begin:end],
            self.top_p[begin:end],
            self.min_p[begin:end],
            self.uniforms[begin:end],
            self.limits,
        )


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best id of each row, the lowest on ties, and whether its logit is finite.

    NaN and +inf win every comparison, and a row of -inf has nothing to choose, so the best logit
    tells whether the row can be used. logits: [n, vocab] → int64 [n], bool [n].
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # numpy's argmax is vectorised, torch's is not: 20 times faster on long rows.
        values = logits.numpy()
        best = values.argmax(axis=-1)
        finite = np.isfinite(values[np.arange(len(best)), best])
        return torch.from_numpy(best), torch.from_numpy(finite)
    best = logits.argmax(dim=-1)
    return best, logits.gather(1, best.unsqueeze(1)).flatten().isfinite()


def filtered_weights(logits: Tensor, params: DrawParams) -> Tensor:
    """What may be drawn after temperature and filters, and how likely: float32 [n, vocab]."""
    weights = softmax_weights(logits, params.temperature)
    if logits.device.type == "cpu":
        apply_filters(weights, params.top_k, params.top_p, params.min_p)
        return weights
    return weights * kept_by_rank(weights, params)


def kept_by_rank(weights: Tensor, params: DrawParams) -> Tensor:
    """What `apply_filters` would leave, as bool [n, vocab], without once waiting for the device: by
    each weight's place among its row's, which costs a sort."""
    if not (params.limits.top_k or params.limits.top_p or params.limits.min_p):
        return torch.ones_like(weights, dtype=torch.bool)
    # stable: of equal weights the lowest ids come first
    best, ids = weights.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(weights.shape[-1], device=weights.device)
    top_k = params.top_k.unsqueeze(1)
    kept = (places < top_k) | (top_k <= 0)
    above = (best * kept).cumsum(-1)
    target = params.top_p.unsqueeze(1) * above[:, -1:]
    before = F.pad(above[:, :-1], (1, 0))
    kept &= (before < target) | (params.top_p >= 1.0).unsqueeze(1)
    kept[:, 0] = True
    kept &= best >= params.min_p.clamp(max=1.0).unsqueeze(1) * best[:, :1]
    return torch.zeros_like(kept).scatter_(1, ids, kept)


Filter = Callable[[Tensor, DrawParams], Tensor]


def sample(logits: Tensor, params: DrawParams, filtered: Filter = filtered_weights) -> Tensor:
    """Draw one id per row: temperature, top-k, top-p, min-p, then inverse CDF in id order.

    logits: float32 [n, vocab], unchanged; → int64 [n]. filtered: `KernelBackend.filtered_weights`.
    """
    # On the CPU in pieces that stay in its cache.
    num_rows, vocab_size = logits.shape
    piece = max(1, _PIECE // vocab_size) if logits.device.type == "cpu" else num_rows
    drawn = [
        _sample_piece(logits[begin : begin + piece], params.part(begin, begin + piece), filtered)
        for begin in range(0, num_rows, piece)
    ]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _sample_piece(logits: Tensor, params: DrawParams, filtered: Filter) -> Tensor:
    return draw(filtered(logits, params), params.uniforms)


def softmax_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature): float32 [n, vocab], the best id's weight is 1.

    The sum is left out: no filter and no draw needs it to be one.
    """
    # A power of two takes a third of the time of a power of e.
    scale = _LOG2_E / temperature.clamp(_COLDEST, _HOTTEST).unsqueeze(1)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted.mul_(scale).exp2_()


def apply_filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to zero, in place, what the filters leave out; of equal weights the lowest ids stay.

    top_k first, top_p over what it kept, then min_p relative to the best.
    """
    limited = ((top_k > 0) & (top_k < weights.shape[-1])).nonzero().flatten()
    if len(limited) > 0:
        _on_rows(weights, limited, lambda part: _keep_top_k(part, top_k[limited]))
    bounded = (top_p < 1.0).nonzero().flatten()
    if len(bounded) > 0:
        _on_rows(weights, bounded, lambda part: _keep_top_p(part, top_p[bounded]))
    if bool((min_p > 0).any()):
        everyone = torch.full_like(min_p, weights.shape[-1]).to(torch.int64)
        _cut(weights, min_p.clamp(max=1.0).unsqueeze(1), everyone)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in id order. weights: float32 [n, vocab], not all 0 → int64 [n].

    Sums of DRAW_BLOCK ids first, then inside the block that the target falls in: the order of
    additions is fixed, and the vocabulary is not scanned one by one.
    """
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % DRAW_BLOCK)).view(num_rows, -1, DRAW_BLOCK)
    block_cdf = blocks.sum(-1).cumsum(-1)
    targets = uniforms.unsqueeze(1) * block_cdf[:, -1:]
    block = (block_cdf <= targets).sum(-1, keepdim=True)
    # u * total may round up to the total: the last block that weighs anything has it.
    last = (block_cdf < block_cdf[:, -1:]).sum(-1, keepdim=True)
    block = torch.minimum(block, last)
    before = block_cdf.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    index = block.unsqueeze(2).expand(-1, 1, DRAW_BLOCK)
    inner_cdf = blocks.gather(1, index).squeeze(1).cumsum(-1)
    inner = (inner_cdf <= targets - before).sum(-1, keepdim=True)
    last_inner = (inner_cdf < inner_cdf[:, -1:]).sum(-1, keepdim=True)
    return (block * DRAW_BLOCK + torch.minimum(inner, last_inner)).flatten()


@dataclass(frozen=True, slots=True)
class PenaltyParams:
    """What n rows have said so far and what repeating it costs; all on the logits' device.

    token_ids: int64 [n, longest], of which the first lens[i] count, the first prompt_lens[i] of
    them prompt. prompt_lens, lens: int64 [n]; the rest float32 [n].
    """

    token_ids: Tensor
    prompt_lens: Tensor
    lens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def part(self, begin: int, end: int) -> "PenaltyParams":
        """Those of rows begin .. end-1."""
        return PenaltyParams(
            self.token_ids[begin:end],
            self.prompt_lens[begin:end],
            self.lens[begin:end],
            self.repetition[begin:end],
            self.presence[begin:end],
            self.frequency[begin:end],
        )


def apply_penalties(logits: Tensor, params: PenaltyParams) -> None:
    """Repetition over prompt and output, presence and frequency over output, in place.

    logits: float32 [n, vocab].
    """
    num_rows, vocab_size = logits.shape
    piece = max(1, _PIECE // vocab_size)  # bounds the memory for counts on every device
    for begin in range(0, num_rows, piece):
        end = begin + piece
        _penalise_piece(logits[begin:end], params.part(begin, end))


def _penalise_piece(logits: Tensor, params: PenaltyParams) -> None:
    num_rows, vocab_size = logits.shape
    index = torch.arange(params.token_ids.shape[1], device=logits.device)
    is_known = index < params.lens[:, None]
    is_output = is_known & (index >= params.prompt_lens[:, None])
    # The last column takes what does not count.
    counts = torch.zeros(num_rows, vocab_size + 1, dtype=torch.float32, device=logits.device)
    counts.scatter_(1, torch.where(is_known, params.token_ids, vocab_size), 1.0)
    factor = params.repetition.unsqueeze(1)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(counts[:, :vocab_size] > 0, penalised, logits))
    counts.zero_()
    counts.scatter_add_(1, torch.where(is_output, params.token_ids, vocab_size), is_known.float())
    output_counts = counts[:, :vocab_size]
    logits.sub_(output_counts * params.frequency.unsqueeze(1))
    logits.sub_((output_counts > 0) * params.presence.unsqueeze(1))


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i], in place. int64 [m], int64 [m], float32 [m]."""
    logits.index_put_((rows, token_ids), values, accumulate=True)


def forbid(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """logits[rows[i], token_ids[i]] = -inf, in place. int64 [m] each."""
    logits[rows, token_ids] = float("-inf")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n positions, all finite.

    chosen: float32 [n]; ranks: int64 [n], from 1; top_ids: int64 [n, k]; top: float32 [n, k].
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Of the given ids and of the num_top best. logits: float32 [n, vocab]; ids: int64 [n]."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen_logits = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > chosen_logits).sum(-1) + 1
    top, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(_finite(chosen_logits - total).flatten(), ranks, top_ids, _finite(top - total))


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best ids and their scores, best first, ties to the lowest id; all finite.

    scores: float32 [vocab] → int64 [count], float32 [count]; fewer where the vocabulary is smaller.
    """
    scores = _finite(scores)
    border = scores.topk(min(count, len(scores))).values[-1]
    token_ids = (scores >= border).nonzero().flatten()  # ascending: the sort keeps equals so
    best = scores[token_ids].sort(descending=True, stable=True)
    return token_ids[best.indices[:count]], best.values[:count]


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp_(min=LOWEST_LOGPROB)


def _on_rows(weights: Tensor, rows: Tensor, change: Callable[[Tensor], None]) -> None:
    """Change these rows in place, without a copy where they are all rows."""
    if len(rows) == len(weights):
        change(weights)
        return
    part = weights[rows]
    change(part)
    weights[rows] = part


def _keep_top_k(weights: Tensor, top_k: Tensor) -> None:
    """Zero all but the best top_k[i] of each row, in place."""
    best = _largest(weights, int(top_k.max()))
    border = best.gather(1, (top_k - 1).unsqueeze(1))
    num_above = (best > border).sum(-1)
    _cut(weights, border, top_k - num_above)


def _keep_top_p(weights: Tensor, top_p: Tensor) -> None:
    """Zero, in place, all but the fewest best whose weight is top_p[i] of the row's."""
    targets = (top_p * weights.sum(-1)).unsqueeze(1)
    best = _largest(weights, min(_CANDIDATES, weights.shape[-1]))
    reached = best.cumsum(-1) >= targets
    border = best.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))
    flat = (~reached[:, -1]).nonzero().flatten()
    if len(flat) > 0:
        border[flat] = _border_of_flat(weights[flat], targets[flat])
    # Of equals at the border as many stay as their mass is needed.
    above = torch.relu(weights - border).sign_().mul_(weights).sum(-1, keepdim=True)
    num_equal = ((targets - above) / border.clamp(min=_TINY)).ceil().clamp_(1.0, 1e9)
    _cut(weights, border, num_equal.flatten().to(torch.int64))


def _largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, largest first: [n, count].

    They stand in the `count` blocks with the greatest maxima, so only those are searched.
    """
    num_rows, vocab_size = weights.shape
    if vocab_size < 4 * count * _MAXIMA_BLOCK:
        return weights.topk(count, dim=-1).values
    blocks = F.pad(weights, (0, -vocab_size % _MAXIMA_BLOCK)).view(num_rows, -1, _MAXIMA_BLOCK)
    chosen = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    index = chosen.unsqueeze(2).expand(-1, -1, _MAXIMA_BLOCK)
    return blocks.gather(1, index).flatten(1).topk(count, dim=-1).values


def _border_of_flat(weights: Tensor, targets: Tensor) -> Tensor:
    """The largest weight w of each row with sum(weights >= w) >= targets[i]: float32 [n, 1].

    For rows whose border is not among the candidates.
    """
    if weights.device.type == "cpu":
        pairs = zip(weights.numpy(), targets.flatten().tolist(), strict=True)
        return torch.tensor([[_border_by_histogram(row, target)] for row, target in pairs])
    ordered = weights.sort(dim=-1, descending=True).values
    reached = ordered.cumsum(-1) >= targets
    reached[:, -1] = True
    return ordered.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))


def _border_by_histogram(weights: NDArray[np.float32], target: float) -> float:
    """One row's border; a tenth of the time of a sort.

    The bits of non-negative floats order as integers: their upper ones make the histogram, and
    only the bin that the border falls in is sorted.
    """
    bins = weights.view(np.int32) >> _HISTOGRAM_SHIFT
    mass = np.bincount(bins, weights=weights)
    from_top = mass[::-1].cumsum()
    index = min(int(np.searchsorted(from_top, target)), len(mass) - 1)
    inside = np.sort(weights[bins == len(mass) - 1 - index])[::-1]
    above = from_top[index - 1] if index > 0 else 0.0
    reached = int(np.searchsorted(inside.cumsum(dtype=np.float64) + above, target))
    return float(inside[min(reached, len(inside) - 1)])


def _cut(weights: Tensor, border: Tensor, num_equal: Tensor) -> None:
    """Zero what is below border [n, 1], and of its equals all but the first num_equal [n]."""
    if weights.device.type == "cpu":
        # numpy's comparisons are vectorised, torch's are not.
        values = weights.numpy()
        num_at_border = torch.from_numpy(np.count_nonzero(values == border.numpy(), axis=-1))
        np.multiply(values, values >= border.numpy(), out=values)
    else:
        num_at_border = (weights == border).sum(-1)
        weights.masked_fill_(weights < border, 0.0)
    excess = num_at_border - num_equal
    for row in (excess > 0).nonzero().flatten().tolist():
        equal_ids = (weights[row] == border[row]).nonzero().flatten()
        weights[row, equal_ids[-int(excess[row]) :]] = 0.0
