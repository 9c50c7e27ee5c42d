"""What the scheduler tells the model runner to do in one step, and what comes back.

Plain data, small enough to broadcast to every rank each step. A running sequence owns a **row**
of the runner's input batch: the runner keeps its tokens, block table and sampling parameters
there, so a decode step carries only what changed.

Order of a step, the same on every rank:

    removed_rows → new_rows → cut_rows/cut_lengths (drop what is behind)
    → tail_rows/tail_blocks (replace last) → table_rows/table_blocks (append) → device_copies
    → forward of `rows` → sample for `sample_rows` → append the sampled tokens

`copy_jobs` between device and host run beside the step, each on its own; a sequence whose blocks
are the target of a job is not scheduled before the job's `CopyDone` has been given to `update`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ..protos.messages import SamplingParams, TokenLogprobs

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that enters the input batch: fresh, forked, resumed, or swapped in.

    token_ids: int32 [num_tokens], prompt then output known so far (penalties, min_tokens and
    logprobs need the border `num_prompt_tokens`). block_table: int32 [num_blocks].
    sample_index: the sample's index in its request; with the seed it keys the random draw.
    """

    row: int
    sequence_id: int
    token_ids: Int32Array
    num_prompt_tokens: int
    block_table: Int32Array
    sampling: SamplingParams
    sample_index: int


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """Copy-on-write: the first `num_slots` slots of `source` go to `target`, on the device."""

    source: int
    target: int
    num_slots: int


class CopyKind(StrEnum):
    """Direction of a copy between the tiers."""

    STORE = "store"  # device → host
    LOAD = "load"  # host → device
    IMPORT = "import"  # what another replica sent and this rank has staged → host


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Whole blocks between the tiers: sources[i] → targets[i]. Both sides stay referenced or
    fenced in their pools until the job's `CopyDone` is processed.

    A STORE is ordered after the step before it (it must see that step's writes) and a LOAD
    before any step that reads its targets. The sources of an IMPORT are places in what the rank
    has staged under the number `staging`.
    """

    job_id: int
    kind: CopyKind
    sources: Int32Array
    targets: Int32Array
    staging: int = 0


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A job ended; `ok` False = its targets hold nothing that may be used.

    elapsed_s: how long the copy itself took, for the measured bandwidth; 0 = not measured.
    """

    job_id: int
    ok: bool = True
    elapsed_s: float = 0.0


def _no_ints() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    rows: int32 [num_scheduled], single-token (decode) rows first, in the order of the batch.
    num_scheduled_tokens: int32 [num_scheduled].
    num_computed_tokens: int32 [num_scheduled], position of each row's first scheduled token.
    sample_entries: int32 [num_samples], which entry of `rows` gives the logits (at its last token).
    sample_rows: int32 [num_samples], the row whose parameters and seed choose the token, and to
        which the token is appended; differs from the entry's row for the siblings of a fork.
    draft_token_ids: int32 [num_scheduled, k] or None: tokens guessed for rows scheduled beyond
        their known tokens (speculative decoding), -1 where fewer. A row with d of them computes
        its last known token and all d, and stands 1 + d times in a row in `sample_rows`, once for
        each of these positions, at the end of `sample_rows`.
    cut_rows, cut_lengths: int32, tables that lose their blocks behind so many: guesses were wrong.
    step: number of this step; fences and `ModelRunnerOutput` name it.
    """

    step: int
    rows: Int32Array = field(default_factory=_no_ints)
    num_scheduled_tokens: Int32Array = field(default_factory=_no_ints)
    num_computed_tokens: Int32Array = field(default_factory=_no_ints)
    sample_entries: Int32Array = field(default_factory=_no_ints)
    sample_rows: Int32Array = field(default_factory=_no_ints)
    removed_rows: Int32Array = field(default_factory=_no_ints)
    new_rows: tuple[NewRow, ...] = ()
    cut_rows: Int32Array = field(default_factory=_no_ints)
    cut_lengths: Int32Array = field(default_factory=_no_ints)
    table_rows: Int32Array = field(default_factory=_no_ints)
    table_blocks: Int32Array = field(default_factory=_no_ints)
    tail_rows: Int32Array = field(default_factory=_no_ints)
    tail_blocks: Int32Array = field(default_factory=_no_ints)
    device_copies: tuple[DeviceCopy, ...] = ()
    copy_jobs: tuple[CopyJob, ...] = ()
    draft_token_ids: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def num_draft_tokens(self) -> Int32Array:
        """int32 [num_scheduled], of each entry."""
        if self.draft_token_ids is None:
            return np.zeros(len(self.rows), dtype=np.int32)
        return (self.draft_token_ids >= 0).sum(axis=1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best next tokens of one beam, best first, ties to the lowest id.

    token_ids: int32 [k], log-probabilities logprobs: float32 [k], over the whole vocabulary and
    then changed by penalties and bias; k = `num_beam_candidates(sampling, number of EOS ids)`.
    """

    token_ids: Int32Array
    logprobs: NDArray[np.float32]


def num_beam_candidates(sampling: SamplingParams, num_eos: int) -> int:
    """So many that `beam_width` beams go on even if every token that ends one is among them."""
    return sampling.beam_width * (1 + max(1, num_eos + len(sampling.stop_token_ids)))


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step produced.

    token_ids: int32 [num_samples], in the order of `SchedulerOutput.sample_rows`; -1 for those
        behind a wrong guess, which mean nothing.
    logprobs: by position in `sample_rows`, only for rows that asked.
    prompt_logprobs: by row, the entries of the prompt positions that this step's tokens predict,
        only for rows that asked: computing positions c..e-1 of a prompt of n tokens gives those
        of c+1..min(e, n-1), and with c = 0 also None for position 0 first.
    copies_done: jobs that ended since the last output.
    beam_candidates: by position in `sample_rows`, for every row with beam_width > 1. Its entry of
        token_ids means nothing: which token it goes on with is the scheduler's choice, and the row
        comes again in `new_rows` of a later step.
    failed_rows: rows whose logits were not finite; they end with an error, alone.
    elapsed_s: time the step took on the device, for the measured rates.
    """

    step: int
    token_ids: Int32Array = field(default_factory=_no_ints)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = field(
        default_factory=dict[int, tuple[TokenLogprobs | None, ...]]
    )
    beam_candidates: dict[int, BeamCandidates] = field(default_factory=dict[int, BeamCandidates])
    copies_done: tuple[CopyDone, ...] = ()
    failed_rows: tuple[int, ...] = ()
    elapsed_s: float = 0.0
