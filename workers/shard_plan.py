"""Which part of a model each rank of a replica holds. Pure arithmetic; knows no tensor.

A KV head goes with all its query heads, since attention mixes them, so heads are dealt out in
whole groups; only where there are more ranks than KV heads do several ranks hold the same KV
head, with different query heads each. Everything else is cut as evenly as whole units allow,
the longer parts first.
"""

from dataclasses import dataclass
from itertools import pairwise


class ShardError(ValueError):
    """The model cannot be cut into so many parts."""


@dataclass(frozen=True, slots=True)
class Share:
    """Positions [begin, end) of one dimension."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many positions."""
        return self.end - self.begin

    def scaled(self, width: int) -> "Share":
        """The same share where each position is `width` elements wide."""
        return Share(self.begin * width, self.end * width)


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """What is cut. num_experts: 0 = a dense model. ffn_unit: the ffn is cut at its multiples
    (the group size of quantised weights)."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    ffn_unit: int = 1


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One rank's part. vocab_sizes: of all ranks, for the gathering of logits."""

    rank: int
    world_size: int
    heads: Share
    kv_heads: Share
    ffn: Share
    vocab: Share
    experts: Share
    vocab_sizes: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelDimensions, rank: int, world_size: int) -> "ShardPlan":
        """The part of `rank`; raises ShardError where some rank would be left with nothing."""
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        heads, kv_heads = head_shares(model.num_heads, model.num_kv_heads, world_size)[rank]
        vocab = even_shares("vocabulary", model.vocab_size, world_size)
        ffn = Share(0, model.intermediate_size)
        experts = Share(0, model.num_experts)
        if model.num_experts:
            experts = even_shares("experts", model.num_experts, world_size)[rank]
        else:
            ffn = even_shares("ffn", model.intermediate_size, world_size, model.ffn_unit)[rank]
        return cls(
            rank=rank,
            world_size=world_size,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=vocab[rank],
            experts=experts,
            vocab_sizes=tuple(share.size for share in vocab),
        )

    @property
    def is_leader(self) -> bool:
        """Whether this rank adds what must be added once, such as the bias of a split sum."""
        return self.rank == 0


def even_shares(what: str, total: int, num_parts: int, unit: int = 1) -> tuple[Share, ...]:
    """Cut `total` at multiples of `unit`, the longer parts first."""
    if total % unit != 0:
        raise ShardError(f"{what}: {total} is not a multiple of {unit}")
    base, extra = divmod(total // unit, num_parts)
    if base == 0:
        raise ShardError(f"{what}: {total // unit} parts cannot be cut into {num_parts}")
    edges = [(base * part + min(part, extra)) * unit for part in range(num_parts + 1)]
    return tuple(Share(begin, end) for begin, end in pairwise(edges))


def head_shares(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> tuple[tuple[Share, Share], ...]:
    """Query heads and KV heads of each rank."""
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads"
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        shares = even_shares("KV heads", num_kv_heads, num_ranks)
        return tuple((share.scaled(group), share) for share in shares)
    parts: list[tuple[Share, Share]] = []
    owners = even_shares("ranks", num_ranks, num_kv_heads)
    for kv_head, ranks in enumerate(owners):
        for share in even_shares(f"query heads of KV head {kv_head}", group, ranks.size):
            first = kv_head * group
            heads = Share(first + share.begin, first + share.end)
            parts.append((heads, Share(kv_head, kv_head + 1)))
    return tuple(parts)
