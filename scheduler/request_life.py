"""Requests and sequences from arrival to end: who exists, and what each takes and gives back.

Carries out what exhaustion, admission and the beams decide. Knows no plan and no result of a step,
only which steps are in flight: what they may still touch is fenced.
"""

from collections import deque

from ..protos.messages import EngineRequest, FinishReason
from .beam_rounds import BeamRounds
from .beam_search import BeamSearch
from .books import Books
from .outbox import Outbox
from .output import Int32Array
from .request import Request, Sequence, SequenceState
from .step_plan import StepRecord
from .swap_policy import SwapPolicy


class RequestLife:
    """The requests that are not finished, by key, and their sequences, by id.

    in_flight: the steps whose results are to come, oldest first; the scheduler's own.
    """

    def __init__(
        self, books: Books, outbox: Outbox, in_flight: deque[StepRecord], eos: frozenset[int]
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self._books = books
        self._batch = books.batch
        self._queue = books.queue
        self._outbox = outbox
        self._in_flight = in_flight
        self._eos = eos
        self.beams = BeamRounds(books, outbox, self)
        self._swap_policy = SwapPolicy(books)
        self._removed_rows: list[int] = []
        self._cut_rows: dict[int, int] = {}  # row → blocks it keeps, to be sent too
        self._unannounced: dict[int, int] = {}  # row → sequence id, to be sent with the next step
        self._num_sequences = 0

    # ── beginning ─────────────────────────────────────────────────────────────────────────

    def add_samples(self, request: EngineRequest, entry: Request) -> None:
        """Samples without outputs come first: what one of them computes, the others share."""
        for sample in sorted(request.samples, key=lambda s: (bool(s.output_token_ids), s.index)):
            self._num_sequences += 1
            sequence = Sequence(self._num_sequences, entry, sample.index, sample.output_token_ids)
            sequence.state = SequenceState.HELD
            entry.sequences.append(sequence)
            self.sequences[sequence.id] = sequence

    def add_beams(self, request: EngineRequest, entry: Request) -> None:
        """One beam computes the prompt; the others fork off it."""
        sampling = request.sampling
        ends = entry.stop_token_ids if sampling.ignore_eos else entry.stop_token_ids | self._eos
        max_tokens = entry.token_limit - entry.num_prompt_tokens
        search = BeamSearch(sampling.beam_width, sampling.length_penalty, ends, max_tokens)
        self.beams.begin(entry, search, self.new_beam(entry, entry.prompt))

    def new_beam(self, request: Request, token_ids: Int32Array) -> Sequence:
        """A sequence with these tokens, neither waiting nor running yet."""
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, request, 0, ())
        sequence.token_ids = token_ids
        sequence.state = SequenceState.HELD
        sequence.owes_prompt_logprobs &= not request.prompt_is_computed
        request.sequences.append(sequence)
        self.sequences[sequence.id] = sequence
        return sequence

    def release_first(self, request: Request) -> None:
        """The first sample computes the prompt; those behind it are held until it has."""
        held = [s for s in request.sequences if s.state is SequenceState.HELD]
        others = (SequenceState.HELD, SequenceState.FINISHED)
        if held and all(s.state in others for s in request.sequences):
            self._queue.add(held[0])

    def release_held(self, request: Request) -> None:
        """The prompt has been computed: the others take their turn and find it in the cache."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self._queue.add(sequence)

    # ── what the runner is to be told ─────────────────────────────────────────────────────

    def announce(self, row: int, is_known: bool) -> None:
        """Send the row anew with the next step. is_known: the runner has it already."""
        if is_known:
            self._removed_rows.append(row)
        self._unannounced[row] = int(self._batch.sequence_ids[row])

    @property
    def has_unannounced(self) -> bool:
        """Whether the next step has rows to send anew."""
        return bool(self._unannounced)

    def take_unannounced(self) -> list[int]:
        """Rows whose last token the runner did not choose, or whose fork it did not see."""
        rows = list(self._unannounced)
        self._unannounced.clear()
        return rows

    def take_removed_rows(self) -> list[int]:
        """Rows that the runner is to forget."""
        rows, self._removed_rows = self._removed_rows, []
        return rows

    def cut(self, row: int) -> None:
        """Wrong guesses: the row's blocks behind its computed tokens go back at once."""
        if self._books.manager.truncate(row):
            self._cut_rows[row] = self._books.manager.num_blocks(row)
            self._books.leases.settle(self._batch.sequence(row).request)

    def take_cut_rows(self) -> dict[int, int]:
        """Rows whose tables have become shorter, and by what length they are now."""
        rows, self._cut_rows = self._cut_rows, {}
        return rows

    # ── what exhaustion and admission have decided ────────────────────────────────────────

    @property
    def fence(self) -> int:
        """The last step in flight; 0 = none."""
        return self._in_flight[-1].output.step if self._in_flight else 0

    def is_in_flight(self, step: int) -> bool:
        """Whether the result of a step is still to come."""
        return bool(self._in_flight) and step >= self._in_flight[0].output.step

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and row; it waits in its old place and, unless its KV could
        be swapped out, computes again."""
        row = sequence.row
        assert row is not None, f"{sequence} does not run"
        counters = self._books.counters
        has_offered = self.beams.has_offered(sequence)
        if not has_offered and self._swap_out(sequence, row):
            counters.preemptions_swap += 1
        else:
            counters.preemptions_recompute += 1
            # With its first token in flight the prompt is computed, and will have been told.
            if sequence.owes_prompt_logprobs and not self._batch.num_pending[row]:
                sequence.prompt_logprobs.clear()
        self.vacate(sequence)
        sequence.num_preemptions += 1
        self._queue.add(sequence)
        if has_offered:
            self.beams.park(sequence)
        self._books.leases.settle(sequence.request)

    def exhaust(self, sequence: Sequence, now: float) -> None:
        """Nothing else can make room: a sequence ends with what it has."""
        self._books.counters.kv_exhausted += 1
        if sequence.request.is_beam_search:
            self.beams.lose(sequence, now)
        else:
            self.finish(sequence, FinishReason.KV_EXHAUSTED, now)

    def _swap_out(self, sequence: Sequence, row: int) -> bool:
        if not self._swap_policy.prefers_swap(row):
            return False
        manager, num_computed = self._books.manager, int(self._batch.num_computed[row])
        if not num_computed:
            return False
        blocks = manager.blocks(row)[: manager.num_blocks_for(num_computed)]
        # Without published contents, siblings' common blocks would move once for each.
        is_cached = self._books.config.enable_prefix_caching
        moves_twice = not is_cached and manager.shares_full_block(row)
        if not moves_twice and self._books.tier.swap_out(sequence, blocks, num_computed):
            return True
        self._books.counters.swaps_refused += 1
        return False

    def restart(self, sequence: Sequence) -> None:
        """A copy it needed has failed: it computes again, in its old place."""
        if sequence.row is None:
            self.forget_swapped(sequence)
            return
        if sequence.owes_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self.vacate(sequence)
        self._queue.add(sequence)
        self._books.leases.settle(sequence.request)

    def forget_swapped(self, sequence: Sequence) -> None:
        """Give up what a waiting sequence has on the host: it computes again."""
        if sequence.swapped is not None:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
            if sequence.owes_prompt_logprobs and not sequence.num_pending:
                sequence.prompt_logprobs.clear()
            self._queue.add(sequence)

    # ── ending ────────────────────────────────────────────────────────────────────────────

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        num_output_tokens: int | None = None,
        error: str = "",
    ) -> None:
        """End a sequence without a new token, and say so. Beams end together."""
        if sequence.request.is_beam_search:
            self.beams.finish(sequence.request, reason, now, error)
            return
        if num_output_tokens is None:
            row = sequence.row
            known = len(sequence.token_ids) if row is None else self._batch.num_known(row)
            num_output_tokens = known - sequence.num_prompt_tokens
        self._outbox.tell_end(sequence, num_output_tokens, reason, error, now)
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Its last delta is written: nothing of it stays."""
        request = sequence.request
        self.drop(sequence)
        if request.is_finished:
            self.forget(request)
            return
        if not request.prompt_is_computed:
            self.release_first(request)
        self._books.leases.settle(request)

    def drop(self, sequence: Sequence) -> None:
        """Take everything from a sequence, wherever it is in its life."""
        if sequence.row is not None:
            self.vacate(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
        sequence.state = SequenceState.FINISHED
        self.sequences.pop(sequence.id, None)

    def vacate(self, sequence: Sequence) -> None:
        """Take blocks and row; what a step in flight may still touch is fenced."""
        assert sequence.row is not None, f"{sequence} has no row"
        if self._batch.is_loading[sequence.row]:
            self._books.tier.drop(sequence)
        self._books.manager.release(sequence.row, self.fence)
        sequence.last_step = self.fence
        row = self._batch.leave(sequence)
        self._cut_rows.pop(row, None)
        # A row that is still to be announced is unknown to the runner, or removed already.
        if self._unannounced.pop(row, None) is None:
            self._removed_rows.append(row)

    def forget(self, request: Request) -> None:
        """All its sequences have ended: the request and its lease do too."""
        self.requests.pop(request.key, None)
        self.beams.forget(request)
        self._books.ledger.close(request.key)
