"""Continuous batching over KV blocks: which tokens run in the next step, and what came of them.

Knows requests, blocks and time as it is told; no tensor, no text, no transport. There is no
prefill and no decode phase: each sequence has `num_computed` chasing `num_tokens`, and chunked
prefill, prefix hit, resume and recompute are that one path.

    add_request ─► queue ─► admit ─► row, blocks ─► step … step ─► last delta
                     ▲                   │
                     └──── preempted ◄───┘

`schedule` of step N+1 may be called before `update` of step N: tokens in flight are counted but
not known, and blocks given back meanwhile are fenced until the steps that may touch them end.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from ..protos.errors import InvalidArgument
from ..protos.messages import (
    AdmissionClass,
    BlockCounts,
    CacheIdentity,
    EngineRequest,
    FinishReason,
    RouteEvents,
    SequenceDelta,
    TokenLogprobs,
)
from .block_hash import root_hash
from .block_pool import BlockPool
from .config import SchedulerConfig
from .content_index import ContentIndex
from .kv_cache_manager import KVCacheManager
from .lease_ledger import LeaseLedger
from .output import CopyDone, Int32Array, ModelRunnerOutput, NewRow, SchedulerOutput
from .preemption import Candidate, VictimChoice
from .request import Request, Sequence, SequenceState
from .request_queue import RequestQueue
from .route_residency import RouteResidency
from .running_batch import RunningBatch
from .stats import SchedulerStats
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
        self._identity = identity
        self._eos = frozenset(eos_token_ids)
        self._eos_array = np.array(eos_token_ids, dtype=np.int32)
        self._batch = RunningBatch(config.max_num_sequences, config.max_context)
        self._routes = RouteResidency()
        capacity = config.num_blocks + config.num_host_blocks
        self._index = ContentIndex(capacity, self._routes, config.hash_bits)
        self._pool = BlockPool(config.num_blocks, self._index)
        self._manager = KVCacheManager(self._batch, self._pool, self._index, config.block_size)
        self._queue = RequestQueue()
        self._ledger = LeaseLedger()
        self._victims = VictimChoice(self._manager.blocks, self._pool.ref_count)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._in_flight: deque[StepRecord] = deque()
        self._removed_rows: list[int] = []
        self._deltas: list[SequenceDelta] = []
        self._num_arrived = 0
        self._num_sequences = 0
        self._step = 0
        self._epoch = 0
        self._hit_tokens = self._query_tokens = 0
        self._preemptions_recompute = 0
        self._admissions_deferred = self._rows_held = 0
        self._kv_exhausted = self._expired = self._copies_on_write = 0

    # ── requests come and go ──────────────────────────────────────────────────────────────

    def add_request(self, request: EngineRequest, now: float) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidArgument: it is empty, too long, or could never fit.
            LeaseRefused: the blocks of its lease are not there.
        """
        token_limit = self._validate(request)
        self._accept_lease(request, token_limit)
        self._num_arrived += 1
        identity = replace(self._identity, adapter=request.adapter, salt=request.cache_salt)
        entry = Request(request, self._num_arrived, now, token_limit, root_hash(identity))
        self._requests[entry.key] = entry
        for sample in sorted(request.samples, key=lambda s: (bool(s.output_token_ids), s.index)):
            self._num_sequences += 1
            sequence = Sequence(self._num_sequences, entry, sample.index, sample.output_token_ids)
            sequence.state = SequenceState.HELD
            entry.sequences.append(sequence)
            self._sequences[sequence.id] = sequence
        if entry.deadline is not None:
            self._note_deadline(entry.deadline, entry)
        for sequence in list(entry.sequences):
            if request.sampling.max_tokens != 0 and len(sequence.token_ids) >= token_limit:
                self._finish(sequence, FinishReason.LENGTH, now)
        self._release_first(entry)

    def abort_request(self, request_key: str) -> bool:
        """Forget a request at once; nothing is told of it any more. False: it is unknown."""
        request = self._requests.get(request_key)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._drop(sequence)
        self._forget(request)
        self._deltas = [delta for delta in self._deltas if delta.request_key != request_key]
        return True

    def finish_sequence(self, request_key: str, index: int, num_tokens: int, now: float) -> None:
        """End a sample at its first `num_tokens` output tokens: the gateway found a stop string."""
        request = self._requests.get(request_key)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.index == index and sequence.state is not SequenceState.FINISHED:
                self._deltas = [
                    d for d in self._deltas if (d.request_key, d.index) != (request_key, index)
                ]
                self._finish(sequence, FinishReason.STOP, now, num_output_tokens=num_tokens)

    def take_deltas(self) -> list[SequenceDelta]:
        """What clients are to be told since the last call."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def has_unfinished(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    # ── a step ────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step. None: there is nothing to do now."""
        self._expire(now)
        plan = StepPlan(self._step + 1)
        self._plan_decodes(plan, now)
        self._plan_prefills(plan)
        if not plan.has_preempted:
            self._admit(plan, now)
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
        self._pool.finish_step(output.step)
        self.copies_done(result.copies_done)
        self._publish(record)
        for row in result.failed_rows:
            self._fail(record, row, now)
        for row, entries in result.prompt_logprobs.items():
            self._collect_prompt_logprobs(record, row, entries)
        self._append_tokens(record, result, now)
        for request in record.prompts:
            self._release_held(request)
        for sequence_id in record.prefill_only:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.row is not None:
                self._finish(sequence, FinishReason.LENGTH, now)

    def copies_done(self, done: tuple[CopyDone, ...]) -> None:
        """Copies between the tiers that have ended."""
        for copy in done:
            raise AssertionError(f"unknown copy job {copy.job_id}")

    # ── what others may know ──────────────────────────────────────────────────────────────

    def stats(self) -> SchedulerStats:
        """A snapshot of all counts."""
        self._settle_leases()
        return SchedulerStats(
            epoch=self._epoch,
            steps=self._step,
            device=self._pool.stats(),
            host=BlockCounts(),
            num_waiting=len(self._queue),
            num_running=len(self._batch),
            waiting_prefill_tokens=self._queue.num_tokens,
            leases=self._ledger.uses(),
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
            preemptions_recompute=self._preemptions_recompute,
            preemptions_swap=0,
            admissions_deferred=self._admissions_deferred,
            rows_held=self._rows_held,
            kv_exhausted=self._kv_exhausted,
            expired=self._expired,
            blocks_evicted=self._pool.num_evicted,
            copies_on_write=self._copies_on_write,
            collisions_refused=self._index.num_refused,
            leases_refused=self._ledger.num_refused,
            route_digests=self._routes.digests,
        )

    def take_route_events(self) -> RouteEvents:
        """Route hashes that became, or ceased to be, resident since the last call."""
        return self._routes.take_events()

    def route_snapshot(self) -> tuple[RouteEvents, int, int]:
        """All resident route hashes and the digests of both tiers."""
        return (self._routes.snapshot(), *self._routes.digests)

    def take_finished_leases(self) -> tuple[int, ...]:
        """Ids of leases that have ended since the last call."""
        return self._ledger.take_finished()

    def reset_prefix_cache(self) -> int:
        """Forget all cached content on every tier. Returns how many blocks had some.

        Running sequences keep their blocks and go on; nothing they hold is found by others.
        """
        num_dropped = self._pool.unpublish_all()
        for sequence in self._sequences.values():
            self._manager.stop_publishing(sequence)
        self._epoch += 1
        return num_dropped

    def force_preemption(self) -> bool:
        """Preempt whoever would be first, though there is room: for tests and fault drills.

        To be called between steps. False: nobody may be preempted.
        """
        victim = self._choose_victim(1)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def check_integrity(self) -> None:
        """Compare all books with each other. Raises IntegrityError with what contradicts."""
        self._pool.check_integrity()
        self._index.check_integrity()
        self._batch.check_integrity()
        self._manager.check_integrity()
        self._queue.check_integrity()
        self._ledger.check_integrity()

    # ── adding ────────────────────────────────────────────────────────────────────────────

    def _validate(self, request: EngineRequest) -> int:
        """Refuse what can never run. Returns the most tokens a sample may have."""
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        limit = self.config.max_context
        if request.request_key in self._requests:
            raise InvalidArgument("request_key", "is in use")
        if not num_prompt:
            raise InvalidArgument("prompt", "is empty")
        if min(request.prompt_token_ids) < 0:
            raise InvalidArgument("prompt", "holds a negative token id")
        if sampling.max_tokens is not None and sampling.max_tokens < 0:
            raise InvalidArgument("sampling.max_tokens", "is negative")
        if not request.samples:
            raise InvalidArgument("sampling.n", "is zero")
        num_known = num_prompt + max(len(s.output_token_ids) for s in request.samples)
        num_least = num_known if sampling.max_tokens == 0 else num_prompt + 1
        if max(num_known, num_least) > limit:
            raise InvalidArgument("prompt", f"has {num_prompt} tokens, the context holds {limit}")
        if self._manager.num_blocks_for(num_known) > self.config.num_blocks:
            raise InvalidArgument(
                "prompt",
                f"needs {self._manager.num_blocks_for(num_known)} blocks, the pool has "
                f"{self.config.num_blocks}",
            )
        if sampling.max_tokens is None:
            if request.admission_class is AdmissionClass.GUARANTEED:
                raise InvalidArgument("sampling.max_tokens", "must be set for a guarantee")
            return limit
        return min(num_prompt + sampling.max_tokens, limit)

    def _accept_lease(self, request: EngineRequest, token_limit: int) -> None:
        """Enter the lease into the ledger, or refuse it."""
        is_guaranteed = request.admission_class is AdmissionClass.GUARANTEED
        if request.lease_id is None and not is_guaranteed:
            return
        num_blocks = request.lease_blocks
        if is_guaranteed:
            num_blocks = self._worst_case(request, token_limit)
            if num_blocks > self.config.num_blocks:
                raise InvalidArgument(
                    "sampling.max_tokens",
                    f"a guarantee would take {num_blocks} of {self.config.num_blocks} blocks",
                )
        promised = self._ledger.num_reserved if is_guaranteed else self._ledger.num_unused
        available = self._pool.num_free + self._pool.num_fenced - promised
        if num_blocks > available and (is_guaranteed or self._requests):
            raise self._ledger.refuse(f"{num_blocks} blocks leased, {available} available")
        self._ledger.accept(request.request_key, request.lease_id, num_blocks, is_guaranteed)

    def _worst_case(self, request: EngineRequest, token_limit: int) -> int:
        """Blocks if every sample runs to its limit: full prompt blocks once, the rest each."""
        num_prompt = len(request.prompt_token_ids)
        shared = num_prompt // self.config.block_size
        longest = self._manager.num_blocks_for(max(num_prompt, token_limit - 1))
        return shared + len(request.samples) * (longest - shared)

    def _release_first(self, request: Request) -> None:
        """The first sample computes the prompt; those behind it are held until it has."""
        held = [s for s in request.sequences if s.state is SequenceState.HELD]
        is_first = all(
            s.state in (SequenceState.HELD, SequenceState.FINISHED) for s in request.sequences
        )
        if held and is_first:
            self._queue.add(held[0])

    def _release_held(self, request: Request) -> None:
        """The prompt has been computed, or its computer has gone: the others take their turn."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self._queue.add(sequence)

    def _note_deadline(self, deadline: float, request: Request) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            alive = (r for r in self._requests.values() if r.deadline is not None)
            self._deadlines = [(r.deadline, r.arrival, r.key) for r in alive if r.deadline]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline, request.arrival, request.key))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, key = heappop(self._deadlines)
            request = self._requests.get(key)
            if request is None or request.arrival != arrival:
                continue
            self._expired += 1
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED:
                    self._finish(sequence, FinishReason.DEADLINE, now)

    # ── planning ──────────────────────────────────────────────────────────────────────────

    def _plan_decodes(self, plan: StepPlan, now: float) -> None:
        """Rows that compute one token after their prompt; room is made for them first."""
        batch = self._batch
        is_decode = (batch.remaining() == 1) & (batch.num_computed >= batch.num_prompt)
        rows = np.flatnonzero(is_decode).astype(np.int32)
        budget = self.config.max_num_batched_tokens
        if len(rows) > budget:  # turn by turn, so that each gets its share
            rows = np.sort(np.roll(rows, -self._step * budget)[:budget])
        growing = self._manager.needs_block(rows)
        tails = self._manager.shared_tails(rows)
        if len(growing) or tails:
            rows = self._grow(plan, rows, growing, tails, now)
        plan.decode_rows = rows

    def _plan_prefills(self, plan: StepPlan) -> None:
        """Rows that are still behind their known tokens, oldest first, by chunks."""
        batch = self._batch
        remaining = batch.remaining()
        remaining[plan.decode_rows] = 0
        behind = np.flatnonzero((remaining > 1) | (batch.num_computed < batch.num_prompt))
        for row in sorted(behind.tolist(), key=lambda row: int(batch.arrival[row])):
            if remaining[row] > 0:
                self._plan_chunk(plan, row, int(remaining[row]))

    def _plan_chunk(self, plan: StepPlan, row: int, remaining: int) -> None:
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        chunk = min(remaining, budget, self.config.prefill_chunk or remaining)
        if chunk < 1:
            return
        plan.chunks.append((row, chunk))
        request = self._batch.sequence(row).request
        end = int(self._batch.num_computed[row]) + chunk
        if not request.prompt_is_computed and end >= request.num_prompt_tokens:
            request.prompt_is_computed = True
            plan.prompts.append(request)
            self._fork_samples(plan, row, request, end)

    def _fork_samples(self, plan: StepPlan, parent: int, request: Request, end: int) -> None:
        """Samples that begin where the prompt ends share its blocks and its logits; for which
        there is no row now, wait and find the prompt in the cache."""
        ends_here = end == int(self._batch.num_tokens[parent]) == request.num_prompt_tokens
        if not ends_here or request.token_limit == request.num_prompt_tokens:
            return
        first = self._batch.sequence(parent)
        for sequence in request.sequences:
            is_fresh = sequence.is_fresh and sequence.state is SequenceState.HELD
            if is_fresh and self._batch.num_free:
                row = self._manager.fork(parent, sequence, end)
                sequence.admitted_s, sequence.cached_tokens = first.admitted_s, first.cached_tokens
                plan.forks.append((parent, row))
                plan.new_rows.append(self._new_row(row))
        self._settle_lease(request)

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Let waiting sequences in while there are rows, tokens and blocks for their whole known
        length. Nobody is passed over."""
        while self._batch.num_free and plan.num_tokens < self.config.max_num_batched_tokens:
            sequence = self._queue.peek()
            if sequence is None or sequence.num_pending:
                return
            if self._manager.num_blocks_for(len(sequence.token_ids)) > self.config.num_blocks:
                self._exhaust(sequence, now)
                continue
            row = self._take_in(sequence)
            if row is None:
                self._admissions_deferred += 1
                return
            if sequence.admitted_s is None:
                sequence.admitted_s = now
            plan.new_rows.append(self._new_row(row))
            self._plan_chunk(plan, row, int(self._batch.remaining()[row]))

    def _take_in(self, sequence: Sequence) -> int | None:
        """Blocks and a row for a waiting sequence, if there are enough."""
        use_cache = self.config.enable_prefix_caching
        looks_up = use_cache and not sequence.owes_prompt_logprobs
        prefix = self._manager.find_prefix(sequence) if looks_up else self._manager.no_prefix()
        request = sequence.request
        available = self._pool.num_free - self._ledger.reserved_for_others(request.key)
        if len(self._batch):
            available -= int(self.config.watermark * self.config.num_blocks)
        needed = self._manager.num_blocks_for(len(sequence.token_ids)) - prefix.num_blocks
        if needed + prefix.num_idle > available:
            return None
        self._queue.remove(sequence)
        row = self._manager.admit(sequence, prefix, publishes=use_cache)
        hit_tokens = prefix.num_blocks * self.config.block_size
        self._hit_tokens += hit_tokens
        self._query_tokens += len(sequence.token_ids)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(hit_tokens, sequence.num_prompt_tokens)
        self._settle_lease(request)
        return row

    def _new_row(self, row: int) -> NewRow:
        sequence = self._batch.sequence(row)
        return NewRow(
            row=row,
            sequence_id=sequence.id,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_table=self._manager.table(row),
            sampling=sequence.request.sampling,
            sample_index=sequence.index,
        )

    # ── when blocks run out ───────────────────────────────────────────────────────────────

    def _grow(
        self, plan: StepPlan, rows: Int32Array, growing: Int32Array, tails: list[int], now: float
    ) -> Int32Array:
        """Give each of `rows` the block it must write to. Returns the rows that can run.

        The needs of all are summed before any is met: victims are chosen before anything is
        scheduled, and none if blocks given back are on their way.
        """
        wanting = growing.tolist() + tails
        while (short := self._shortage(wanting)) > self._pool.num_fenced:
            victim = self._choose_victim(short - self._pool.num_fenced)
            if victim is None:
                break
            alone = len(self._batch) == 1 and not self._ledger.num_reserved
            if alone:
                self._exhaust(victim, now)
            else:
                self._preempt(victim)
                plan.has_preempted = True
            wanting = [row for row in wanting if self._batch.sequences[row] is not None]
        rows = rows[self._batch.sequence_ids[rows] != 0]
        if short > 0:
            wanting.sort(key=lambda row: int(self._batch.arrival[row]))
        held = [row for row in wanting if not self._give_block(plan, row)]
        self._rows_held += len(held)
        return rows[~np.isin(rows, held)] if held else rows

    def _shortage(self, wanting: list[int]) -> int:
        """How many blocks too few there are now for all of `wanting`, less than 1 = none."""
        tails = [row for row in wanting if not self._is_full(row)]
        if not self._ledger.num_reserved:
            num_needed = len(wanting) - len(tails) + self._manager.num_copies_on_write(tails)
            return num_needed - self._pool.num_free
        # A row counts in full here even where it might be the last sharer of its tail.
        guaranteed = sum(self._batch.sequence(row).request.is_guaranteed for row in wanting)
        others = len(wanting) - guaranteed
        reserved = max(self._ledger.num_reserved, guaranteed) if others else guaranteed
        return others + reserved - self._pool.num_free

    def _is_full(self, row: int) -> bool:
        return bool(self._batch.num_computed[row] >= self._batch.capacity[row])

    def _give_block(self, plan: StepPlan, row: int) -> bool:
        """A block to append, or one for the copy of a shared tail. False: there is none for it."""
        request = self._batch.sequence(row).request
        has_room = self._pool.num_free > self._ledger.reserved_for_others(request.key)
        if self._is_full(row):
            blocks = self._pool.allocate(1) if has_room else None
            if blocks is None:
                return False
            self._manager.append([row], blocks)
            plan.table_rows.append(row)
            plan.table_blocks += blocks
        elif self._manager.shares_tail(row):
            if not has_room:
                return False
            copy = self._manager.copy_on_write(row, self._fence)
            plan.device_copies.append(copy)
            plan.tail_rows.append(row)
            plan.tail_blocks.append(copy.target)
            self._copies_on_write += 1
        self._settle_lease(request)
        return True

    def _choose_victim(self, num_needed: int) -> Sequence | None:
        """The first of the sequences that must go, or None if nobody may be preempted."""
        candidates = [
            self._candidate(row)
            for row in self._batch.rows()
            if not self._batch.is_loading[row]
            and not self._batch.sequence(row).request.is_guaranteed
        ]
        if not candidates:
            return None
        victims = self._victims.choose(candidates, num_needed)
        return self._batch.sequence(victims[0].row)

    def _candidate(self, row: int) -> Candidate:
        sequence = self._batch.sequence(row)
        return Candidate(
            row=row,
            class_rank=sequence.request.class_rank,
            priority=sequence.request.priority,
            num_preemptions=sequence.num_preemptions,
            cost_ms=float(self._batch.num_computed[row]),
            arrival=sequence.request.arrival,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and row; it waits in its old place and computes again."""
        self._vacate(sequence)
        sequence.num_preemptions += 1
        self._preemptions_recompute += 1
        if sequence.owes_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self._queue.add(sequence)
        self._settle_lease(sequence.request)

    def _exhaust(self, sequence: Sequence, now: float) -> None:
        """Nothing else can make room: it ends with what it has."""
        self._kv_exhausted += 1
        self._finish(sequence, FinishReason.KV_EXHAUSTED, now)

    # ── taking in results ─────────────────────────────────────────────────────────────────

    def _publish(self, record: StepRecord) -> None:
        """Blocks that this step filled may be found from now on."""
        batch, rows = self._batch, record.output.rows
        due = (record.ends >= batch.next_publish[rows]) & (
            batch.sequence_ids[rows] == record.row_ids
        )
        if due.any():
            ends = record.ends[due].tolist()
            for row, end in zip(rows[due].tolist(), ends, strict=True):
                self._manager.publish(row, end)

    def _fail(self, record: StepRecord, row: int, now: float) -> None:
        for ids, rows in (
            (record.row_ids, record.output.rows),
            (record.sample_ids, record.output.sample_rows),
        ):
            for sequence_id in ids[rows == row].tolist():
                sequence = self._sequences.get(sequence_id)
                if sequence is not None and sequence.state is not SequenceState.FINISHED:
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
        is_current = batch.sequence_ids[rows] == record.sample_ids
        if not is_current.all():
            stale = np.flatnonzero(~is_current).tolist()
            self._append_to_waiting(record, result, stale, now)
        places = np.flatnonzero(is_current)
        rows, tokens = rows[places], tokens[places]
        positions = batch.num_tokens[rows] - batch.num_pending[rows]
        batch.token_ids[rows, positions] = tokens
        batch.num_pending[rows] -= 1
        known = positions + 1
        may_end = known >= batch.token_limit[rows]
        may_end |= batch.has_stop_ids[rows]
        may_end |= np.isin(tokens, self._eos_array)
        numbers = positions - batch.num_prompt[rows]
        is_special = may_end | (numbers == 0)
        specials = set(places[is_special].tolist())
        keys, indexes, append = batch.keys, batch.indexes, self._deltas.append
        has_logprobs = bool(result.logprobs)
        for place, row, token, number in zip(
            places.tolist(), rows.tolist(), tokens.tolist(), numbers.tolist(), strict=True
        ):
            if has_logprobs or place in specials:
                sequence = batch.sequence(row)
                self._tell(sequence, token, number, result.logprobs.get(place), now)
            else:
                append(SequenceDelta(keys[row], indexes[row], number, (token,)))

    def _tell(
        self,
        sequence: Sequence,
        token: int,
        number: int,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> None:
        """A delta of one token that may be a first or a last one. number: its place in the
        output."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        reason = sequence.stop_reason(token, number + 1, self._eos)
        self._deltas.append(
            SequenceDelta(
                request_key=sequence.request.key,
                index=sequence.index,
                first_position=number,
                token_ids=(token,),
                logprobs=() if logprobs is None else (logprobs,),
                prompt_logprobs=self._take_prompt_logprobs(sequence),
                finish_reason=reason,
                usage=None if reason is None else sequence.usage(number + 1, now),
            )
        )
        if reason is not None:
            self._end(sequence)

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
        """End a sequence without a new token, and say so."""
        if num_output_tokens is None:
            num_output_tokens = self._num_known(sequence) - sequence.num_prompt_tokens
        self._deltas.append(
            SequenceDelta(
                request_key=sequence.request.key,
                index=sequence.index,
                first_position=num_output_tokens,
                prompt_logprobs=self._take_prompt_logprobs(sequence),
                finish_reason=reason,
                usage=sequence.usage(num_output_tokens, now),
                error=error,
            )
        )
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Its last delta is written: nothing of it stays."""
        request = sequence.request
        computed_prompt = request.prompt_is_computed
        self._drop(sequence)
        if request.is_finished:
            self._forget(request)
            return
        if not computed_prompt:
            self._release_first(request)
        self._settle_lease(request)

    def _drop(self, sequence: Sequence) -> None:
        """Take everything from a sequence, wherever it is in its life."""
        if sequence.row is not None:
            self._vacate(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._queue.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._sequences.pop(sequence.id, None)

    def _vacate(self, sequence: Sequence) -> None:
        """Take blocks and row; what a step in flight may still touch is fenced."""
        assert sequence.row is not None, f"{sequence} has no row"
        self._manager.release(sequence.row, self._fence)
        self._removed_rows.append(self._batch.leave(sequence))

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.key, None)
        self._ledger.close(request.key)

    @property
    def _fence(self) -> int:
        """The last step in flight; 0 = none."""
        return self._in_flight[-1].output.step if self._in_flight else 0

    def _num_known(self, sequence: Sequence) -> int:
        if sequence.row is None:
            return len(sequence.token_ids)
        return self._batch.num_known(sequence.row)

    def _take_prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprobs | None, ...]:
        """All of them, once, with the first delta of the first sample."""
        if not sequence.owes_prompt_logprobs:
            return ()
        sequence.owes_prompt_logprobs = False
        entries = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs.clear()
        return entries

    # ── leases ────────────────────────────────────────────────────────────────────────────

    def _settle_leases(self) -> None:
        for request in self._requests.values():
            self._settle_lease(request)

    def _settle_lease(self, request: Request) -> None:
        """Enter what the request may still take, after any change of what it holds."""
        if request.key not in self._ledger:
            return
        if request.is_guaranteed:
            remaining = self._worst_case_left(request)
        else:
            remaining = max(0, request.lease_blocks - self._num_held(request))
        self._ledger.set_remaining(request.key, remaining)

    def _num_held(self, request: Request) -> int:
        """Blocks in the request's tables, the shared prompt counted once."""
        rows = [s.row for s in request.sequences if s.row is not None]
        shared = self._num_shared(request)
        held = sum(self._manager.num_blocks(row) for row in rows)
        return held - max(0, len(rows) - 1) * shared

    def _worst_case_left(self, request: Request) -> int:
        """Blocks that its samples would still take if all of them ran to their limits."""
        longest = self._manager.num_blocks_for(request.compute_limit)
        shared = self._num_shared(request)
        rows = [s.row for s in request.sequences if s.row is not None]
        num_others = sum(
            s.state in (SequenceState.WAITING, SequenceState.HELD) for s in request.sequences
        )
        growth = sum(longest - self._manager.num_blocks(row) for row in rows)
        copies = self._manager.num_copies_on_write(rows)
        prompt = shared if num_others and not rows else 0
        return growth + copies + num_others * (longest - shared) + prompt

    def _num_shared(self, request: Request) -> int:
        """Full prompt blocks that a second sample need not take again."""
        if not self.config.enable_prefix_caching:
            return 0
        return request.num_prompt_tokens // self.config.block_size
