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
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from ..protos.errors import InvalidArgument, Overloaded
from ..protos.messages import (
    CacheIdentity,
    EngineRequest,
    FinishReason,
    PoolMap,
    RouteEvents,
    SequenceDelta,
)
from .admission import Admission
from .block_hash import root_hash
from .block_map import make_map
from .books import Books
from .config import SchedulerConfig
from .exhaustion import Exhaustion
from .outbox import Outbox
from .output import CopyDone, Int32Array, ModelRunnerOutput, SchedulerOutput
from .request import Request, SequenceState
from .request_life import RequestLife
from .request_limits import token_limit
from .speculation import Speculation
from .stats import SchedulerStats, make_stats
from .step_plan import StepPlan, StepRecord
from .step_results import StepResults


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
        self._books = Books(config)
        self._batch = self._books.batch
        self._queue = self._books.queue
        self._outbox = Outbox()
        self._in_flight: deque[StepRecord] = deque()
        eos = frozenset(eos_token_ids)
        self._life = RequestLife(self._books, self._outbox, self._in_flight, eos)
        self._speculation = Speculation(self._books) if config.num_speculative_tokens else None
        self._results = StepResults(self._books, self._outbox, self._life, eos, self._speculation)
        self._exhaustion = Exhaustion(self._books, self._life)
        self._admission = Admission(self._books, self._life)
        self.exports = self._books.exports
        self.imports = self._books.imports
        self._requests = self._life.requests
        self._sequences = self._life.sequences
        self._deadlines: list[tuple[float, int, str]] = []
        # Rows that all decode, the batch's version, and for how many steps more they do.
        self._steady: tuple[Int32Array, int, int] = np.empty(0, dtype=np.int32), 0, 0
        self._num_arrived = 0
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
        if entry.is_beam_search:
            self._life.add_beams(request, entry)
        else:
            self._life.add_samples(request, entry)
        if entry.deadline is not None:
            self._note_deadline(entry.deadline, entry)
        for sequence in list(entry.sequences):
            if request.sampling.max_tokens != 0 and len(sequence.token_ids) >= limit:
                self._life.finish(sequence, FinishReason.LENGTH, now)
        if request.transfer is None or not self.imports.hold(entry, request.transfer, now):
            self._life.release_first(entry)

    def abort_request(self, request_key: str) -> bool:
        """Forget a request at once; nothing is told of it any more. False: it is unknown."""
        request = self._requests.get(request_key)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._life.drop(sequence)
        self._life.forget(request)
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
                self._life.finish(sequence, FinishReason.STOP, now, num_output_tokens=num_tokens)

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
        self._end_transfers(now)
        plan = StepPlan(self._step + 1)
        self._drill(plan)
        self._plan_running(plan, now)
        self._plan_others(plan, now)
        # Who was just preempted shall not come back at the others' cost; if there are no others,
        # nothing else would ever run.
        if self._queue and (not plan.has_preempted or not self._batch):
            self._admission.admit(plan, now)
        while plan.is_empty and self._unblock():
            self._plan_running(plan, now)
            self._admission.admit(plan, now)
        self._plan_drafts(plan)
        self._announce(plan)
        self._books.tier.write_back()
        plan.copy_jobs = self._books.tier.take_jobs()
        if plan.is_empty:
            return None
        record = plan.launch(
            self._batch, self._life.take_removed_rows(), self._life.take_cut_rows()
        )
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
        self._observe(record, result.elapsed_s)
        self._results.publish(record)
        if result.copies_done:
            self.copies_done(result.copies_done)
        for row in result.failed_rows:
            self._results.fail(record, row, now)
        for row, entries in result.prompt_logprobs.items():
            self._results.collect_prompt_logprobs(record, row, entries)
        self._results.append_tokens(record, result, now)
        if record.drafts:
            self._results.append_drafted(record, result, now)
        if result.beam_candidates:
            self._life.beams.take_offers(record, result, now)
        for request in record.prompts:
            self._life.release_held(request)
        for sequence_id in record.prefill_only:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._life.finish(sequence, FinishReason.LENGTH, now)

    def copies_done(self, done: tuple[CopyDone, ...]) -> None:
        """Copies between the tiers that have ended."""
        for copy in done:
            for sequence in self._books.tier.finish(copy):
                self._life.restart(sequence)

    # ── what others may know ──────────────────────────────────────────────────────────────

    def stats(self) -> SchedulerStats:
        """A snapshot of all counts."""
        for request in self._requests.values():
            self._books.leases.settle(request)
        return make_stats(self._books, self.epoch, self._step)

    def block_maps(self, max_cells: int) -> tuple[PoolMap, PoolMap]:
        """The blocks of device and host, each as at most so many cells."""
        books = self._books
        return make_map(books.pool.states(), max_cells), make_map(books.host.states(), max_cells)

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
            self._life.forget_swapped(sequence)
        self.exports.void()
        self.imports.void()
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
            self._life.preempt(victim)
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
                    self._life.finish(sequence, FinishReason.DEADLINE, now)

    def _end_transfers(self, now: float) -> None:
        """Who waited for blocks of another replica enters the queue, come what came of it."""
        self.exports.expire(now)
        self.imports.expire(now)
        for request in self.imports.take_released():
            if self._requests.get(request.key) is request:
                self._life.release_first(request)

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
        if self._speculation is not None and self._in_flight:
            self._speculation.overlaps = True
            remaining[self._speculation.waiting_rows()] = 0
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

    def _plan_others(self, plan: StepPlan, now: float) -> None:
        """Where all that had their turn had to go themselves, others may run."""
        num_rows = 0
        while plan.is_empty and plan.has_preempted and len(self._batch) != num_rows:
            num_rows = len(self._batch)
            self._plan_running(plan, now)

    def _plan_steady(self, plan: StepPlan, now: float) -> bool:
        """The same rows as in the step before, all of them plain decodes: False if they might
        differ, because a row changed hands or is at its end."""
        rows, version, num_steps = self._steady
        if not num_steps or version != self._batch.version:
            return False
        if self._speculation is not None and self._in_flight:
            return False  # some may have to wait for the token in flight
        plan.decode_rows = self._exhaustion.grow(plan, rows, now)
        self._steady = rows, version, num_steps - 1 if plan.decode_rows is rows else 0
        return True

    def _plan_prefills(self, plan: StepPlan, remaining: Int32Array) -> None:
        batch = self._batch
        remaining[batch.sequence_ids == 0] = 0  # preempted a moment ago
        rows = np.flatnonzero(remaining)
        for row in rows[np.argsort(batch.arrival[rows])].tolist():
            self._admission.plan_chunk(plan, row, int(remaining[row]))

    def _plan_drafts(self, plan: StepPlan) -> None:
        """Guesses, in what room everything else has left."""
        if self._speculation is None or not len(plan.decode_rows):
            return
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        for row, draft in self._speculation.propose(plan.decode_rows, budget):
            count = self._exhaustion.room_for_drafts(plan, row, len(draft))
            if count > 0:
                plan.drafts.append((row, draft[:count]))
        if plan.drafts:
            self._steady = plan.decode_rows, 0, 0

    def _observe(self, record: StepRecord, elapsed_s: float) -> None:
        """Learn from how long a step took."""
        num_rows = len(record.output.rows)
        self._books.costs.observe_step(record.num_tokens, num_rows, elapsed_s)
        if self._speculation is not None and record.num_tokens == num_rows:
            self._speculation.observe_step(num_rows, record.num_drafts, elapsed_s)

    def _unblock(self) -> bool:
        """Where all rows are beams that wait for siblings which wait for their blocks, or for
        blocks that are promised to others, one of them has to let go: if possible one that has
        made its offer. False: something else is on its way, or nothing waits."""
        if not (self._queue and self._batch) or self._in_flight or self._books.tier.is_busy:
            return False
        rows = [row for row in self._batch.rows() if self._batch.is_beam[row]]
        if self._life.has_unannounced or not rows:
            return False
        beams, sequences = self._life.beams, [self._batch.sequence(row) for row in rows]
        sequence = max(sequences, key=lambda s: (beams.has_offered(s), s.request.queue_key))
        if beams.has_offered(sequence):
            beams.park(sequence)
        else:
            self._life.preempt(sequence)
        return True

    def _announce(self, plan: StepPlan) -> None:
        """Rows whose last token the runner did not choose, or whose fork it did not see."""
        for row in self._life.take_unannounced():
            plan.new_rows.append(self._admission.new_row(row))
