"""The rows of the input batch as arrays: what runs, how far it is, when it must end.

A decode step over hundreds of rows is a few array operations here; Python objects are touched
only for rows that enter, leave, need a block or end. Knows no blocks and decides nothing.

    position        0 ─────────── num_computed ──── num_tokens - num_pending ── num_tokens
    KV is           written or in flight │ missing
    token is        known ──────────────────────────────────────│ in flight
"""

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from .integrity import IntegrityError, check
from .output import Int32Array
from .request import Sequence, SequenceState

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class RunningBatch:
    """Structure of arrays by row. A row of sequence id 0 is empty.

    num_tokens counts tokens sampled in steps in flight, num_pending of them. num_computed counts
    positions that steps in flight will have written.
    num_drafts: guessed tokens in flight behind those, which no other count contains; such a row
    waits for what comes of them.
    compute_limit: positions ever computed. token_limit: most tokens, prompt and output;
    max_outputs: of them output.
    first_special: from this place in its output on, a token may be the row's first or its last.
    capacity: positions its blocks hold. next_publish: computed positions at which its next block
    can be published.
    is_beam: which token follows is not the runner's choice, so none is in flight.
    is_loading: KV on its way from the host; not to be scheduled.
    """

    def __init__(self, num_rows: int, max_context: int) -> None:
        self.num_rows = num_rows
        self.version = 0  # another one whenever a row changes hands, or begins or ends to load
        self.token_ids: Int32Array = np.zeros((num_rows, max_context), dtype=np.int32)
        self.sequence_ids: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_pending: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_drafts: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._num_drafting = 0  # rows with drafts
        self.compute_limit: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.token_limit: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.max_outputs: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.first_special: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.capacity: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.next_publish: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.arrival: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.is_beam: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.num_beams = 0
        self.is_loading: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._num_loading = 0
        # Parts of plain decode steps, made once; who gets a slice of them must not write to it.
        self.ones: Int32Array = np.ones(num_rows, dtype=np.int32)
        self.numbers: Int32Array = np.arange(num_rows, dtype=np.int32)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.keys = [""] * num_rows
        self.indexes = [0] * num_rows
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Rows that a sequence could enter."""
        return len(self._free)

    def __len__(self) -> int:
        return self.num_rows - len(self._free)

    def enter(self, sequence: Sequence, num_computed: int) -> int:
        """Give a sequence the lowest free row. Its blocks come after."""
        row = heappop(self._free)
        self.version += 1
        request = sequence.request
        num_tokens = len(sequence.token_ids)
        num_prompt = request.num_prompt_tokens
        self.token_ids[row, :num_tokens] = sequence.token_ids
        self.sequence_ids[row] = sequence.id
        self.num_prompt[row] = num_prompt
        self.num_tokens[row] = num_tokens
        self.num_pending[row] = 0
        self.num_computed[row] = num_computed
        self.compute_limit[row] = request.compute_limit
        self.token_limit[row] = request.token_limit
        self.max_outputs[row] = request.token_limit - num_prompt
        self.arrival[row] = request.arrival
        self.first_special[row] = 0
        if sequence.first_token_s is not None:
            self.expect_plain_tokens(row, sequence)
        self.is_beam[row] = request.is_beam_search
        self.num_beams += request.is_beam_search
        self.sequences[row] = sequence
        self.keys[row] = request.key
        self.indexes[row] = sequence.index
        sequence.row = row
        sequence.state = SequenceState.RUNNING
        return row

    def leave(self, sequence: Sequence) -> int:
        """Take a sequence's row away; it keeps its tokens and what it awaits."""
        row = sequence.row
        assert row is not None, f"{sequence} has no row"
        self.version += 1
        pending = int(self.num_pending[row])
        sequence.token_ids = self.token_ids[row, : int(self.num_tokens[row]) - pending].copy()
        sequence.num_pending = pending
        sequence.row = None
        self.sequence_ids[row] = 0
        self.num_tokens[row] = self.num_computed[row] = 0
        self.compute_limit[row] = 0
        self.capacity[row] = 0
        self.set_drafts(row, 0)
        self.set_loading(row, False)
        self.num_beams -= int(self.is_beam[row])
        self.is_beam[row] = False
        self.sequences[row] = None
        self.keys[row] = ""
        heappush(self._free, row)
        return row

    def sequence(self, row: int) -> Sequence:
        """Who has the row."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is empty"
        return sequence

    def remaining(self) -> Int32Array:
        """Per row, positions that could be computed now."""
        target = np.minimum(self.num_tokens, self.compute_limit)
        target -= self.num_computed
        if self._num_loading:
            target[self.is_loading] = 0
        if self._num_drafting:
            target[self.num_drafts > 0] = 0
        return target

    def set_drafts(self, row: int, count: int) -> None:
        """So many guessed tokens are in flight."""
        self._num_drafting += (count > 0) - int(self.num_drafts[row] > 0)
        self.num_drafts[row] = count

    def drafting_rows(self) -> list[int]:
        """Rows with guessed tokens in flight."""
        return self.num_drafts.nonzero()[0].tolist() if self._num_drafting else []

    def accept(self, row: int, tokens: list[int]) -> None:
        """What came of a row's drafts: tokens that were guessed right, then one more; all but
        the last have been computed."""
        known = self.num_known(row)
        self.token_ids[row, known : known + len(tokens)] = tokens
        self.num_pending[row] -= 1
        self.num_tokens[row] += len(tokens) - 1
        self.num_computed[row] += len(tokens) - 1
        self.set_drafts(row, 0)

    def set_loading(self, row: int, is_loading: bool) -> None:
        """Whether the row's KV is on its way from the host."""
        self.version += 1
        self._num_loading += is_loading - int(self.is_loading[row])
        self.is_loading[row] = is_loading

    def num_known(self, row: int) -> int:
        """Tokens whose values are known."""
        return int(self.num_tokens[row]) - int(self.num_pending[row])

    def expect_plain_tokens(self, row: int, sequence: Sequence) -> None:
        """Its first token is told: what follows is plain up to the last, if it stops at none."""
        if not sequence.request.stop_token_ids:
            self.first_special[row] = self.max_outputs[row] - 1

    def append_tokens(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """The oldest pending token of each row becomes known. Returns their places in the
        outputs, counted from 0."""
        pending = self.num_pending[rows]
        positions = self.num_tokens[rows]
        positions -= pending
        self.token_ids[rows, positions] = tokens
        pending -= 1
        self.num_pending[rows] = pending
        positions -= self.num_prompt[rows]
        return positions

    def special_rows(
        self, rows: Int32Array, tokens: Int32Array, numbers: Int32Array, eos: frozenset[int]
    ) -> set[int]:
        """Rows that may have got their first or their last token."""
        special = numbers >= self.first_special[rows]
        for token in eos:
            special |= tokens == token
        found = special.nonzero()[0]
        return set(rows[found].tolist()) if len(found) else set()

    def rows(self) -> list[int]:
        """Rows that are taken, lowest first."""
        return [row for row, sequence in enumerate(self.sequences) if sequence is not None]

    def check_integrity(self) -> None:
        """Rows and sequences name each other, and no count passes another."""
        check(len(set(self._free)) == len(self._free), "a row is free twice")
        check(int(self.is_beam.sum()) == self.num_beams, f"{self.num_beams} rows are beams")
        check(int(self.is_loading.sum()) == self._num_loading, f"{self._num_loading} rows load")
        drafting = int((self.num_drafts > 0).sum())
        check(drafting == self._num_drafting, f"{drafting} rows draft, not {self._num_drafting}")
        heapify(self._free)
        for row, sequence in enumerate(self.sequences):
            if sequence is None:
                check(row in self._free, f"row {row} is lost")
                check(self.sequence_ids[row] == 0, f"row {row} is empty and has an id")
                continue
            agrees = (
                row not in self._free
                and sequence.row == row
                and self.sequence_ids[row] == sequence.id
                and sequence.state is SequenceState.RUNNING
                and 0 <= self.num_pending[row] <= self.num_tokens[row]
                and self.num_computed[row] <= self.num_tokens[row] <= self.token_limit[row]
                and self.num_computed[row] + self.num_drafts[row] <= self.capacity[row]
                and (not self.num_drafts[row] or self.num_pending[row] == 1)
            )
            if not agrees:
                raise IntegrityError(f"{sequence}: {self._describe(row)}")

    def _describe(self, row: int) -> str:
        return (
            f"tokens {self.num_tokens[row]} (pending {self.num_pending[row]}), computed "
            f"{self.num_computed[row]}, drafts {self.num_drafts[row]}, limit "
            f"{self.token_limit[row]}, capacity {self.capacity[row]}"
        )
