"""A weight of small integers, whole and in parts."""

import pytest
import torch

from pagefleet.kernels.quantized_weight import QuantizedWeight, stack


def make_weight(
    out_features: int = 6, in_features: int = 64, group_size: int = 16
) -> QuantizedWeight:
    torch.manual_seed(out_features)
    groups = -(-in_features // group_size)
    return QuantizedWeight(
        codes=torch.randint(16, (out_features, in_features), dtype=torch.uint8),
        scales=torch.rand(out_features, groups),
        zeros=torch.randint(16, (out_features, groups)).float(),
        group_size=group_size,
        bits=4,
    )


def test_codes_become_what_they_stand_for() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8),
        scales=torch.tensor([[0.5, 2.0]]),
        zeros=torch.tensor([[1.0, 8.0]]),
        group_size=2,
        bits=4,
    )
    assert weight.dequantized().tolist() == [[0.0, 0.5, -10.0, 14.0]]


@pytest.mark.parametrize(
    ("begin", "end", "size"), [(0, 64, 16), (16, 48, 16), (8, 40, 8), (0, 5, 16)]
)
def test_columns_keep_their_values_where_they_cut_a_group(begin: int, end: int, size: int) -> None:
    weight = make_weight()
    part = weight.columns(begin, end)
    assert torch.equal(part.dequantized(), weight.dequantized()[:, begin:end])
    assert part.group_size == size


def test_rows_and_stacks_keep_their_values() -> None:
    weight, other = make_weight(), make_weight(3)
    assert torch.equal(weight.rows(2, 5).dequantized(), weight.dequantized()[2:5])
    stacked = stack([weight, other])
    assert stacked is not None
    assert torch.equal(
        stacked.dequantized(), torch.cat([weight.dequantized(), other.dequantized()])
    )
    assert stack([weight, make_weight(group_size=32)]) is None


@pytest.mark.parametrize(
    ("group_size", "packable"), [(16, True), (8, False), (20, False), (64, True), (100, True)]
)
def test_small_and_odd_groups_are_not_packed(group_size: int, packable: bool) -> None:
    assert make_weight(group_size=group_size).is_packable is packable
