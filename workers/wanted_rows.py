"""Which tokens of a step need their hidden state: those that are sampled from, and prompt tokens
whose successors' log-probabilities were asked for. Knows rows and positions, no tensor.
"""

from dataclasses import dataclass

import numpy as np

from ..scheduler.output import SchedulerOutput
from .drafts import DraftSamples
from .input_batch import InputBatch, Int64Array


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Tokens begin .. begin+length-1 of the step, at positions first .. of `row`'s prompt,
    predict prompt tokens whose num_best best are to be reported."""

    row: int
    first: int
    begin: int
    length: int
    num_best: int


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The step's tokens whose hidden state is needed.

    rows: int64, `num_sampled` different ones to sample from, then those of prompt reports.
    expand: int64 [num_samples], which of the first each sample reads, where siblings share one.
    """

    rows: Int64Array
    num_sampled: int
    expand: Int64Array | None

    @classmethod
    def of(
        cls,
        output: SchedulerOutput,
        reports: list[PromptReport],
        drafts: DraftSamples | None = None,
        is_decode: bool = False,
    ) -> "WantedRows":
        """The rows of one step. is_decode: each sequence has one token."""
        sampled = output.sample_entries.astype(np.int64)
        if not is_decode:
            last = output.num_scheduled_tokens.cumsum(dtype=np.int64) - 1
            if drafts is None:
                sampled = last[sampled]
            else:
                last -= output.num_draft_tokens
                sampled = last[sampled] + drafts.offsets
        expand = None
        if len(sampled) > 1 and not (sampled[1:] > sampled[:-1]).all():
            sampled, expand = np.unique(sampled, return_inverse=True)
        num_sampled = len(sampled)
        if reports:
            ranges = [np.arange(r.begin, r.begin + r.length) for r in reports]
            sampled = np.concatenate([sampled, *ranges])
        return cls(sampled, num_sampled, expand)

    def is_everything(self, num_tokens: int) -> bool:
        """Every token of the step, in order: nothing to select. Sampled rows ascend, so their
        number tells."""
        return self.num_sampled == num_tokens == len(self.rows)


def prompt_reports(output: SchedulerOutput, batch: InputBatch) -> list[PromptReport]:
    """Which of the step's tokens predict prompt tokens whose log-probability was asked for."""
    asked = batch.sampling.num_prompt_logprobs
    if not asked:
        return []
    reports: list[PromptReport] = []
    columns = (output.rows, output.num_scheduled_tokens, output.num_computed_tokens)
    begin = 0
    for row, count, first in zip(*(column.tolist() for column in columns), strict=True):
        num_prompt = int(batch.num_prompt_tokens[row])
        if row in asked and first < num_prompt:
            length = min(first + count, num_prompt - 1) - first
            reports.append(PromptReport(row, first, begin, length, asked[row]))
        begin += count
    return reports
