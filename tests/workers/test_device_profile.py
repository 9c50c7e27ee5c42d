"""The greatest step there can be, run where there is no GPU: that it is of the size it says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import make_llama
from model_driver import load_runner

from pagefleet.workers.device_profile import LargestStep, lay_out_largest, run_largest_step

CPU = torch.device("cpu")
STEP = LargestStep(num_tokens=100, num_sequences=8, max_context=64, vocab_size=300)


@pytest.mark.parametrize(
    ("num_tokens", "lens"), [(100, [64, 36]), (128, [64, 64]), (7, [7]), (64, [64])]
)
def test_every_token_of_the_budget_is_there(num_tokens: int, lens: list[int]) -> None:
    layout = lay_out_largest(replace(STEP, num_tokens=num_tokens), block_size=16)
    assert layout.attention.context_lens.tolist() == lens
    assert len(layout.token_ids) == len(layout.positions) == num_tokens
    assert layout.attention.query_starts.tolist() == [0, *np.cumsum(lens)]
    assert layout.slots.max() < 16, "one block stands for all"
    assert layout.attention.block_tables.max() == 0


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_it_runs_and_leaves_the_pool_alone(tmp_path: Path, kv_dtype: torch.dtype) -> None:
    runner = load_runner(make_llama(tmp_path / "model"))
    runner.storage.pool.fill_(3.0)
    layout = replace(runner.storage.layout, dtype=kv_dtype)
    rows: list[int] = []
    logits = runner.decoder.logits
    runner.decoder.logits = lambda hidden: rows.append(len(hidden)) or logits(hidden)  # pyright: ignore
    run_largest_step(runner.decoder, layout, STEP, CPU)
    assert rows[0] == 8, "logits of all rows of the batch"
    assert rows[1] == 100, "of prompt positions, as many as are computed at once"
    assert (runner.storage.pool == 3.0).all()
