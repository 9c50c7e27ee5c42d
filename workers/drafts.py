"""The samples of rows with guessed tokens: where each one belongs, and which of them count.

Knows one step's output and what was sampled; no logits, no tensor. A guess is right if it is the
very token that was chosen at its place without looking at it.

    position        p      p+1    p+2    p+3
    computed        known  d0     d1     d2        d = guesses
    sampled         s0     s1     s2     s3
    counts          yes    d0=s0  and d1=s1  and d2=s2
"""

from dataclasses import dataclass

import numpy as np

from ..scheduler.output import Int32Array, SchedulerOutput
from .grammar import BoolArray
from .promised_tokens import Int64Array


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """offsets: int64 [num_samples], positions between a row's next token and the sample.
    guesses: int32 [num_samples], what was guessed for the sample; -1 = nothing.
    num_plain: samples before those of rows with guesses."""

    offsets: Int64Array
    guesses: Int32Array
    num_plain: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> "DraftSamples | None":
        """Of one step; None where nobody has guessed."""
        drafts = output.draft_token_ids
        if drafts is None:
            return None
        drafted = drafts[drafts[:, 0] >= 0]
        num_rows, width = drafted.shape
        columns = np.full((num_rows, width + 1), -1, dtype=np.int32)
        columns[:, :width] = drafted
        # One sample more than guesses.
        numbers = np.arange(width + 1, dtype=np.int64)
        is_sample = numbers <= (drafted >= 0).sum(axis=1)[:, None]
        places = np.tile(numbers, num_rows)[is_sample.ravel()]
        num_plain = len(output.sample_rows) - len(places)
        offsets = np.zeros(len(output.sample_rows), dtype=np.int64)
        guesses = np.full(len(output.sample_rows), -1, dtype=np.int32)
        offsets[num_plain:] = places
        guesses[num_plain:] = columns[is_sample]
        return cls(offsets, guesses, num_plain)

    def counting(self, token_ids: Int32Array) -> BoolArray:
        """bool [num_samples]: samples that follow right guesses only. token_ids: what was
        sampled."""
        is_wrong = token_ids != self.guesses
        num_before = is_wrong.cumsum() - is_wrong
        first = np.arange(len(token_ids)) - self.offsets
        return num_before == num_before[first]
