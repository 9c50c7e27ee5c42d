"""Every model family cut over ranks says what transformers says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import model_ranks as programs
import pytest
import torch
from factories import make_llama
from model_driver import GREEDY, load_runner, make_request, random_prompt, serve
from model_families import CONFIGS, VOCAB_SIZE, load_reference, make_checkpoint
from quantized_factories import quantize_checkpoint
from rank_processes import Died, RankProcesses

from pagefleet.kernels import cpu_library
from pagefleet.workers import shared_memory_group
from pagefleet.workers.models.families import read_config
from pagefleet.workers.shard_plan import ShardError
from pagefleet.workers.sharded_source import plan_shards

pytestmark = pytest.mark.skipif(
    not shared_memory_group.is_available(), reason="the compiled collectives are missing"
)
KERNELS = "cpu" if cpu_library.is_available() else "reference"


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses()
    yield started
    started.close()


def leaders(results: list[object]) -> object:
    for result in results:
        assert not isinstance(result, Exception | Died), results
    return results[0]


def logits_of_ranks(
    processes: RankProcesses,
    folder: Path,
    world_size: int,
    prompts: list[list[int]],
    **settings: object,
) -> list[torch.Tensor]:
    program = (programs.logits_of, world_size, folder, uuid4().hex, KERNELS, prompts, (33,))
    return leaders(processes.run(*program, settings))[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_transformers(
    processes: RankProcesses, tmp_path: Path, family: str, world_size: int
) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in (70, 90)]
    model = load_reference(folder)
    found = logits_of_ranks(processes, folder, world_size, prompts)
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe"])
def test_answers_equal_one_ranks(processes: RankProcesses, tmp_path: Path, family: str) -> None:
    """Greedy tokens through prefix hits, chunks and preemption."""
    folder = make_checkpoint(tmp_path / "model", family)
    shared = random_prompt(64, VOCAB_SIZE, 3)
    sampling = replace(GREEDY, max_tokens=64)
    requests = [make_request(f"r{i}", [*shared, i, i + 1], sampling) for i in range(4)]
    settings = {"num_blocks": 10, "prefill_chunk": 16}
    program = (programs.answers_to, 2, folder, uuid4().hex, KERNELS, requests, {}, settings)
    found = leaders(processes.run(*program))
    expected = serve(load_runner(folder), requests, **settings)
    assert {key: a.token_ids for key, a in found.items()} == {
        key: a.token_ids for key, a in expected.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packed_weights_are_cut_as_float_ones_are(
    processes: RankProcesses, tmp_path: Path, method: str
) -> None:
    # Half of the ffn ends inside a group.
    folder = make_llama(tmp_path / "packed", num_kv_heads=4, intermediate_size=96)
    quantize_checkpoint(folder, tmp_path / "plain", method)
    prompts = [random_prompt(40, 131)]
    expected = logits_of_ranks(processes, tmp_path / "plain", 2, prompts)[0]
    as_float = logits_of_ranks(processes, folder, 2, prompts, quantized_weights="dequantized")[0]
    assert torch.equal(as_float, expected)
    as_codes = logits_of_ranks(processes, folder, 2, prompts)[0]
    torch.testing.assert_close(as_codes, expected, rtol=1e-4, atol=1e-4)


def test_one_norm_over_all_heads_cannot_share_kv_heads(tmp_path: Path) -> None:
    config = replace(read_config(make_checkpoint(tmp_path, "olmoe")), num_kv_heads=2)
    with pytest.raises(ShardError, match="one norm runs over all of them"):
        plan_shards(config, 0, 4)
