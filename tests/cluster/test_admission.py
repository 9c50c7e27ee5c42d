"""Lease sizes by class, and appointments."""

import pytest
from cluster_factories import make_request

from pagefleet.cluster.admission import (
    blocks_for,
    compute_need,
    least_blocks,
)
from pagefleet.cluster.forecast import OutputLengths, wait_for_blocks_s
from pagefleet.protos.messages import AdmissionClass


@pytest.mark.parametrize(
    ("tokens", "growth", "samples", "blocks"),
    [
        (16, 0, 1, 1),
        (17, 0, 1, 2),
        (17, 15, 1, 2),
        (17, 16, 1, 3),
        (32, 16, 4, 2 + 4),  # full blocks shared, one more each
        (33, 16, 4, 2 + 4 * 2),  # the partial tail is copied by each
        (0, 16, 2, 2),
    ],
)
def test_blocks_of_the_prompt_count_once(
    tokens: int, growth: int, samples: int, blocks: int
) -> None:
    assert blocks_for(tokens, growth, samples, 16) == blocks


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        (AdmissionClass.GUARANTEED, (64 + 1000 + 15) // 16),
        (AdmissionClass.STANDARD, (64 + 100 + 15) // 16),
        (AdmissionClass.BEST_EFFORT, 5),
    ],
)
def test_the_class_decides_how_much_growth_is_leased(kind: AdmissionClass, blocks: int) -> None:
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.observe(85)
    need = compute_need(
        make_request(admission_class=kind, num_tokens=64, max_tokens=1000),
        lengths,
        block_size=16,
        max_context=4096,
        standard_quantile=0.9,
    )
    assert abs(need.num_blocks - blocks) <= 1


def test_growth_ends_at_the_context() -> None:
    request = make_request(num_tokens=4000, max_tokens=10_000)
    need = compute_need(
        request, OutputLengths(), block_size=16, max_context=4096, standard_quantile=0.9
    )
    assert need.growth_tokens == 96


def test_the_last_token_needs_no_slot() -> None:
    assert least_blocks(make_request(num_tokens=16, max_tokens=1), 16) == 1
    assert least_blocks(make_request(num_tokens=16, max_tokens=2), 16) == 2
    standard = make_request(num_tokens=16, max_tokens=900, admission_class=AdmissionClass.STANDARD)
    assert least_blocks(standard, 16) == 1


def test_the_quantile_is_learnt_and_follows_a_change() -> None:
    lengths = OutputLengths(prior_tokens=256)
    assert 256 <= lengths.quantile(0.9) <= 320
    for _ in range(500):
        lengths.observe(20)
    assert 20 <= lengths.quantile(0.9) <= 25
    for _ in range(3000):
        lengths.observe(1000)
    assert 1000 <= lengths.quantile(0.9) <= 1250
    assert lengths.expected(100) <= 100


def test_lengths_survive_very_many_observations() -> None:
    lengths = OutputLengths()
    for _ in range(40_000):
        lengths.observe(10)
    assert 10 <= lengths.quantile(0.5) <= 13
    assert 10 <= lengths.expected(None) <= 20


def test_blocks_come_back_in_the_order_of_their_ends() -> None:
    releases = [(5.0, 10), (2.0, 4), (9.0, 100)]
    assert wait_for_blocks_s(0, releases, 1.0) == 0.0
    assert wait_for_blocks_s(4, releases, 1.0) == 1.0
    assert wait_for_blocks_s(5, releases, 1.0) == 4.0
    assert wait_for_blocks_s(200, releases, 1.0) is None
    assert wait_for_blocks_s(4, releases, 3.0) == 0.0  # overdue: any moment now
