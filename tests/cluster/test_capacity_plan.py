"""Capacity arithmetic against figures worked out by hand."""

import json
from pathlib import Path

import pytest

from pagefleet.cluster.capacity_plan import (
    KVShape,
    block_table,
    make_plan,
    plan_block_size,
    read_shape,
)
from pagefleet.cluster.config import CommandError

KIB, MIB = 2**10, 2**20
LLAMA_8B = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")


def test_an_8b_model_takes_128_kib_a_token():
    assert LLAMA_8B.bytes_per_token == 128 * KIB
    assert LLAMA_8B.bytes_per_token * 4096 == 512 * MIB


def test_a_block_table_is_a_524288th_of_its_payload():
    table = block_table(LLAMA_8B.bytes_per_token, num_tokens=4096, block_size=16)
    assert table.num_blocks == 256
    assert table.table_bytes == 1 * KIB
    assert table.payload_per_table_byte == 524_288


@pytest.mark.parametrize(
    ("block_size", "blocks", "slots", "waste", "share", "fits"),
    [(4, 8, 32, 4, 0.125, True), (8, 5, 40, 12, 0.3, False)],
)
def test_three_sequences_in_8_mib(
    block_size: int, blocks: int, slots: int, waste: int, share: float, fits: bool
):
    plan = plan_block_size(256 * KIB, 8 * MIB, lengths=(7, 11, 10), block_size=block_size)
    assert (plan.blocks_needed, plan.slots_needed) == (blocks, slots)
    assert (plan.waste_slots, plan.waste_share) == (waste, share)
    assert plan.fits is fits
    assert plan.num_slots == 32


@pytest.mark.parametrize(
    ("block_size", "slots", "waste", "fits"),
    [(8, 128, 15, True), (16, 144, 31, False), (32, 160, 47, False)],
)
def test_four_sequences_in_128_slots(block_size: int, slots: int, waste: int, fits: bool):
    plan = plan_block_size(1, 128, lengths=(17, 31, 32, 33), block_size=block_size)
    assert (plan.slots_needed, plan.waste_slots, plan.fits) == (slots, waste, fits)
    assert plan.held == (4 if fits else 3)


def test_tensor_parallel_ranks_share_the_heads_and_round_up():
    assert KVShape(32, 8, 128, tp=4).bytes_per_token == 32 * KIB
    assert KVShape(30, 3, 64, "float32", tp=2).bytes_per_token == 2 * 30 * 2 * 64 * 4


def test_long_sequences_get_larger_blocks_than_short_ones():
    short = make_plan(LLAMA_8B, 2**30, lengths=[100] * 10)
    long = make_plan(LLAMA_8B, 2**34, lengths=[4000] * 10)
    assert short.recommended_block_size < long.recommended_block_size
    assert [size.block_size for size in short.sizes] == [4, 8, 16, 32, 64, 128]


def test_the_shape_of_a_checkpoint(tmp_path: Path):
    config: dict[str, object] = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == KVShape(30, 3, 64, "bfloat16")
    assert read_shape(tmp_path, dtype="float32", tp=3).bytes_per_token == 2 * 30 * 64 * 4


@pytest.mark.parametrize("text", ["", "{}", '{"num_hidden_layers": "many"}'])
def test_a_checkpoint_that_says_nothing_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CommandError, match=r"config\.json"):
        read_shape(tmp_path)


def test_nonsense_is_refused():
    with pytest.raises(CommandError, match="dtype"):
        KVShape(1, 1, 1, dtype="float7")
    with pytest.raises(CommandError, match="lengths"):
        make_plan(LLAMA_8B, 2**30, lengths=[])
    with pytest.raises(CommandError, match="pool"):
        make_plan(LLAMA_8B, 0, lengths=[1])
