"""Which tokens of a step are needed after the last layer."""

import numpy as np
import torch

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.workers.input_batch import InputBatch
from pagefleet.workers.wanted_rows import PromptReport, WantedRows, prompt_reports


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def step(counts: list[int], entries: list[int], first: list[int] | None = None) -> SchedulerOutput:
    return SchedulerOutput(
        step=1,
        rows=np.arange(len(counts), dtype=np.int32),
        num_scheduled_tokens=ids(*counts),
        num_computed_tokens=ids(*(first or [0] * len(counts))),
        sample_entries=ids(*entries),
        sample_rows=ids(*entries),
    )


def test_decodes_need_everything() -> None:
    wanted = WantedRows.of(step([1, 1, 1], [0, 1, 2]), [])
    assert wanted.is_everything(3)
    assert wanted.expand is None


def test_a_chunk_needs_its_last_token_or_none() -> None:
    wanted = WantedRows.of(step([1, 4, 3], [0, 2]), [])
    assert wanted.rows.tolist() == [0, 7]
    assert not wanted.is_everything(8)
    assert WantedRows.of(step([4], []), []).rows.tolist() == []


def test_siblings_of_a_fork_share_one_row() -> None:
    wanted = WantedRows.of(step([1, 5], [0, 1, 1, 1]), [])
    assert wanted.rows.tolist() == [0, 5]
    assert wanted.expand is not None
    assert wanted.expand.tolist() == [0, 1, 1, 1]
    assert not WantedRows.of(step([1, 2], [1, 1, 1]), []).is_everything(3)


def test_prompt_reports_end_before_the_last_prompt_token() -> None:
    batch = InputBatch(2, 32, 4, torch.device("cpu"))
    asks = SamplingParams(temperature=0.0, prompt_logprobs=2)
    plain = SamplingParams(temperature=0.0)
    table = np.zeros(3, dtype=np.int32)
    tokens = np.arange(9, dtype=np.int32)
    batch.apply(
        SchedulerOutput(
            step=1,
            new_rows=(
                NewRow(0, 0, tokens, 9, table, plain, 0),
                NewRow(1, 1, tokens, 6, table, asks, 0),
            ),
        )
    )
    whole = prompt_reports(step([2, 9], [1]), batch)
    assert whole == [PromptReport(row=1, first=0, begin=2, length=5, num_best=2)]
    assert WantedRows.of(step([2, 9], [1]), whole).rows.tolist() == [10, 2, 3, 4, 5, 6]
    assert prompt_reports(step([1, 1], [1], first=[0, 5]), batch)[0].length == 0
    assert prompt_reports(step([1, 1], [1], first=[0, 6]), batch) == []
