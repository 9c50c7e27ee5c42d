"""From logits to tokens: penalties, filters, the draw, log-probabilities. Plain torch.

The draw keeps no state: its uniform is a function of seed, sample index and token position, so
a sample repeats in any batch, after any interruption, wherever the logits repeat.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

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
# Candidates looked at for top-p before a row needs its whole vocabulary sorted.
_CANDIDATES = 256
_COLDEST = 1e-6
_HOTTEST = 3.0e38

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


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw one id per row: temperature, top-k, top-p, min-p, then inverse CDF in id order.

    logits: float32 [n, vocab], unchanged; → int64 [n].
    """
    weights = softmax_weights(logits, params.temperature)
    apply_filters(weights, params.top_k, params.top_p, params.min_p)
    return draw(weights, params.uniforms)


def softmax_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature): float32 [n, vocab], the best id's weight is 1.

    The sum is left out: no filter and no draw needs it to be one.
    """
    bounded = temperature.clamp(_COLDEST, _HOTTEST).unsqueeze(1)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted.div_(bounded).exp_()


def apply_filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to zero, in place, what the filters leave out; of equal weights the lowest ids stay.

    top_k first, top_p over what it kept, then min_p relative to the best.
    """
    vocab_size = weights.shape[-1]
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)
    rows = filtered.nonzero().flatten()
    if len(rows) > 0:
        chosen = weights if len(rows) == len(weights) else weights[rows]
        _keep_best(chosen, top_k[rows], top_p[rows])
        if chosen is not weights:
            weights[rows] = chosen
    if bool((min_p > 0).any()):
        weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0)


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


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Repetition over prompt and output, presence and frequency over output, in place.

    logits: float32 [n, vocab]; token_ids: int64 [n, longest], of which the first lens[i] count;
    prompt_lens, lens: int64 [n]; the rest float32 [n].
    """
    num_rows, vocab_size = logits.shape
    index = torch.arange(token_ids.shape[1], device=logits.device)
    known = index < lens[:, None]
    is_output = known & (index >= prompt_lens[:, None])
    counts = torch.zeros(num_rows, vocab_size + 1, dtype=torch.float32, device=logits.device)
    counts.scatter_(1, torch.where(known, token_ids, vocab_size), 1.0)
    seen = counts[:, :vocab_size] > 0
    factor = repetition.unsqueeze(1)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(seen, penalised, logits))
    counts.zero_()
    counts.scatter_add_(1, torch.where(is_output, token_ids, vocab_size), known.float())
    output_counts = counts[:, :vocab_size]
    logits.sub_(output_counts * frequency.unsqueeze(1))
    logits.sub_((output_counts > 0) * presence.unsqueeze(1))


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


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB).clamp_(min=LOWEST_LOGPROB)


def _keep_best(weights: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Zero all but the best of each row by count and by mass, in place."""
    vocab_size = weights.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    totals = weights.sum(-1)
    # One more than the most asked for shows whether a tie crosses the border.
    wanted = torch.where(top_k > 0, top_k + 1, _CANDIDATES)
    num_candidates = min(vocab_size, int(wanted.max()))
    best = weights.topk(num_candidates, dim=-1).values
    num_kept = _num_kept(best, limit, top_p, totals)
    # Neither limit reached among the candidates, or ties with what was left out: sort it all.
    border = best.gather(1, (num_kept - 1).unsqueeze(1))
    for row in (border.flatten() <= best[:, -1]).nonzero().flatten().tolist():
        _keep_best_sorted(weights[row], limit[row : row + 1], top_p[row : row + 1])
        border[row] = 0.0
    at_border = weights == border
    excess = (weights >= border).sum(-1) - num_kept
    tied = ((excess > 0) & (border.flatten() > 0)).nonzero().flatten().tolist()
    weights.masked_fill_(weights < border, 0.0)
    for row in tied:
        weights[row, at_border[row].nonzero().flatten()[-int(excess[row]) :]] = 0.0


def _num_kept(best: Tensor, limit: Tensor, top_p: Tensor, totals: Tensor) -> Tensor:
    """How many of the best (sorted weights [n, c]) top-k and top-p keep: int64 [n], at least 1."""
    cdf = best.cumsum(-1)
    num_candidates = best.shape[-1]
    last = (limit.clamp(max=num_candidates) - 1).unsqueeze(1)
    within_limit = cdf.gather(1, last).flatten()
    mass = torch.where(limit <= num_candidates, within_limit, totals)
    by_mass = (cdf - best < (top_p * mass).unsqueeze(1)).sum(-1)
    by_mass = torch.where(top_p < 1.0, by_mass, num_candidates)
    return torch.minimum(by_mass, limit).clamp_(1, num_candidates)


def _keep_best_sorted(weights: Tensor, limit: Tensor, top_p: Tensor) -> None:
    """One row [vocab] with its whole vocabulary in order of weight, then id; in place."""
    ordered, ids = weights.sort(descending=True, stable=True)
    totals = weights.sum(-1, keepdim=True)
    num_kept = int(_num_kept(ordered.unsqueeze(0), limit, top_p, totals))
    weights[ids[num_kept:]] = 0.0
