"""One step while it is being decided, and what is remembered of it until its result is in."""

from dataclasses import dataclass

import numpy as np

from .output import CopyJob, DeviceCopy, Int32Array, NewRow, SchedulerOutput
from .request import Request
from .running_batch import Int64Array, RunningBatch


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A launched step. A row may change hands before the result comes: sequence ids tell.

    row_ids: int64, by entry. ends: int32, positions computed after the step, by entry.
    sample_ids: int64, by sample. prefill_only: sequence ids that end with this step, tokenless.
    prompts: requests whose prompt is computed with this step.
    drafts: rows with guesses, and how many; their samples come last. `ends` is where they end if
    all are wrong.
    num_tokens: positions it computes, without guesses. version: the batch's when it was launched.
    """

    output: SchedulerOutput
    row_ids: Int64Array
    ends: Int32Array
    sample_ids: Int64Array
    prefill_only: tuple[int, ...]
    prompts: tuple[Request, ...]
    drafts: tuple[tuple[int, int], ...]
    num_tokens: int
    version: int

    @property
    def num_drafts(self) -> int:
        """Guessed tokens of all rows."""
        return sum(count for _, count in self.drafts)

    @property
    def num_plain_samples(self) -> int:
        """Samples before those of rows with guesses."""
        return len(self.sample_ids) - self.num_drafts - len(self.drafts)


_NO_INTS: Int32Array = np.empty(0, dtype=np.int32)


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32) if values else _NO_INTS


class StepPlan:
    """Collects what a step does; `launch` makes the output and moves the batch's counts on."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.decode_rows = _NO_INTS
        self.chunks: list[tuple[int, int]] = []  # row, tokens: everything but plain decodes
        self.forks: list[tuple[int, int]] = []  # parent row, child row
        self.drafts: list[tuple[int, list[int]]] = []  # row, tokens guessed to follow
        self.prompts: list[Request] = []
        self.new_rows: list[NewRow] = []
        self.table_rows: list[int] = []
        self.table_blocks: list[int] = []
        self.tail_rows: list[int] = []
        self.tail_blocks: list[int] = []
        self.device_copies: list[DeviceCopy] = []
        self.copy_jobs: list[CopyJob] = []
        self.has_preempted = False
        self._num_chunk_tokens = 0

    def add_chunk(self, row: int, count: int) -> None:
        """Compute `count` more positions of a row."""
        self.chunks.append((row, count))
        self._num_chunk_tokens += count

    @property
    def num_tokens(self) -> int:
        """Tokens planned so far, without guesses."""
        return len(self.decode_rows) + self._num_chunk_tokens

    def ends(self, batch: RunningBatch) -> Int32Array:
        """int32 [rows]: positions computed once this step and those in flight have run."""
        ends = batch.num_computed.copy()
        ends[self.decode_rows] += 1
        for row, count in self.chunks:
            ends[row] += count
        return ends

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the runner. A row may enter only to wait for KV that
        another one is loading."""
        return not (len(self.decode_rows) or self.chunks or self.copy_jobs or self.new_rows)

    def launch(
        self, batch: RunningBatch, removed_rows: list[int], cut_rows: dict[int, int]
    ) -> StepRecord:
        """Every planned row advances; those whose known tokens are all computed sample one.

        cut_rows: row → blocks that it keeps.
        """
        if self.chunks or self.forks or self.drafts:
            rows, scheduled, entries, sample_rows = self._mixed_entries(batch)
        else:
            rows = sample_rows = self.decode_rows
            scheduled, entries = batch.ones[: len(rows)], batch.numbers[: len(rows)]
        starts = batch.num_computed[rows]
        ends = starts + scheduled
        draft_token_ids = self._launch_drafts(batch, ends) if self.drafts else None
        batch.num_computed[rows] = ends
        prefill_only = self._prefill_only(batch) if self.chunks else ()
        growing = sample_rows[~batch.is_beam[sample_rows]] if batch.num_beams else sample_rows
        # A row with guesses stands here several times, and gets one token for certain: numpy
        # adds once.
        batch.num_tokens[growing] += 1
        batch.num_pending[growing] += 1
        output = SchedulerOutput(
            step=self.step,
            rows=rows,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=starts,
            sample_entries=entries,
            sample_rows=sample_rows,
            removed_rows=_int32(removed_rows),
            new_rows=tuple(self.new_rows),
            cut_rows=_int32(list(cut_rows)),
            cut_lengths=_int32(list(cut_rows.values())),
            table_rows=_int32(self.table_rows),
            table_blocks=_int32(self.table_blocks),
            tail_rows=_int32(self.tail_rows),
            tail_blocks=_int32(self.tail_blocks),
            device_copies=tuple(self.device_copies),
            copy_jobs=tuple(self.copy_jobs),
            draft_token_ids=draft_token_ids,
        )
        row_ids = batch.sequence_ids[rows]
        sample_ids = row_ids if sample_rows is rows else batch.sequence_ids[sample_rows]
        return StepRecord(
            output,
            row_ids,
            ends,
            sample_ids,
            prefill_only,
            tuple(self.prompts),
            tuple((row, len(tokens)) for row, tokens in self.drafts),
            self.num_tokens,
            batch.version,
        )

    def _mixed_entries(
        self, batch: RunningBatch
    ) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Rows, tokens, sample entries and sample rows; single tokens come first, rows with
        guesses last."""
        drafts = [(row, 1 + len(tokens)) for row, tokens in self.drafts]
        decode_rows = self.decode_rows
        if drafts:
            decode_rows = decode_rows[~np.isin(decode_rows, [row for row, _ in drafts])]
        chunks = sorted(self.chunks, key=lambda chunk: chunk[1] > 1) + drafts
        num_decodes = len(decode_rows)
        rows = np.concatenate((decode_rows, np.array([row for row, _ in chunks], dtype=np.int32)))
        scheduled = np.ones(len(rows), dtype=np.int32)
        scheduled[num_decodes:] = [count for _, count in chunks]
        entry_of = {row: num_decodes + place for place, (row, _) in enumerate(chunks)}
        samplers = [
            (entry_of[row], row)
            for row, count in chunks[: len(self.chunks)]
            if _samples(batch, row, count)
        ]
        samplers += [(entry_of[parent], child) for parent, child in self.forks]
        samplers += [(entry_of[row], row) for row, count in drafts for _ in range(count)]
        entries = np.concatenate(
            (
                np.arange(num_decodes, dtype=np.int32),
                np.array([entry for entry, _ in samplers], dtype=np.int32),
            )
        )
        sample_rows = np.concatenate(
            (decode_rows, np.array([row for _, row in samplers], dtype=np.int32))
        )
        return rows, scheduled, entries, sample_rows

    def _launch_drafts(self, batch: RunningBatch, ends: Int32Array) -> Int32Array:
        """int32 [num_rows, k]: the guesses of the last rows, -1 elsewhere. What depends on them
        is not counted in `ends`, int32 [num_rows], nor as tokens, before it is known."""
        width = max(len(tokens) for _, tokens in self.drafts)
        drafts = np.full((len(ends), width), -1, dtype=np.int32)
        first = len(ends) - len(self.drafts)
        for entry, (row, tokens) in enumerate(self.drafts, first):
            drafts[entry, : len(tokens)] = tokens
            ends[entry] -= len(tokens)
            batch.set_drafts(row, len(tokens))
        return drafts

    def _prefill_only(self, batch: RunningBatch) -> tuple[int, ...]:
        """Sequences whose last position is computed and that may not sample."""
        return tuple(
            int(batch.sequence_ids[row])
            for row, _ in self.chunks
            if batch.num_computed[row] == batch.num_tokens[row] == batch.token_limit[row]
        )


def _samples(batch: RunningBatch, row: int, count: int) -> bool:
    """Whether `count` more positions complete the row and a token may follow."""
    num_tokens = int(batch.num_tokens[row])
    is_complete = int(batch.num_computed[row]) + count == num_tokens
    return is_complete and num_tokens < int(batch.token_limit[row])
