"""How a model is cut over ranks."""

import pytest

from pagefleet.workers.shard_plan import (
    ModelDimensions,
    ShardError,
    ShardPlan,
    Share,
    even_shares,
    head_shares,
)


def test_smollm2_over_two_ranks_is_cut_unevenly() -> None:
    model = ModelDimensions(9, 3, 1536, 49152)
    first, second = (ShardPlan.of(model, rank, 2) for rank in range(2))
    assert (first.heads, first.kv_heads) == (Share(0, 6), Share(0, 2))
    assert (second.heads, second.kv_heads) == (Share(6, 9), Share(2, 3))
    assert (first.ffn.size, second.ffn.size) == (768, 768)
    assert first.vocab_sizes == (24576, 24576)
    assert first.is_leader and not second.is_leader


def test_kv_heads_are_shared_when_ranks_are_more() -> None:
    shares = head_shares(8, 2, 4)
    assert [q for q, _ in shares] == [Share(0, 2), Share(2, 4), Share(4, 6), Share(6, 8)]
    assert [kv for _, kv in shares] == [Share(0, 1), Share(0, 1), Share(1, 2), Share(1, 2)]


def test_kv_heads_are_shared_unevenly() -> None:
    shares = head_shares(9, 3, 4)
    assert [q for q, _ in shares] == [Share(0, 2), Share(2, 3), Share(3, 6), Share(6, 9)]
    assert [kv.begin for _, kv in shares] == [0, 0, 1, 2]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_every_head_has_one_rank_that_also_holds_its_kv_head(
    num_kv_heads: int, group: int, num_ranks: int
) -> None:
    num_heads = num_kv_heads * group
    if -(-num_ranks // num_kv_heads) > group and num_ranks > num_kv_heads:
        with pytest.raises(ShardError, match="query heads"):
            head_shares(num_heads, num_kv_heads, num_ranks)
        return
    shares = head_shares(num_heads, num_kv_heads, num_ranks)
    heads = [head for q, _ in shares for head in range(q.begin, q.end)]
    assert heads == list(range(num_heads))
    assert {h for _, kv in shares for h in range(kv.begin, kv.end)} == set(range(num_kv_heads))
    for q, kv in shares:
        # The kernels map local query head h to local KV head h // (heads / KV heads).
        local_group = q.size // kv.size
        for local in range(q.size):
            assert (q.begin + local) // group == kv.begin + local // local_group


@pytest.mark.parametrize(("total", "parts"), [(7, 2), (32003, 4), (4, 4), (172, 4)])
def test_even_shares_cover_all_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = even_shares("ffn", total, parts)
    assert [s.begin for s in shares] == [0, *(s.end for s in shares[:-1])]
    assert shares[-1].end == total
    sizes = [s.size for s in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_ffn_is_cut_at_whole_quantisation_groups() -> None:
    assert [s.size for s in even_shares("ffn", 11008, 4, unit=128)] == [2816, 2816, 2688, 2688]
    with pytest.raises(ShardError, match="multiple of 128"):
        even_shares("ffn", 100, 2, unit=128)


def test_experts_are_dealt_out_whole() -> None:
    model = ModelDimensions(8, 8, 64, 512, num_experts=6)
    plans = [ShardPlan.of(model, rank, 4) for rank in range(4)]
    assert [plan.experts.size for plan in plans] == [2, 2, 1, 1]
    assert all(plan.ffn == Share(0, 64) for plan in plans)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ShardError, match="experts"):
        ShardPlan.of(ModelDimensions(8, 8, 64, 512, num_experts=2), 0, 4)
    with pytest.raises(ShardError, match="query heads of KV head 0"):
        ShardPlan.of(ModelDimensions(4, 4, 64, 512), 0, 8)
