"""The draw against published vectors and counted frequencies; filters against their definitions."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefleet.kernels import sampling


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)[:, None]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known answers of the generator's authors.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert sampling.philox4x32(words(*counter), words(*key))[:, 0].tolist() == list(expected)


def uniforms(seeds: list[int], indices: list[int], positions: list[int]) -> list[float]:
    found = sampling.uniforms(
        np.array(seeds, dtype=np.uint64),
        np.array(indices, dtype=np.int64),
        np.array(positions, dtype=np.int64),
    )
    assert found.dtype == np.float32
    return found.tolist()


def test_uniforms_are_golden() -> None:
    seeds, indices, positions = [0, 7, 2**64 - 1, 7], [0, 0, 3, 1], [0, 17, 2**33, 17]
    bits = [int(value * 2**24) for value in uniforms(seeds, indices, positions)]
    assert bits == [0x6627E8, 0x8DE9A8, 0x4701AE, 0x69B018]


def test_uniforms_do_not_depend_on_their_batch() -> None:
    together = uniforms([5, 5, 6, 5], [0, 1, 0, 0], [9, 9, 9, 10])
    assert together == [
        uniforms([seed], [index], [position])[0]
        for seed, index, position in [(5, 0, 9), (5, 1, 9), (6, 0, 9), (5, 0, 10)]
    ]
    assert len(set(together)) == 4
    assert all(0.0 <= value < 1.0 for value in together)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000])
def test_draw_is_the_inverse_cdf_in_id_order(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(64, vocab_size, generator=generator) + 0.01
    weights[:, ::3] = 0.0
    weights[:, -1] = 0.5
    values = torch.rand(64, generator=generator)
    found = sampling.draw(weights, values)
    cdf = weights.double().cumsum(-1)
    cdf /= cdf[:, -1:].clone()
    for row, token in enumerate(found.tolist()):
        below = cdf[row, token - 1] if token > 0 else 0.0
        assert weights[row, token] > 0
        assert below - 1e-6 <= values[row] <= cdf[row, token] + 1e-6


def test_draw_never_leaves_what_is_kept() -> None:
    weights = torch.zeros(3, 700)
    weights[0, 699], weights[1, 0], weights[2, 300] = 1.0, 1e-30, 0.25
    for value in (0.0, 0.5, 1.0 - 2.0**-24):
        assert sampling.draw(weights, torch.full((3,), value)).tolist() == [699, 0, 300]


def test_draw_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]]).expand(20_000, 5)
    count = len(logits)
    params = sampling.DrawParams(
        temperature=torch.full((count,), 0.7),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        uniforms=torch.from_numpy(
            sampling.uniforms(
                np.full(count, 11, dtype=np.uint64),
                np.zeros(count, dtype=np.int64),
                np.arange(count, dtype=np.int64),
            )
        ),
    )
    shares = torch.bincount(sampling.sample(logits, params), minlength=5) / count
    torch.testing.assert_close(shares, (logits[0] / 0.7).softmax(-1), atol=0.015, rtol=0.0)


def test_filters_by_rank_leave_what_filters_by_border_leave() -> None:
    """What a GPU does without asking it, and what the CPU does."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(40, 300, generator=generator).pow(4)
    weights[20:] = (weights[20:] * 8).round() / 8 + 1e-3  # many equals
    weights /= weights.amax(-1, keepdim=True)
    params = sampling.DrawParams(
        temperature=torch.ones(40),
        top_k=torch.tensor([0, 1, 7, 300, 400] * 8),
        top_p=torch.tensor([1.0, 0.01, 0.5, 0.9] * 10),
        min_p=torch.tensor([0.0, 0.0, 0.2] * 13 + [1.0]),
        uniforms=torch.zeros(40),
    )
    kept_by_rank = sampling.kept_by_rank(weights, params)
    sampling.apply_filters(weights, params.top_k, params.top_p, params.min_p)
    assert torch.equal(kept_by_rank, weights > 0)


def kept(
    weights: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[list[int]]:
    """Ids that the filters leave, by row."""
    count = len(weights)
    filtered = weights.clone()
    sampling.apply_filters(
        filtered,
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
    )
    left = filtered > 0
    assert torch.equal(filtered[left], weights[left])
    return [row.nonzero().flatten().tolist() for row in left]


def test_each_filter_keeps_what_it_says() -> None:
    weights = torch.tensor([[0.5, 0.1, 1.0, 0.05, 0.25]])
    assert kept(weights, top_k=2) == [[0, 2]]
    assert kept(weights, top_k=99) == [[0, 1, 2, 3, 4]]
    # Shares: 0.263, 0.053, 0.526, 0.026, 0.132.
    assert kept(weights, top_p=0.5) == [[2]]
    assert kept(weights, top_p=0.6) == [[0, 2]]
    assert kept(weights, top_p=0.9) == [[0, 2, 4]]
    assert kept(weights, top_p=1e-9) == [[2]]
    assert kept(weights, min_p=0.25) == [[0, 2, 4]]
    assert kept(weights, min_p=1.0) == [[2]]
    # top_p looks at what top_k kept: 1.0 of 1.5 is below 0.7, both stay.
    assert kept(weights, top_k=2, top_p=0.66) == [[2]]
    assert kept(weights, top_k=2, top_p=0.7) == [[0, 2]]
    assert kept(weights, top_k=3, min_p=0.5) == [[0, 2]]


def test_of_equal_weights_the_lowest_ids_stay() -> None:
    assert kept(torch.ones(1, 5), top_k=2) == [[0, 1]]
    assert kept(torch.ones(1, 5), top_p=0.5) == [[0, 1, 2]]
    assert kept(torch.tensor([[0.5, 1.0, 0.5, 0.5]]), top_k=3) == [[0, 1, 2]]
    assert kept(torch.ones(1, 2000), top_k=300) == [list(range(300))]
    assert kept(torch.ones(1, 2000), top_p=0.5) == [list(range(1000))]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.3), (0, 0.999), (7, 1.0), (600, 0.9)])
