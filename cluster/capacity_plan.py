"""How many tokens, blocks and sequences a KV pool holds, and what a block size wastes.

Plain arithmetic on a model's shape. Knows nothing of devices, running pools, or weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .config import CommandError

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
_TABLE_ENTRY_BYTES = 4  # a block table is int32
_MAX_WASTE = 0.05  # of the slots: above it a block size is not recommended
_SMALLEST_RECOMMENDED = 16  # below it tables and copies cost more than the slots they save
_ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "float8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV depends on. num_kv_heads is the model's, before it is split by `tp`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "tp"):
            if getattr(self, name) < 1:
                raise CommandError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.dtype not in _ITEM_SIZES:
            known = ", ".join(_ITEM_SIZES)
            raise CommandError(f"dtype {self.dtype!r} is not one of {known}")

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers on one rank; heads that do not divide by `tp` are rounded up."""
        heads = -(-self.num_kv_heads // self.tp)
        return 2 * self.num_layers * heads * self.head_dim * _ITEM_SIZES[self.dtype]


def read_shape(folder: Path, dtype: str | None = None, tp: int = 1) -> KVShape:
    """The shape of a checkpoint folder; `dtype` None = the checkpoint's own."""
    path = folder / "config.json"
    try:
        config = cast("dict[str, object]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error

    def count(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise CommandError(f"{path}: {name!r} is {value!r}, not an integer")
        return value

    num_heads = count("num_attention_heads")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return KVShape(
        num_layers=count("num_hidden_layers"),
        num_kv_heads=count("num_key_value_heads", num_heads),
        # hidden_size is read only where head_dim is absent
        head_dim=count("head_dim", 0) or count("hidden_size") // num_heads,
        dtype=dtype or str(stored),
        tp=tp,
    )


@dataclass(frozen=True, slots=True)
class BlockSizePlan:
    """A pool cut into blocks of one size, and the given sequences laid into it together.

    held: how many of the sequences fit, taken in their order until one does not.
    """

    block_size: int
    block_bytes: int
    num_blocks: int
    num_slots: int
    blocks_needed: int
    slots_needed: int
    waste_slots: int
    waste_share: float
    fits: bool
    held: int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What `pagefleet plan` prints. `sizes` is ordered by block size."""

    shape: KVShape
    bytes_per_token: int
    pool_bytes: int
    lengths: tuple[int, ...]
    sizes: tuple[BlockSizePlan, ...]
    recommended_block_size: int


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The table of one sequence beside the KV that it points to."""

    num_tokens: int
    num_blocks: int
    table_bytes: int
    payload_bytes: int

    @property
    def payload_per_table_byte(self) -> float:
        """524,288 means: the table is 1/524,288 of its payload."""
        return self.payload_bytes / self.table_bytes


def plan_block_size(
    bytes_per_token: int, pool_bytes: int, lengths: Sequence[int], block_size: int
) -> BlockSizePlan:
    """Lay sequences of `lengths` tokens into a pool of `pool_bytes`, none sharing a block."""
    block_bytes = bytes_per_token * block_size
    num_blocks = pool_bytes // block_bytes
    needs = [-(-length // block_size) for length in lengths]
    slots_needed = sum(needs) * block_size
    waste = slots_needed - sum(lengths)
    return BlockSizePlan(
        block_size=block_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_slots=num_blocks * block_size,
        blocks_needed=sum(needs),
        slots_needed=slots_needed,
        waste_slots=waste,
        waste_share=waste / slots_needed if slots_needed else 0.0,
        fits=sum(needs) <= num_blocks,
        held=_num_held(needs, num_blocks),
    )


def _num_held(needs: Sequence[int], num_blocks: int) -> int:
    left = num_blocks
    for held, need in enumerate(needs):
        left -= need
        if left < 0:
            return held
    return len(needs)


def make_plan(
    shape: KVShape,
    pool_bytes: int,
    lengths: Sequence[int],
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> CapacityPlan:
    """Compare `block_sizes` for one pool and one set of sequences."""
    if pool_bytes < 1:
        raise CommandError(f"the pool must have at least 1 byte, has {pool_bytes}")
    if not lengths or min(lengths) < 1:
        raise CommandError(f"lengths must be at least one token each, are {list(lengths)}")
    if not block_sizes or min(block_sizes) < 1:
        raise CommandError(f"block sizes must be at least 1, are {list(block_sizes)}")
    sizes = tuple(
        plan_block_size(shape.bytes_per_token, pool_bytes, lengths, size)
        for size in sorted(set(block_sizes))
    )
    return CapacityPlan(
        shape=shape,
        bytes_per_token=shape.bytes_per_token,
        pool_bytes=pool_bytes,
        lengths=tuple(lengths),
        sizes=sizes,
        recommended_block_size=_recommend(sizes, sum(lengths) / len(lengths)),
    )


def _recommend(sizes: Sequence[BlockSizePlan], mean_length: float) -> int:
    """The largest size that wastes little: shorter tables, longer copies, fewer hashes.

    Where every size wastes more, the one that wastes least of those not too small; a size that
    holds all the sequences goes before one that does not.
    """

    def waste(size: BlockSizePlan) -> float:
        # Lengths that happen to be multiples must not hide what others will waste: half a block.
        return max(size.waste_share, (size.block_size - 1) / 2 / mean_length)

    fitting = [size for size in sizes if size.fits] or list(sizes)
    frugal = [size for size in fitting if waste(size) <= _MAX_WASTE]
    if frugal:
        return frugal[-1].block_size
    usual = [size for size in fitting if size.block_size >= _SMALLEST_RECOMMENDED] or fitting[-1:]
    return min(usual, key=waste).block_size


def block_table(bytes_per_token: int, num_tokens: int, block_size: int) -> BlockTable:
    """The block table of a sequence of `num_tokens`; its payload counts whole blocks."""
    num_blocks = -(-num_tokens // block_size)
    return BlockTable(
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        table_bytes=num_blocks * _TABLE_ENTRY_BYTES,
        payload_bytes=num_blocks * block_size * bytes_per_token,
    )
