"""Continuous batching over KV blocks: which tokens run in the next step, and what came of them.

Knows requests, blocks and time as it is told; no tensor, no text, no transport. There is no
prefill and no decode phase: each sequence has `num_computed` chasing `num_tokens`, and chunked
prefill, prefix hit, resume, swap-in and recompute are that one path.

    add_request ─► queue ─► admission ─► row, blocks ─► step … step ─► last delta
                     ▲                      │
                     └───── preempted ◄─────┘

`schedule` of step N+1 may be called before `update` of step N: tokens in flight are counted but
not known, and blocks given back meanwhile are fenced until the steps that may touch them end.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from ..protos.errors import InvalidArgument, Overloaded
from ..protos.messages import (
    CacheIdentity,
    EngineRequest,
    FinishReason,
    RouteEvents,
    SequenceDelta,
    TokenLogprobs,
)
from .admission import Admission
from .beam_group import BeamGroup
from .beam_search import BeamSearch
from .block_hash import root_hash
from .books import Books
from .config import SchedulerConfig
from .exhaustion import Exhaustion
from .outbox import Outbox
from .output import CopyDone, Int32Array, ModelRunnerOutput, SchedulerOutput
from .request import Request, Sequence, SequenceState
from .request_limits import token_limit
from .stats import SchedulerStats, make_stats
from .step_plan import StepPlan, StepRecord


class Scheduler:
    """One replica's scheduler. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        identity: CacheIdentity,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.config = config
        self.epoch = 0
        self._identity = identity
        self._eos = frozenset(eos_token_ids)
        self._books = Books(config)
        self._batch = self._books.batch
        self._queue = self._books.queue
        self._outbox = Outbox()
        self._exhaustion = Exhaustion(self._books, self)
        self._admission = Admission(self._books, self)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._in_flight: deque[StepRecord] = deque()
        self._removed_rows: list[int] = []
        self._unannounced: dict[int, int] = {}  # row → sequence id, to be sent with the next step
        # Rows that all decode, the batch's version, and for how many steps more they do.
        self._steady: tuple[Int32Array, int, int] = np.empty(0, dtype=np.int32), 0, 0
        self._num_arrived = 0
        self._num_sequences = 0
        self._step = 0

    # ── requests come and go ──────────────────────────────────────────────────────────────

    def add_request(self, request: EngineRequest, now: float) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidArgument: it is empty, too long, or could never fit.
            LeaseRefused: the blocks of its lease are not there.
            Overloaded: too many wait already.
        """
        if request.request_key in self._requests:
            raise InvalidArgument("request_key", "is in use")
        limit = token_limit(request, self.config)
        self._refuse_if_full()
        self._books.leases.accept(request, limit, is_idle=not self._requests)
        self._num_arrived += 1
        identity = replace(self._identity, adapter=request.adapter, salt=request.cache_salt)
        entry = Request(request, self._num_arrived, now, limit, root_hash(identity))
        self._requests[entry.key] = entry
        if request.sampling.beam_width > 1 and request.sampling.max_tokens != 0:
            self._add_beams(request, entry)
        else:
            self._add_samples(request, entry)
        if entry.deadline is not None:
            self._note_deadline(entry.deadline, entry)
        for sequence in list(entry.sequences):
            if request.sampling.max_tokens != 0 and len(sequence.token_ids) >= limit:
                self._finish(sequence, FinishReason.LENGTH, now)
        self._release_first(entry)

    def abort_request(self, request_key: str) -> bool:
        """Forget a request at once; nothing is told of it any more. False: it is unknown."""
        request = self._requests.get(request_key)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self.drop(sequence)
        self._forget(request)
        self._outbox.forget(request_key)
        return True

    def finish_sequence(self, request_key: str, index: int, num_tokens: int, now: float) -> None:
        """End a sample at its first `num_tokens` output tokens: the gateway found a stop string."""
        request = self._requests.get(request_key)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.index == index and sequence.state is not SequenceState.FINISHED:
                self._outbox.forget(request_key, index)
                self._finish(sequence, FinishReason.STOP, now, num_output_tokens=num_tokens)

    def take_deltas(self) -> list[SequenceDelta]:
        """What clients are to be told since the last call."""
        return self._outbox.take()

    def has_unfinished(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    # ── a step ────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step. None: there is nothing to do now."""
        self._expire(now)
        plan = StepPlan(self._step + 1)
        self._drill(plan)
        self._plan_running(plan, now)
        # Who was just preempted shall not come back at the others' cost; if there are no others,
        # nothing else would ever run.
        if self._queue and (not plan.has_preempted or not self._batch):
            self._admission.admit(plan, now)
        while plan.is_empty and self._unblock():
            self._admission.admit(plan, now)
        self._announce(plan)
        self._books.tier.write_back()
        plan.copy_jobs = self._books.tier.take_jobs()
        if plan.is_empty:
            return None
        record = plan.launch(self._batch, self._removed_rows)
        self._removed_rows = []
        self._step = plan.step
        self._in_flight.append(record)
        return record.output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """Take in what a step produced, oldest step first."""
        record = self._in_flight.popleft()
        assert record.output.step == output.step == result.step, (
            f"result of step {result.step} for {output.step}; {record.output.step} is the oldest"
        )
        self._books.pool.finish_step(output.step)
        self._books.costs.observe_step(record.num_tokens, len(output.rows), result.elapsed_s)
        self._publish(record)
        if result.copies_done:
            self.copies_done(result.copies_done)
        for row in result.failed_rows:
            self._fail(record, row, now)
        for row, entries in result.prompt_logprobs.items():
            self._collect_prompt_logprobs(record, row, entries)
        self._append_tokens(record, result, now)
        if result.beam_candidates:
            self._take_offers(record, result, now)
        for request in record.prompts:
            self._release_held(request)
        for sequence_id in record.prefill_only:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._finish(sequence, FinishReason.LENGTH, now)

    def copies_done(self, done: tuple[CopyDone, ...]) -> None:
        """Copies between the tiers that have ended."""
        for copy in done:
            for sequence in self._books.tier.finish(copy):
                self._restart(sequence)

    # ── what others may know ──────────────────────────────────────────────────────────────

    def stats(self) -> SchedulerStats:
        """A snapshot of all counts."""
        for request in self._requests.values():
            self._books.leases.settle(request)
        return make_stats(self._books, self.epoch, self._step)

    def take_route_events(self) -> RouteEvents:
        """Route hashes that became, or ceased to be, resident since the last call."""
        return self._books.routes.take_events()

    def route_snapshot(self) -> tuple[RouteEvents, int, int]:
        """All resident route hashes and the digests of both tiers."""
        routes = self._books.routes
        return (routes.snapshot(), *routes.digests)

    def take_finished_leases(self) -> tuple[int, ...]:
        """Ids of leases that have ended since the last call."""
        return self._books.ledger.take_finished()

    def reset_prefix_cache(self) -> int:
        """Forget all cached content on every tier. Returns how many blocks had some.

        Running sequences keep their blocks and go on; nothing they hold is found by others.
        Swapped ones compute again.
        """
        for sequence in list(self._queue):
            self._forget_swapped(sequence)
        num_dropped = self._books.pool.unpublish_all() + self._books.host.clear()
        for sequence in self._sequences.values():
            self._books.manager.stop_publishing(sequence)
        self.epoch += 1
        return num_dropped

    def force_preemption(self) -> bool:
        """Preempt whoever would be first, though there is room: for drills and tests. False:
        there is nobody. Who has said nothing since it came in is spared, or it never would."""
        victim = self._exhaustion.choose_victim(1, must_have_progressed=True)
        if victim is not None:
            self.preempt(victim)
        return victim is not None

    def check_integrity(self) -> None:
        """Compare all books with each other. Raises IntegrityError with what contradicts."""
        self._books.check_integrity()

    # ── adding ────────────────────────────────────────────────────────────────────────────

    def _refuse_if_full(self) -> None:
        limit = self.config.max_num_waiting
        if limit is not None and len(self._queue) >= limit:
            self._books.counters.queue_full += 1
            wait_ms = self._books.costs.recompute_ms(self._queue.num_tokens)
            raise Overloaded(f"{limit} requests wait already", retry_after_s=wait_ms / 1000.0)

    def _add_samples(self, request: EngineRequest, entry: Request) -> None:
        """Samples without outputs come first: what one of them computes, the others share."""
        for sample in sorted(request.samples, key=lambda s: (bool(s.output_token_ids), s.index)):
            self._num_sequences += 1
            sequence = Sequence(self._num_sequences, entry, sample.index, sample.output_token_ids)
            sequence.state = SequenceState.HELD
            entry.sequences.append(sequence)
            self._sequences[sequence.id] = sequence

    def _add_beams(self, request: EngineRequest, entry: Request) -> None:
        """One beam computes the prompt; the others fork off it."""
        sampling = request.sampling
        ends = entry.stop_token_ids if sampling.ignore_eos else entry.stop_token_ids | self._eos
        max_tokens = entry.token_limit - entry.num_prompt_tokens
        search = BeamSearch(sampling.beam_width, sampling.length_penalty, ends, max_tokens)
        entry.beams = BeamGroup(search, self.new_beam(entry, entry.prompt))

    def _release_first(self, request: Request) -> None:
        """The first sample computes the prompt; those behind it are held until it has."""
        held = [s for s in request.sequences if s.state is SequenceState.HELD]
        others = (SequenceState.HELD, SequenceState.FINISHED)
        if held and all(s.state in others for s in request.sequences):
            self._queue.add(held[0])

    def _release_held(self, request: Request) -> None:
        """The prompt has been computed: the others take their turn and find it in the cache."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self._queue.add(sequence)

    def _note_deadline(self, deadline: float, request: Request) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            alive = self._requests.values()
            self._deadlines = [
                (r.deadline, r.arrival, r.key) for r in alive if r.deadline is not None
            ]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline, request.arrival, request.key))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, key = heappop(self._deadlines)
            request = self._requests.get(key)
            if request is None or request.arrival != arrival:
                continue
            self._books.counters.expired += 1
            for sequence in list(request.sequences):
                if sequence.state is not SequenceState.FINISHED:
                    self._finish(sequence, FinishReason.DEADLINE, now)

    # ── planning ──────────────────────────────────────────────────────────────────────────

    def _drill(self, plan: StepPlan) -> None:
        every = self.config.preempt_every
        if every is not None and plan.step % every == 0:
            plan.has_preempted = self.force_preemption()

    def _plan_running(self, plan: StepPlan, now: float) -> None:
        """Rows that compute one token after their prompt, for which room is made first; then
        those still behind their known tokens, oldest first, by chunks."""
        batch = self._batch
        if self._plan_steady(plan, now):
            return
        remaining = batch.remaining()
        is_decode = batch.num_computed >= batch.num_prompt
        is_decode &= remaining == 1
        rows = is_decode.nonzero()[0].astype(np.int32)
        budget = self.config.max_num_batched_tokens
        is_whole = len(rows) <= budget
        if not is_whole:  # turn by turn, so that each gets its share
            rows = np.sort(np.roll(rows, -self._step * budget)[:budget])
        plan.decode_rows = self._exhaustion.grow(plan, rows, now)
        remaining[is_decode] = 0
        if remaining.any():
            self._plan_prefills(plan, remaining)
        elif plan.decode_rows is rows and is_whole and len(rows) and not batch.num_beams:
            left = batch.compute_limit[rows] - batch.num_computed[rows]
            self._steady = rows, batch.version, int(left.min()) - 1

    def _plan_steady(self, plan: StepPlan, now: float) -> bool:
        """The same rows as in the step before, all of them plain decodes: False if they might
        differ, because a row changed hands or is at its end."""
        rows, version, num_steps = self._steady
        if not num_steps or version != self._batch.version:
            return False
        plan.decode_rows = self._exhaustion.grow(plan, rows, now)
        self._steady = rows, version, num_steps - 1 if plan.decode_rows is rows else 0
        return True

    def _plan_prefills(self, plan: StepPlan, remaining: Int32Array) -> None:
        batch = self._batch
        remaining[batch.sequence_ids == 0] = 0  # preempted a moment ago
        rows = np.flatnonzero(remaining)
        for row in rows[np.argsort(batch.arrival[rows])].tolist():
            self._admission.plan_chunk(plan, row, int(remaining[row]))

    def _unblock(self) -> bool:
        """Where all rows are beams that wait for siblings which wait for their blocks, one of them
        has to let go. False: something else is on its way, or nothing waits."""
        if not (self._queue and self._batch) or self._in_flight or self._books.tier.is_busy:
            return False
        rows = [row for row in self._batch.rows() if self._batch.is_beam[row]]
        if self._unannounced or not rows:
            return False
        youngest = max(rows, key=lambda row: self._batch.sequence(row).request.queue_key)
        self._park(self._batch.sequence(youngest))
        return True

    def _announce(self, plan: StepPlan) -> None:
        """Rows whose last token the runner did not choose, or whose fork it did not see."""
        for row in self._unannounced:
            plan.new_rows.append(self._admission.new_row(row))
        self._unannounced.clear()

    # ── beams ─────────────────────────────────────────────────────────────────────────────

    def new_beam(self, request: Request, token_ids: Int32Array) -> Sequence:
        """A sequence with these tokens, neither waiting nor running yet."""
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, request, 0, ())
        sequence.token_ids = token_ids
        sequence.state = SequenceState.HELD
        sequence.owes_prompt_logprobs &= not request.prompt_is_computed
        request.sequences.append(sequence)
        self._sequences[sequence.id] = sequence
        return sequence

    def announce(self, row: int, is_known: bool) -> None:
        """Send the row anew with the next step. is_known: the runner has it already."""
        if is_known:
            self._removed_rows.append(row)
        self._unannounced[row] = int(self._batch.sequence_ids[row])

    def _take_offers(self, record: StepRecord, result: ModelRunnerOutput, now: float) -> None:
        """What the beams of this step offer; a request whose beams all have goes on."""
        complete: dict[str, Request] = {}
        for place, candidates in result.beam_candidates.items():
            sequence = self._sequences.get(int(record.sample_ids[place]))
            if sequence is None or (beams := sequence.request.beams) is None:
                continue
            row = sequence.row
            known = len(sequence.token_ids) if row is None else self._batch.num_known(row)
            if record.ends[record.output.sample_entries[place]] != known:
                continue  # computed twice, and the search has gone on with the first
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            beams.offer(sequence, candidates)
            if row is None or self._batch.num_computed[row] < known:
                self._park(sequence)  # preempted meanwhile; its part is done
            complete[sequence.request.key] = sequence.request
        for request in complete.values():
            self._advance_beams(request, now)

    def _park(self, sequence: Sequence) -> None:
        """A beam that has offered and lost its KV waits for its siblings, not for blocks."""
        if sequence.row is None:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
        else:
            self._vacate(sequence)
        sequence.state = SequenceState.HELD

    def _advance_beams(self, request: Request, now: float) -> None:
        beams = request.beams
        assert beams is not None, f"{request.key} has no beams"
        if not beams.is_complete:
            return
        if not beams.advance(self._books, self):
            self._finish_beams(request, None, now)
            return
        request.sequences = list(beams.sequences)
        self._books.leases.settle(request)

    def _finish_beams(
        self, request: Request, reason: FinishReason | None, now: float, error: str = ""
    ) -> None:
        """Tell the best hypotheses and forget the request. reason: None = the search is over."""
        assert request.beams is not None, f"{request.key} has no beams"
        count = max(1, request.sampling.n)
        hypotheses = request.beams.search.best(count)
        usage = request.sequences[0]
        for index in range(count):
            found = hypotheses[index] if index < len(hypotheses) else None
            self._outbox.tell_hypothesis(usage, index, found, reason, error, now)
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self.drop(sequence)
        self._forget(request)

    def _lose_beam(self, sequence: Sequence, now: float) -> None:
        """A beam alone outgrew the pool: the others go on without it."""
        request = sequence.request
        beams = request.beams
        assert beams is not None, f"{sequence} is no beam"
        if len(beams.sequences) == 1:
            self._finish_beams(request, FinishReason.KV_EXHAUSTED, now)
            return
        beams.remove(sequence)
        self.drop(sequence)
        request.sequences = list(beams.sequences)
        self._advance_beams(request, now)

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
        beams = sequence.request.beams
        has_offered = beams is not None and beams.has_offered(sequence)
        if not has_offered and self._swap_out(sequence, row):
            counters.preemptions_swap += 1
        else:
            counters.preemptions_recompute += 1
            if sequence.owes_prompt_logprobs:
                sequence.prompt_logprobs.clear()
        self._vacate(sequence)
        sequence.num_preemptions += 1
        self._queue.add(sequence)
        if has_offered:
            self._park(sequence)
        self._books.leases.settle(sequence.request)

    def exhaust(self, sequence: Sequence, now: float) -> None:
        """Nothing else can make room: a sequence ends with what it has."""
        self._books.counters.kv_exhausted += 1
        if sequence.request.beams is not None:
            self._lose_beam(sequence, now)
        else:
            self._finish(sequence, FinishReason.KV_EXHAUSTED, now)

    def _swap_out(self, sequence: Sequence, row: int) -> bool:
        if not self._exhaustion.prefers_swap(row):
            return False
        manager, num_computed = self._books.manager, int(self._batch.num_computed[row])
        if not num_computed:
            return False
        blocks = manager.blocks(row)[: manager.num_blocks_for(num_computed)]
        # Without published contents, siblings' common blocks would move once for each.
        moves_twice = not self.config.enable_prefix_caching and manager.shares_full_block(row)
        if not moves_twice and self._books.tier.swap_out(sequence, blocks, num_computed):
            return True
        self._books.counters.swaps_refused += 1
        return False

    def _restart(self, sequence: Sequence) -> None:
        """A copy it needed has failed: it computes again, in its old place."""
        if sequence.row is None:
            self._forget_swapped(sequence)
            return
        self._vacate(sequence)
        self._queue.add(sequence)
        self._books.leases.settle(sequence.request)

    def _forget_swapped(self, sequence: Sequence) -> None:
        if sequence.swapped is not None:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
            self._queue.add(sequence)

    # ── taking in results ─────────────────────────────────────────────────────────────────

    def _publish(self, record: StepRecord) -> None:
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

    def _fail(self, record: StepRecord, row: int, now: float) -> None:
        """A row's logits were not finite: its sequence, or the samples it gave, end alone."""
        output = record.output
        failed = record.row_ids[output.rows == row].tolist()
        failed += record.sample_ids[output.sample_rows == row].tolist()
        for sequence_id in dict.fromkeys(failed):
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                error = "the model's output was not finite"
                self._finish(sequence, FinishReason.ERROR, now, error=error)

    def _collect_prompt_logprobs(
        self, record: StepRecord, row: int, entries: Iterable[TokenLogprobs | None]
    ) -> None:
        for sequence_id in record.row_ids[record.output.rows == row].tolist():
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.owes_prompt_logprobs and sequence.row == row:
                room = sequence.num_prompt_tokens - len(sequence.prompt_logprobs)
                sequence.prompt_logprobs += list(entries)[:room]

    def _append_tokens(self, record: StepRecord, result: ModelRunnerOutput, now: float) -> None:
        """Sampled tokens become known: append, tell, and end what ends."""
        batch, rows, tokens = self._batch, record.output.sample_rows, result.token_ids
        places: list[int] | range = range(len(rows))
        if batch.num_beams or batch.version != record.version:
            is_current = batch.sequence_ids[rows] == record.sample_ids
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
        for place, row, token, number in zip(
            places, row_list, token_list, number_list, strict=True
        ):
            if row in special or place in result.logprobs:
                sequence = batch.sequence(row)
                self._tell(sequence, token, number, result.logprobs.get(place), now)
            else:
                self._outbox.tell_tokens(batch, [row], [token], [number])

    def _append_to_waiting(
        self, record: StepRecord, result: ModelRunnerOutput, places: list[int], now: float
    ) -> None:
        """Tokens of sequences that lost their rows while the step was in flight."""
        for place in places:
            sequence = self._sequences.get(int(record.sample_ids[place]))
            if sequence is None or not sequence.num_pending:
                continue
            self._queue.remove(sequence)
            token = int(result.token_ids[place])
            number = len(sequence.token_ids) - sequence.num_prompt_tokens
            sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
            sequence.num_pending -= 1
            self._queue.add(sequence)
            self._tell(sequence, token, number, result.logprobs.get(place), now)

    def _tell(
        self,
        sequence: Sequence,
        token: int,
        number: int,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> None:
        """A token that may be a first or a last one. number: its place in the output."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            if sequence.row is not None:
                self._batch.expect_plain_tokens(sequence.row, sequence)
        reason = sequence.stop_reason(token, number + 1, self._eos)
        self._outbox.tell_token(sequence, token, number, logprobs, reason, now)
        if reason is not None:
            self._end(sequence)

    # ── ending ────────────────────────────────────────────────────────────────────────────

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        num_output_tokens: int | None = None,
        error: str = "",
    ) -> None:
        """End a sequence without a new token, and say so. Beams end together."""
        if sequence.request.beams is not None:
            self._finish_beams(sequence.request, reason, now, error)
            return
        if num_output_tokens is None:
            row = sequence.row
            known = len(sequence.token_ids) if row is None else self._batch.num_known(row)
            num_output_tokens = known - sequence.num_prompt_tokens
        self._outbox.tell_end(sequence, num_output_tokens, reason, error, now)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Its last delta is written: nothing of it stays."""
        request = sequence.request
        self.drop(sequence)
        if request.is_finished:
            self._forget(request)
            return
        if not request.prompt_is_computed:
            self._release_first(request)
        self._books.leases.settle(request)

    def drop(self, sequence: Sequence) -> None:
        """Take everything from a sequence, wherever it is in its life."""
        if sequence.row is not None:
            self._vacate(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
        sequence.state = SequenceState.FINISHED
        self._sequences.pop(sequence.id, None)

    def _vacate(self, sequence: Sequence) -> None:
        """Take blocks and row; what a step in flight may still touch is fenced."""
        assert sequence.row is not None, f"{sequence} has no row"
        if self._batch.is_loading[sequence.row]:
            self._books.tier.drop(sequence)
        self._books.manager.release(sequence.row, self.fence)
        sequence.last_step = self.fence
        row = self._batch.leave(sequence)
        # A row that is still to be announced is unknown to the runner, or removed already.
        if self._unannounced.pop(row, None) is None:
            self._removed_rows.append(row)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.key, None)
        self._books.ledger.close(request.key)