def test_filters_equal_a_full_sort_on_long_rows(top_k: int, top_p: float) -> None:
    weights = torch.randn(5, 3000, generator=torch.Generator().manual_seed(6)).mul(2).exp()
    ordered, ids = weights.sort(descending=True, stable=True)
    if top_k > 0:
        ordered[:, top_k:] = 0.0
    before = ordered.double().cumsum(-1) - ordered
    stays = (before < top_p * ordered.double().sum(-1, keepdim=True)) & (ordered > 0)
    expected = [sorted(ids[row][stays[row]].tolist()) for row in range(5)]
    assert kept(weights, top_k=top_k, top_p=top_p) == expected


def test_rows_are_filtered_each_by_their_own() -> None:
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(8))
    together = weights.clone()
    top_k, top_p = torch.tensor([0, 3, 0, 9]), torch.tensor([1.0, 1.0, 0.4, 0.5])
    sampling.apply_filters(together, top_k, top_p, torch.tensor([0.0, 0.0, 0.0, 0.9]))
    for row in range(4):
        alone = weights[row : row + 1].clone()
        sampling.apply_filters(
            alone,
            top_k[row : row + 1],
            top_p[row : row + 1],
            torch.tensor([0.9 if row == 3 else 0.0]),
        )
        assert torch.equal(together[row], alone[0])
    assert torch.equal(together[0], weights[0])


@pytest.mark.parametrize("temperature", [1e-9, 1e-4, 1.0, 1e30, math.inf])
def test_absurd_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, -1e30, float("-inf"), 2.0]])
    weights = sampling.softmax_weights(logits, torch.tensor([temperature]))
    assert torch.isfinite(weights).all()
    assert weights[0, 1] == 1.0
    assert weights[0, 3] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0], [0.0, float("-inf"), 3.0]])
    best, finite = sampling.greedy(logits.to(dtype))
    assert best.tolist() == [1, 0, 2]
    assert finite.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tells_rows_that_cannot_be_used(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 70)
    logits[0, 66], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    assert sampling.greedy(logits.to(dtype))[1].tolist() == [False, False, False, True]


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0], [2.0, -2.0, 1.0, 0.5, 3.0]])
    plain = logits.clone()
    # Row 0: prompt 0 1, output 2 2 3; row 1: prompt 4; what follows is padding and must not count.
    tokens = torch.tensor([[0, 1, 2, 2, 3], [4, 0, 0, 0, 0]])
    sampling.apply_penalties(
        logits,
        sampling.PenaltyParams(
            token_ids=tokens,
            prompt_lens=torch.tensor([2, 1]),
            lens=torch.tensor([5, 1]),
            repetition=torch.tensor([2.0, 1.0]),
            presence=torch.tensor([0.25, 9.0]),
            frequency=torch.tensor([0.5, 9.0]),
        ),
    )
    expected = [1.0, -4.0, 0.5 - 2 * 0.5 - 0.25, 0.25 - 0.5 - 0.25, 3.0]
    torch.testing.assert_close(logits[0], torch.tensor(expected))
    assert torch.equal(logits[1], plain[1])


def test_bias_and_forbidden_ids_touch_only_themselves() -> None:
    logits = torch.zeros(2, 4)
    rows, ids = torch.tensor([0, 1]), torch.tensor([3, 0])
    sampling.add_bias(logits, rows, ids, torch.tensor([2.5, -100.0]))
    sampling.forbid(logits, torch.tensor([1]), torch.tensor([2]))
    assert logits.tolist() == [[0, 0, 0, 2.5], [-100, 0, float("-inf"), 0]]


def test_logprobs_are_finite_and_ranked() -> None:
    logits = torch.tensor([[1.0, 3.0, float("-inf"), 2.0, float("nan")][:4]])
    found = sampling.logprobs(logits, torch.tensor([2]), num_top=9)
    assert found.chosen.tolist() == [sampling.LOWEST_LOGPROB]
    assert found.ranks.tolist() == [4]
    assert found.top_ids[0, :3].tolist() == [1, 3, 0]
    torch.testing.assert_close(found.top[0, :3], logits[0].log_softmax(-1)[[1, 3, 0]])
    assert found.top[0, 3] == sampling.LOWEST_LOGPROB
    broken = sampling.logprobs(torch.full((1, 4), float("nan")), torch.tensor([0]), num_top=2)
    assert torch.isfinite(broken.chosen).all()
    assert torch.isfinite(broken.top).all()


def test_penalties_and_draws_do_not_depend_on_how_rows_are_cut_into_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(7, 400, generator=generator)
    penalties = sampling.PenaltyParams(
        token_ids=torch.randint(400, (7, 30), generator=generator),
        prompt_lens=torch.full((7,), 10),
        lens=torch.arange(12, 26, 2),
        repetition=torch.full((7,), 1.3),
        presence=torch.full((7,), 0.5),
        frequency=torch.full((7,), 0.25),
    )
    draws = sampling.DrawParams(
        temperature=torch.full((7,), 0.8),
        top_k=torch.tensor([0, 5, 0, 90, 0, 0, 1]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.8, 0.99, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
        uniforms=torch.rand(7, generator=generator),
    )
    found: list[list[int]] = []
    for piece in (1, 800, 2**18):
        monkeypatch.setattr(sampling, "_PIECE", piece)
        penalised = logits.clone()
        sampling.apply_penalties(penalised, penalties)
        found.append(sampling.sample(penalised, draws).tolist())
    assert found[0] == found[1] == found[2]
