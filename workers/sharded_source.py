"""One rank's slices of a checkpoint's tensors, by the tensors' names.

The decoder asks with the shapes of the rank's own part; what is cut, and where, stands here and
nowhere else. Knows no transport.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.quantized_weight import QuantizedWeight
from .loader import CheckpointSource
from .models.config import DecoderConfig, QkNorm
from .shard_plan import ModelDimensions, ShardError, ShardPlan, Share, even_shares

# Added to a sum over ranks, so only the leader may bring it.
_SUMMED_BIASES = ("self_attn.o_proj.bias", "mlp.down_proj.bias")


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a dimension, whole in the checkpoint with `full` positions, is this rank's."""

    dim: int
    share: Share
    full: int


def plan_shards(config: DecoderConfig, rank: int, world_size: int) -> ShardPlan:
    """How the model is cut; raises ShardError where it cannot be."""
    dimensions = ModelDimensions(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_experts=config.experts.num_experts if config.experts else 0,
    )
    plan = ShardPlan.of(dimensions, rank, world_size)
    if config.qk_norm is QkNorm.ALL_HEADS and world_size > config.num_kv_heads:
        raise ShardError("KV heads: one norm runs over all of them, so none can be on two ranks")
    if all(layer.has_experts for layer in config.layers):
        return plan
    # Layers without experts are cut as they are in a model that has none.
    ffn = even_shares("ffn", config.intermediate_size, world_size)[rank]
    return replace(plan, ffn=ffn)


def local_config(config: DecoderConfig, plan: ShardPlan) -> DecoderConfig:
    """The decoder that one rank runs; its vocabulary is the rank's part."""
    return replace(
        config,
        num_heads=plan.heads.size,
        num_kv_heads=plan.kv_heads.size,
        intermediate_size=plan.ffn.size,
        vocab_size=plan.vocab.size,
        experts=config.experts
        and replace(config.experts, begin=plan.experts.begin, end=plan.experts.end),
    )


class ShardedSource:
    """A `TensorSource` of one rank's part."""

    def __init__(self, source: CheckpointSource, config: DecoderConfig, plan: ShardPlan) -> None:
        self._source = source
        self._cuts = _cuts(config, plan)
        self._adds_biases = plan.is_leader

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The rank's part, which has this shape; only it is read."""
        cut = self._cut_of(name)
        if cut is None:
            tensor = self._source.tensor(name, shape)
            is_added = name.endswith(_SUMMED_BIASES) and not self._adds_biases
            return torch.zeros_like(tensor) if is_added else tensor
        assert shape[cut.dim] == cut.share.size, f"{name}: {shape} does not fit {cut}"
        full = (*shape[: cut.dim], cut.full, *shape[cut.dim + 1 :])
        return self._source.part(name, full, cut.dim, cut.share.begin, cut.share.end)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """The rank's part as codes, of which the whole is read."""
        cut = self._cut_of(name)
        if cut is None:
            return self._source.quantized(name, shape)
        full = (*shape[: cut.dim], cut.full, *shape[cut.dim + 1 :])
        weight, share = self._source.quantized(name, full), cut.share
        if weight is None:
            return None
        take = weight.rows if cut.dim == 0 else weight.columns
        return take(share.begin, share.end)

    def skip(self, name: str) -> None:
        """See `TensorSource`."""
        self._source.skip(name)

    def _cut_of(self, name: str) -> Cut | None:
        module, _, kind = name.rpartition(".")
        for ending, cut in self._cuts.items():
            if module.endswith(ending):
                # A bias has only the first dimension: it is cut with the rows, not the columns.
                return cut if kind == "weight" or cut.dim == 0 else None
        return None


def _cuts(config: DecoderConfig, plan: ShardPlan) -> dict[str, Cut]:
    """By the ending of the module's name: rows are cut where outputs are independent, columns
    where the products are summed over ranks afterwards."""
    heads = plan.heads.scaled(config.head_dim)
    kv_heads = plan.kv_heads.scaled(config.head_dim)
    cuts = {
        "embed_tokens": Cut(0, plan.vocab, config.vocab_size),
        "lm_head": Cut(0, plan.vocab, config.vocab_size),
        "self_attn.q_proj": Cut(0, heads, config.q_size),
        "self_attn.k_proj": Cut(0, kv_heads, config.kv_size),
        "self_attn.v_proj": Cut(0, kv_heads, config.kv_size),
        "self_attn.o_proj": Cut(1, heads, config.q_size),
        "mlp.gate_proj": Cut(0, plan.ffn, config.intermediate_size),
        "mlp.up_proj": Cut(0, plan.ffn, config.intermediate_size),
        "mlp.down_proj": Cut(1, plan.ffn, config.intermediate_size),
    }
    if config.qk_norm is QkNorm.ALL_HEADS:
        cuts["self_attn.q_norm"] = Cut(0, heads, config.q_size)
        cuts["self_attn.k_norm"] = Cut(0, kv_heads, config.kv_size)
    return cuts
