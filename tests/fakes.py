"""Stand-ins for what a test does not want to run for real.

`FakeModel` executes a scheduler's steps over fake KV storage, one number per slot and tier. A
slot's number depends on its token, its position and the slot before it; the next token depends
on every number stored along the sequence's block table. A wrong, stale, lost or unwritten block
therefore changes the output at once, or trips the guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagefleet.protos.messages import SamplingParams, TokenLogprobs
from pagefleet.scheduler.output import (
    BeamCandidates,
    CopyDone,
    CopyJob,
    CopyKind,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
    num_beam_candidates,
)

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
UNWRITTEN = 0

Uint64Array = NDArray[np.uint64]


def _mix(*values: int) -> int:
    """A number that depends on all of `values` and their order; never UNWRITTEN."""
    state = 0x243F6A8885A308D3
    for value in values:
        state = ((state ^ value) * _FACTOR) & _MASK
        state ^= state >> 29
    return state or 1


def _mix_each(value: int, others: Uint64Array) -> Uint64Array:
    """`_mix(value, other)` of each."""
    state = (np.uint64(_mix(value)) ^ others) * np.uint64(_FACTOR)
    return np.maximum(state ^ (state >> np.uint64(29)), np.uint64(1))


def _weights(length: int) -> Uint64Array:
    positions = np.arange(length, dtype=np.uint64)
    return (positions * np.uint64(2) + np.uint64(1)) * np.uint64(_FACTOR)


def fake_kv(previous: int, token: int, position: int) -> int:
    """What a slot holds: previous is the slot before it, 0 at the start."""
    return _mix(previous, token + 1, position)


def fake_blocks(token_bytes: bytes, block_size: int) -> Uint64Array:
    """What the full blocks of these tokens hold: uint64 [num_blocks, block_size]."""
    slots: list[int] = []
    for position, token in enumerate(np.frombuffer(token_bytes, "<i4").tolist()):
        slots.append(fake_kv(slots[-1] if slots else 0, token, position))
    return np.array(slots, dtype=np.uint64).reshape(-1, block_size)


def fake_token(
    digest: int, sampling: SamplingParams, index: int, position: int, vocab_size: int
) -> int:
    """The token at `position` given the digest of all slots before it."""
    return _mix(digest, sampling.seed or 0, index, position) % vocab_size


def fake_offers(digest: int, sampling: SamplingParams, vocab_size: int) -> BeamCandidates:
    """The best next tokens of a beam; log-probabilities from -1/64 to -8, often equal."""
    count = min(num_beam_candidates(sampling, num_eos=1), vocab_size)
    tokens = np.arange(vocab_size, dtype=np.uint64)
    logprobs = -(1.0 + _mix_each(digest, tokens) % np.uint64(512)) / 64
    best = np.lexsort((tokens, -logprobs))[:count]
    return BeamCandidates(best.astype(np.int32), logprobs[best].astype(np.float32))


def oracle_beams(
    prompt: tuple[int, ...], sampling: SamplingParams, *, vocab_size: int, eos: tuple[int, ...]
) -> list[list[int]]:
    """What a beam search alone must answer, best first: whole sequences, no blocks, no forks."""
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    width, running, finished = sampling.beam_width, [(0.0, list[int]())], []
    limit = sampling.max_tokens or 0
    for length in range(1, limit + 1):
        offers = []
        for beam, (score, output) in enumerate(running):
            offer = fake_offers(_digest_of([*prompt, *output]), sampling, vocab_size)
            for token, logprob in zip(offer.token_ids, offer.logprobs, strict=True):
                offers.append((-(score + float(logprob)), beam, int(token)))
        count = len(fake_offers(0, sampling, vocab_size).token_ids)
        ranked = sorted(offers)[:count]
        going_on = []
        for rank, (negative, beam, token) in enumerate(ranked):
            output = [*running[beam][1], token]
            if token in ends or length == limit:
                if rank < width:
                    finished.append((negative / length**sampling.length_penalty, output))
            elif len(going_on) < width:
                going_on.append((-negative, output))
        finished = sorted(finished, key=lambda entry: entry[0])[:width]
        running = going_on
        if not running or (
            len(finished) == width
            and -running[0][0] / length**sampling.length_penalty >= finished[-1][0]
        ):
            break
    return [output for _, output in finished][: sampling.n]


def _digest_of(tokens: list[int]) -> int:
    kv, digest = 0, 0
    for position, token in enumerate(tokens):
        kv = fake_kv(kv, token, position)
        digest = (digest + kv * (2 * position + 1) * _FACTOR) & _MASK
    return digest


def oracle_tokens(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    index: int,
    *,
    vocab_size: int,
    eos: tuple[int, ...] = (),
    max_context: int = 8192,
) -> list[int]:
    """What a request alone must answer, without blocks, cache or scheduler."""
    limit = max_context if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    limit = min(limit, max_context)
    tokens, kv, digest = list(prompt), 0, 0
    for position, token in enumerate(prompt):
        kv = fake_kv(kv, token, position)
        digest = (digest + kv * (2 * position + 1) * _FACTOR) & _MASK
    while len(tokens) < limit:
        position = len(tokens)
        token = fake_token(digest, sampling, index, position, vocab_size)
        tokens.append(token)
        num_outputs = len(tokens) - len(prompt)
        if num_outputs >= sampling.min_tokens and (
            token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
        ):
            break
        kv = fake_kv(kv, token, position)
        digest = (digest + kv * (2 * position + 1) * _FACTOR) & _MASK
    return tokens[len(prompt) :]


@dataclass
class _Row:
    """What the runner keeps of a row. poison_from: slots from there on must not be valid."""

    new: NewRow
    tokens: list[int]
    table: list[int]
    is_poisoned: bool = False


@dataclass
class FakeModel:
    """Executes steps. `hold_copies`: jobs stay open until `finish_copies`."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    vocab_size: int = 1000
    hold_copies: bool = False
    rows: dict[int, _Row] = field(default_factory=dict)
    open_jobs: list[CopyJob] = field(default_factory=list)
    staged: dict[int, Uint64Array] = field(default_factory=dict)
    num_computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.device: Uint64Array = np.zeros((self.num_blocks, self.block_size), dtype=np.uint64)
        self.host: Uint64Array = np.zeros((self.num_host_blocks, self.block_size), dtype=np.uint64)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step, in the order that `scheduler/output.py` names."""
        self._start_copies(output.copy_jobs)
        self._update_rows(output)
        for copy in output.device_copies:
            self.device[copy.target] = UNWRITTEN
            self.device[copy.target, : copy.num_slots] = self.device[copy.source, : copy.num_slots]
        self._forward(output)
        tokens: list[int] = []
        offers: dict[int, BeamCandidates] = {}
        num_sampled: dict[int, int] = {}  # by row, in this step
        for place, (entry, row) in enumerate(
            zip(output.sample_entries.tolist(), output.sample_rows.tolist(), strict=True)
        ):
            offset = num_sampled.get(row, 0)
            num_sampled[row] = offset + 1
            digest = self._digest(int(output.rows[entry]), row, offset)
            new, length = self.rows[row].new, len(self.rows[row].tokens) + offset
            if new.sampling.beam_width > 1:
                offers[place] = fake_offers(digest, new.sampling, self.vocab_size)
                tokens.append(0)
                continue
            tokens.append(
                fake_token(digest, new.sampling, new.sample_index, length, self.vocab_size)
            )
        self._reject(output, tokens)
        for place, row in enumerate(output.sample_rows.tolist()):
            if place not in offers and tokens[place] >= 0:
                self.rows[row].tokens.append(tokens[place])
        return ModelRunnerOutput(
            step=output.step,
            token_ids=np.array(tokens, dtype=np.int32),
            prompt_logprobs=self._prompt_logprobs(output),
            beam_candidates=offers,
            copies_done=() if self.hold_copies else self.finish_copies(),
        )

    def _reject(self, output: SchedulerOutput, tokens: list[int]) -> None:
        """Samples behind a wrong guess are -1, in place."""
        guesses = {
            row: [token for token in drafts if token >= 0]
            for row, drafts in zip(output.rows.tolist(), self._drafts(output), strict=True)
        }
        right: dict[int, bool] = {}
        for place, row in enumerate(output.sample_rows.tolist()):
            counts = right.get(row, True)
            guess = guesses[row].pop(0) if guesses.get(row) else None
            right[row] = counts and tokens[place] == guess
            if not counts:
                tokens[place] = -1

    def _drafts(self, output: SchedulerOutput) -> list[list[int]]:
        if output.draft_token_ids is None:
            return [[] for _ in output.rows]
        return output.draft_token_ids.tolist()

    def finish_copies(self, count: int | None = None, ok: bool = True) -> tuple[CopyDone, ...]:
        """Let the oldest open jobs end, all of them by default."""
        count = len(self.open_jobs) if count is None else count
        ended, self.open_jobs = self.open_jobs[:count], self.open_jobs[count:]
        for job in ended:
            self._copy(job, ok)
        return tuple(CopyDone(job.job_id, ok) for job in ended)

    def _start_copies(self, jobs: tuple[CopyJob, ...]) -> None:
        self.open_jobs += jobs

    def _copy(self, job: CopyJob, ok: bool) -> None:
        if job.kind is CopyKind.IMPORT:
            staged = self.staged.pop(job.staging)
            self.host[job.targets] = staged[job.sources] if ok else np.uint64(UNWRITTEN)
            return
        source, target = (
            (self.device, self.host) if job.kind is CopyKind.STORE else (self.host, self.device)
        )
        target[job.targets] = source[job.sources] if ok else np.uint64(UNWRITTEN)

    def _update_rows(self, output: SchedulerOutput) -> None:
        for row in output.removed_rows.tolist():
            del self.rows[row]
        for new in output.new_rows:
            assert new.row not in self.rows, f"row {new.row} is taken"
            self.rows[new.row] = _Row(new, new.token_ids.tolist(), new.block_table.tolist())
        for row, length in zip(output.cut_rows.tolist(), output.cut_lengths.tolist(), strict=True):
            assert length < len(self.rows[row].table), f"row {row} is shorter than {length}"
            del self.rows[row].table[length:]
        for row, block in zip(output.tail_rows.tolist(), output.tail_blocks.tolist(), strict=True):
            self.rows[row].table[-1] = block
        for row, block in zip(
            output.table_rows.tolist(), output.table_blocks.tolist(), strict=True
        ):
            self.device[block] = UNWRITTEN
            self.rows[row].table.append(block)

    def _forward(self, output: SchedulerOutput) -> None:
        starts, counts = output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist()
        assert sorted(counts, key=lambda count: count > 1) == counts, "single tokens come first"
        drafts = self._drafts(output)
        for row_id, start, count, draft in zip(
            output.rows.tolist(), starts, counts, drafts, strict=True
        ):
            row = self.rows[row_id]
            tokens = row.tokens + [token for token in draft if token >= 0]
            if not row.is_poisoned:
                self._poison(row, start)
            previous = self._slot(row, start - 1) if start else 0
            assert not start or previous != UNWRITTEN, f"row {row_id} reads an unwritten slot"
            for position in range(start, start + count):
                previous = fake_kv(previous, tokens[position], position)
                block = row.table[position // self.block_size]
                self.device[block, position % self.block_size] = previous
            self.num_computed_tokens += count

    def _poison(self, row: _Row, start: int) -> None:
        """Whatever stands where the row has computed nothing yet must not count."""
        row.is_poisoned = True
        for place in range(start // self.block_size, len(row.table)):
            first = start % self.block_size if place == start // self.block_size else 0
            self.device[row.table[place], first:] = UNWRITTEN

    def _slot(self, row: _Row, position: int) -> int:
        block = row.table[position // self.block_size]
        return int(self.device[block, position % self.block_size])

    def _digest(self, computed_row: int, row_id: int, offset: int = 0) -> int:
        """All that `row_id` attends to from the end of `computed_row`, or from `offset` guesses
        behind it, as one number."""
        row = self.rows[row_id]
        length = len(self.rows[computed_row].tokens)
        assert length == len(row.tokens), f"rows {computed_row} and {row_id} differ in length"
        length += offset
        slots = self.device[row.table].reshape(-1)[:length]
        assert bool((slots != UNWRITTEN).all()), f"row {row_id} attends to an unwritten slot"
        return int((slots * _weights(length)).sum(dtype=np.uint64))

    def _prompt_logprobs(
        self, output: SchedulerOutput
    ) -> dict[int, tuple[TokenLogprobs | None, ...]]:
        entries: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        for row_id, start, count in zip(
            output.rows.tolist(),
            output.num_computed_tokens.tolist(),
            output.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            row = self.rows[row_id]
            end = min(start + count, row.new.num_prompt_tokens)
            if row.new.sampling.prompt_logprobs is not None and start < end:
                entries[row_id] = tuple(
                    TokenLogprobs((row.tokens[p],), (-1.0,), 1) if p else None
                    for p in range(start, end)
                )
        return entries
