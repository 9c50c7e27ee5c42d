"""What came of a step: blocks that may be found, tokens that are known, sequences that end.

Knows a step's record and the runner's answer to it; decides nothing.
"""

from collections.abc import Iterable

import numpy as np

from ..protos.messages import FinishReason, TokenLogprobs
from .books import Books
from .outbox import Outbox
from .output import ModelRunnerOutput
from .request import Sequence
from .request_life import RequestLife
from .speculation import Speculation
from .step_plan import StepRecord


class StepResults:
    """Enters results in the books and tells them."""

    def __init__(
        self,
        books: Books,
        outbox: Outbox,
        life: RequestLife,
        eos: frozenset[int],
        speculation: Speculation | None,
    ) -> None:
        self._books = books
        self._batch = books.batch
        self._queue = books.queue
        self._outbox = outbox
        self._life = life
        self._eos = eos
        self._speculation = speculation

    def publish(self, record: StepRecord) -> None:
        """Blocks that this step filled may be found from now on."""
        batch, rows = self._batch, record.output.rows
        due = record.ends >= batch.next_publish[rows]
        if batch.version != record.version:
            due &= batch.sequence_ids[rows] == record.row_ids
        entries = due.nonzero()[0]
        if len(entries):
            ends = record.ends[entries].tolist()
            for row, end in zip(rows[entries].tolist(), ends, strict=True):
                self._books.manager.publish(row, end)

    def fail(self, record: StepRecord, row: int, now: float) -> None:
        """A row's logits were not finite: its sequence, or the samples it gave, end alone."""
        output = record.output
        failed = record.row_ids[output.rows == row].tolist()
        failed += record.sample_ids[output.sample_rows == row].tolist()
        for sequence_id in dict.fromkeys(failed):
            sequence = self._life.sequences.get(sequence_id)
            if sequence is not None:
                error = "the model's output was not finite"
                self._life.finish(sequence, FinishReason.ERROR, now, error=error)

    def collect_prompt_logprobs(
        self, record: StepRecord, row: int, entries: Iterable[TokenLogprobs | None]
    ) -> None:
        for sequence_id in record.row_ids[record.output.rows == row].tolist():
            sequence = self._life.sequences.get(sequence_id)
            if sequence is None or not sequence.owes_prompt_logprobs:
                continue
            # Without its row it keeps what it does not compute again.
            if sequence.row == row or sequence.num_pending or sequence.swapped is not None:
                room = sequence.num_prompt_tokens - len(sequence.prompt_logprobs)
                sequence.prompt_logprobs += list(entries)[:room]

    def append_tokens(self, record: StepRecord, result: ModelRunnerOutput, now: float) -> None:
        """Sampled tokens become known: append, tell, and end what ends."""
        batch, rows, tokens = self._batch, record.output.sample_rows, result.token_ids
        sample_ids, num_plain = record.sample_ids, record.num_plain_samples
        if record.drafts:
            rows, tokens, sample_ids = rows[:num_plain], tokens[:num_plain], sample_ids[:num_plain]
        places: list[int] | range = range(num_plain)
        if batch.num_beams or batch.version != record.version:
            is_current = batch.sequence_ids[rows] == sample_ids
            stale: list[int] = np.flatnonzero(~is_current).tolist()
            self._append_to_waiting(record, result, stale, now)
            is_current &= ~batch.is_beam[rows]
            current = np.flatnonzero(is_current)
            rows, tokens, places = rows[current], tokens[current], current.tolist()
        numbers = batch.append_tokens(rows, tokens)
        special = batch.special_rows(rows, tokens, numbers, self._eos)
        row_list: list[int] = rows.tolist()
        token_list: list[int] = tokens.tolist()
        number_list: list[int] = numbers.tolist()
        if not special and not result.logprobs:
            self._outbox.tell_tokens(batch, row_list, token_list, number_list)
            return
        entries = list(zip(places, row_list, token_list, number_list, strict=True))
        plain = [e for e in entries if e[1] not in special and e[0] not in result.logprobs]
        if plain:
            _, plain_rows, plain_tokens, plain_numbers = map(list, zip(*plain, strict=True))
            self._outbox.tell_tokens(batch, plain_rows, plain_tokens, plain_numbers)
        for place, row, token, number in entries:
            if row in special or place in result.logprobs:
                sequence = batch.sequence(row)
                self._tell(sequence, [token], number, _logprobs_at(result, place, 1), now)

    def _append_to_waiting(
        self, record: StepRecord, result: ModelRunnerOutput, places: list[int], now: float
    ) -> None:
        """Tokens of sequences that lost their rows while the step was in flight."""
        for place in places:
            sequence = self._life.sequences.get(int(record.sample_ids[place]))
            if sequence is None or not sequence.num_pending:
                continue
            self._queue.remove(sequence)
            token = int(result.token_ids[place])
            number = len(sequence.token_ids) - sequence.num_prompt_tokens
            sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
            sequence.num_pending -= 1
            self._queue.add(sequence)
            self._tell(sequence, [token], number, _logprobs_at(result, place, 1), now)

    def append_drafted(self, record: StepRecord, result: ModelRunnerOutput, now: float) -> None:
        """What came of guesses: those that were right become known, and the token behind them."""
        place = record.num_plain_samples
        for row, num_drafts in record.drafts:
            found: list[int] = result.token_ids[place : place + num_drafts + 1].tolist()
            tokens = [token for token in found if token >= 0]
            self._books.counters.draft_tokens += num_drafts
            self._books.counters.accepted_tokens += len(tokens) - 1
            sequence = self._life.sequences.get(int(record.sample_ids[place]))
            if sequence is not None:
                logprobs = _logprobs_at(result, place, len(tokens))
                self._take_run(sequence, row, tokens, num_drafts, logprobs, now)
            place += num_drafts + 1

    def _take_run(
        self,
        sequence: Sequence,
        row: int,
        tokens: list[int],
        num_drafts: int,
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> None:
        batch, num_accepted = self._batch, len(tokens) - 1
        is_running = batch.sequence_ids[row] == sequence.id
        known = batch.num_known(row) if is_running else len(sequence.token_ids)
        number = known - sequence.num_prompt_tokens
        del tokens[self._num_kept(sequence, tokens, number) :]
        if is_running:
            batch.accept(row, tokens)
            if batch.num_computed[row] >= batch.next_publish[row]:
                self._books.manager.publish(row, int(batch.num_computed[row]))
            self._life.cut(row)
            if self._speculation is not None:
                self._speculation.learn(row, sequence, num_drafts, num_accepted)
        else:
            self._queue.remove(sequence)
            sequence.token_ids = np.append(sequence.token_ids, np.array(tokens, dtype=np.int32))
            sequence.num_pending -= 1
            self._queue.add(sequence)
        self._tell(sequence, tokens, number, logprobs[: len(tokens)], now)

    def _num_kept(self, sequence: Sequence, tokens: list[int], number: int) -> int:
        """How many of `tokens` come before the sequence's end, or are it."""
        for place, token in enumerate(tokens, 1):
            if sequence.stop_reason(token, number + place, self._eos) is not None:
                return place
        return len(tokens)

    def _tell(
        self,
        sequence: Sequence,
        tokens: list[int],
        number: int,
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> None:
        """Tokens of which one may be a first or the last one. number: the first's place in the
        output."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            if sequence.row is not None:
                self._batch.expect_plain_tokens(sequence.row, sequence)
        reason = sequence.stop_reason(tokens[-1], number + len(tokens), self._eos)
        self._outbox.tell(sequence, tuple(tokens), number, logprobs, reason, now)
        if reason is not None:
            self._life.end(sequence)


def _logprobs_at(result: ModelRunnerOutput, place: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Of so many samples from a place on, where they were asked for."""
    if not result.logprobs:
        return ()
    found = (result.logprobs.get(at) for at in range(place, place + count))
    return tuple(entry for entry in found if entry is not None)
