"""How memory is divided, by each of the three ways to say it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_llama
from model_driver import load_runner

from pagefleet.workers import memory
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.memory import (
    DeviceProfile,
    DeviceReading,
    MemoryPartition,
    NotEnoughMemory,
    plan_memory,
)
from pagefleet.workers.models.config import DecoderConfig
from pagefleet.workers.models.families import read_config

MIB = 2**20
CONFIG = WorkerConfig(model="unused", max_num_sequences=4, max_num_batched_tokens=64)


@pytest.fixture
def model(tmp_path: Path) -> DecoderConfig:
    return read_config(make_llama(tmp_path / "model"))


@pytest.fixture(autouse=True)
def one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1024 * MIB)


def plan(
    model: DecoderConfig, config: WorkerConfig = CONFIG, weights: int = MIB
) -> MemoryPartition:
    return plan_memory(config, model, 512, torch.device("cpu"), weights, element_size=4)


def test_a_number_of_blocks_is_taken_as_it_is(model: DecoderConfig) -> None:
    block = 2 * 2 * 16 * 2 * 16 * 4
    assert model.block_bytes(16, 4) == block
    found = plan(model, replace(CONFIG, num_blocks=10, host_memory=block * 3 + 1))
    assert (found.num_blocks, found.kv_pool) == (10, 10 * block)
    assert (found.num_host_blocks, found.host_pool) == (3, 3 * block)
    assert "KV pool (10 blocks)" in found.text


def test_bytes_are_rounded_down_to_blocks(model: DecoderConfig) -> None:
    block = model.block_bytes(16, 4)
    assert plan(model, replace(CONFIG, kv_memory=block * 7 + 5)).num_blocks == 7
    with pytest.raises(NotEnoughMemory):
        plan(model, replace(CONFIG, kv_memory=block - 1))


def test_a_fraction_leaves_room_for_workspace_and_reserve(model: DecoderConfig) -> None:
    config = replace(CONFIG, memory_fraction=0.5, max_num_sequences=10_000)
    found = plan(model, config)
    assert found.workspace > 0
    assert found.reserve > 0
    assert found.workspace + found.reserve + found.kv_pool <= 512 * MIB
    assert found.workspace + found.reserve + found.kv_pool > 512 * MIB - 2 * MIB
    with pytest.raises(NotEnoughMemory, match="no room for one KV block"):
        plan(model, replace(config, memory_fraction=0.001))


def test_the_pool_is_never_larger_than_its_rows_can_fill(model: DecoderConfig) -> None:
    assert plan(model).num_blocks == 4 * 512 // 16


def test_workspace_counts_logits_of_all_rows(model: DecoderConfig) -> None:
    wide = replace(model, vocab_size=200_000)
    rows = replace(CONFIG, max_num_sequences=256)
    grown = memory.workspace_bytes(rows, wide, 4) - memory.workspace_bytes(CONFIG, wide, 4)
    assert grown > 200 * 200_000 * 4


def reading(free: int, allocated: int = 0, reserved: int = 0, peak: int = 0) -> DeviceReading:
    """Of a GPU with 1000 MiB, in MiB."""
    return DeviceReading(free * MIB, 1000 * MIB, allocated * MIB, reserved * MIB, peak * MIB)


START = reading(free=900)  # 100 are another process's
LOADED = reading(free=680, allocated=200, reserved=210, peak=205)
STEPPED = reading(free=550, allocated=200, reserved=320, peak=300)  # and 30 outside of torch
PROFILE = DeviceProfile(START, LOADED, STEPPED, graphs=40 * MIB)


def test_a_gpus_profile_tells_ours_from_others() -> None:
    assert PROFILE.activations == 100 * MIB
    assert PROFILE.untracked == 30 * MIB
    assert PROFILE.budget(0.9) == (900 - 200 - 30 - 40) * MIB
    assert PROFILE.budget(0.5) == (500 - 200 - 30 - 40) * MIB
    crowded = replace(PROFILE, start=reading(free=600), stepped=reading(250, 200, 320, 300))
    assert crowded.budget(0.9) == (600 - 200 - 30 - 40) * MIB, "others have 400 of the 1000"
    for name in ("weights 200", "activations 100", "outside torch 30", "graphs 40", "others 100"):
        assert f"{name} MiB" in PROFILE.text


def test_who_gives_memory_back_meanwhile_is_no_gain() -> None:
    """Another process ended: what it freed was not there when ours was counted."""
    later = replace(PROFILE, stepped=reading(free=650, allocated=200, reserved=320, peak=300))
    assert later.untracked == 0
    assert later.budget(0.95) == (900 - 200 - 40) * MIB


def test_a_profiled_pool_leaves_room_for_all_that_was_measured(model: DecoderConfig) -> None:
    config = replace(CONFIG, max_num_sequences=10_000)
    cuda = torch.device("cuda")
    found = plan_memory(config, model, 512, cuda, 200 * MIB, 4, profile=PROFILE)
    block = model.block_bytes(16, 4)
    assert found.workspace == 100 * MIB
    assert found.reserve == 20 * MIB
    left = PROFILE.budget(0.9) - found.workspace - found.reserve
    assert left - block < found.kv_pool <= left


def test_narrower_blocks_are_more_blocks(model: DecoderConfig) -> None:
    config = replace(CONFIG, kv_memory=100 * model.block_bytes(16, 4), host_memory=MIB)
    wide = plan(model, config)
    narrow = plan_memory(config, model, 512, torch.device("cpu"), MIB, 4, kv_element_size=1)
    assert narrow.num_blocks == 4 * wide.num_blocks == 400
    assert narrow.num_host_blocks == MIB // model.block_bytes(16, 1)
    assert narrow.workspace == wide.workspace


def test_available_memory_is_the_tightest_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    limit, used = tmp_path / "limit", tmp_path / "used"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(limit),))
    monkeypatch.setattr(memory, "_CGROUP_USED", (str(used),))
    whole = memory.available_memory()
    assert whole > 0
    limit.write_text("max\n")
    used.write_text("100\n")
    assert memory.available_memory() > 1000
    limit.write_text("1100\n")
    assert memory.available_memory() == 1000


def test_the_partition_of_a_loaded_runner_adds_up(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    runner = load_runner(folder, host_memory=MIB)
    partition = runner.partition
    assert partition.kv_pool == runner.storage.pool.numel() * 4
    assert partition.host_pool == runner.storage.host_pool.numel() * 4
    assert runner.num_blocks == 64
    assert runner.num_host_blocks == partition.num_host_blocks > 0
    weights = (folder / "model.safetensors").stat().st_size
    # Kernels may fill a weight's outputs up to whole panels.
    assert weights * 0.9 < partition.weights <= weights * 1.05


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 0},
        {"kv_memory": 0},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.5},
        {"host_memory": -1},
        {"dtype": "float64"},
        {"weight_dtype": "float32"},
        {"quantized_weights": "float"},
        {"block_size": 0},
        {"max_num_sequences": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        WorkerConfig(model="x", **fields)  # pyright: ignore
