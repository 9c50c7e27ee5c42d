"""A KV cache of fp8: what it holds, whom it is told to, and what it does to answers."""

from pathlib import Path

import pytest
import torch
from factories import make_llama
from model_driver import GREEDY, all_logits, load_runner, make_request, random_prompt, serve

from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.loaded_engine import load_engine

# Of a prompt's logits as a whole, by cosine, in a model whose attention is sharp: what a sixteenth
# in every key and value comes to.
MOST_TURNED = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("fp8") / "model")


def test_blocks_take_a_quarter_of_float32_and_as_many_more_fit(folder: Path) -> None:
    wide = load_runner(folder, num_blocks=None, kv_memory=2**20)
    narrow = load_runner(folder, num_blocks=None, kv_memory=2**20, kv_dtype="fp8")
    assert narrow.storage.pool.dtype == torch.float8_e4m3fn
    assert narrow.num_blocks == 4 * wide.num_blocks
    assert narrow.partition.kv_pool == narrow.storage.pool.numel()
    assert narrow.model_info.dtype == wide.model_info.dtype == wide.model_info.kv_dtype == "float32"


def test_it_is_part_of_what_cached_blocks_are_known_by(folder: Path) -> None:
    """Blocks of another dtype are never taken for the same: the roots of their hashes differ."""
    settings = {"model": str(folder), "num_blocks": 8, "num_threads": 1, "max_context": 64}
    plain, narrow = (
        load_engine(WorkerConfig(**settings, kv_dtype=kv_dtype))  # pyright: ignore
        for kv_dtype in ("auto", "fp8")
    )
    try:
        assert plain.identity.kv_dtype == "float32"
        assert narrow.identity.kv_dtype == "float8_e4m3fn"
    finally:
        plain.engine.shutdown()
        narrow.engine.shutdown()


def test_answers_survive_hits_and_swaps_and_logits_hardly_move(folder: Path) -> None:
    runner = load_runner(folder, kv_dtype="fp8", host_memory=2**20)
    plain = load_runner(folder)
    prompt = random_prompt(70, 100)
    narrow, wide = (all_logits(r, [prompt], chunk=16)[0] for r in (runner, plain))
    turned = 1 - torch.cosine_similarity(narrow.flatten(), wide.flatten(), dim=0)
    assert 0 < float(turned) < MOST_TURNED
    requests = [make_request(str(i), prompt[: 30 + i], GREEDY) for i in range(4)]
    alone = {str(i): serve(runner, [request])[str(i), 0] for i, request in enumerate(requests)}
    together = serve(
        runner,
        requests,
        num_blocks=14,
        num_host_blocks=12,
        preemption_mode=PreemptionMode.SWAP,
        preempt_every=5,
    )
    assert {key: answer.token_ids for key, answer in alone.items()} == {
        key: answer.token_ids for (key, _), answer in together.items()
    }
