"""Who enters the batch: waiting sequences, and the samples that fork off a finished prompt.

A sequence is admitted on its whole known length, or on the longest it may become, in the queue's
order; nobody is passed over. It waits a step where this one computes what it would compute too.
Knows what free blocks are promised to; what happens when running rows need more is exhaustion's.
"""

from .books import Books
from .config import AdmissionRule
from .exhaustion import Evictor
from .output import NewRow
from .prefix import Prefix
from .request import Request, Sequence, SequenceState
from .step_plan import StepPlan


class Admission:
    """Brings sequences into rows and plans their chunks."""

    def __init__(self, books: Books, evictor: Evictor) -> None:
        self._books = books
        self._config = books.config
        self._batch = books.batch
        self._queue = books.queue
        self._pool = books.pool
        self._manager = books.manager
        self._evictor = evictor

    def admit(self, plan: StepPlan, now: float) -> None:
        """Let waiting sequences in while there are rows, tokens and blocks."""
        while self._batch.num_free and plan.num_tokens < self._config.max_num_batched_tokens:
            sequence = self._queue.peek()
            if sequence is None or sequence.num_open_copies:
                return  # nobody, or its KV is on its way
            if self._evictor.is_in_flight(sequence.last_step):
                return  # so is its last token, and the result would be taken for the new row's
            if self._manager.num_blocks_for(len(sequence.token_ids)) > self._config.num_blocks:
                self._evictor.exhaust(sequence, now)
                continue
            prefix = self._find_prefix(sequence)
            if self._is_being_computed(sequence, prefix, plan):
                return  # it is in the cache a step later, for all who share it
            if not self._has_room(sequence, prefix):
                self._books.counters.admissions_deferred += 1
                return
            row = self._enter(sequence, prefix, now)
            plan.new_rows.append(self.new_row(row))
            if not self._batch.is_loading[row]:
                self.plan_chunk(plan, row, int(self._batch.remaining()[row]))

    def plan_chunk(self, plan: StepPlan, row: int, remaining: int) -> None:
        """As many of a row's missing positions as the step has room for."""
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        chunk = min(remaining, budget, self._config.prefill_chunk or remaining)
        if chunk < 1:
            return
        plan.add_chunk(row, chunk)
        request = self._batch.sequence(row).request
        end = int(self._batch.num_computed[row]) + chunk
        if not request.prompt_is_computed and end >= request.num_prompt_tokens:
            request.prompt_is_computed = True
            plan.prompts.append(request)
            self._fork_samples(plan, row, request, end)

    def _find_prefix(self, sequence: Sequence) -> Prefix:
        if sequence.swapped is not None:
            return self._manager.find_swapped(sequence, self._books.tier)
        if not self._may_share(sequence):
            return Prefix()
        loads_pay = self._books.costs.loads_pay
        return self._manager.find_prefix(sequence, self._books.tier, loads_pay)

    def _is_being_computed(self, sequence: Sequence, prefix: Prefix, plan: StepPlan) -> bool:
        """Whether rows of this step, or of one in flight, compute more of its prefix than a step
        more costs."""
        if sequence.swapped is not None or not self._may_share(sequence):
            return False
        num_tokens = self._manager.num_coming(sequence, prefix, plan.ends(self._batch))
        return num_tokens > 0 and self._books.costs.waiting_pays(num_tokens)

    def _may_share(self, sequence: Sequence) -> bool:
        return self._config.enable_prefix_caching and not sequence.owes_prompt_logprobs

    def _has_room(self, sequence: Sequence, prefix: Prefix) -> bool:
        """The blocks that the rule asks for, beyond what is promised or kept for growth."""
        available = self._pool.num_free
        available -= self._books.ledger.reserved_for_others(sequence.request.key)
        num_tokens = len(sequence.token_ids)
        if len(self._batch):  # who would be alone cannot wait for anyone's blocks
            available -= int(self._config.watermark * self._config.num_blocks)
            if self._config.admission_rule is AdmissionRule.FULL_LENGTH:
                num_tokens = max(num_tokens, sequence.request.compute_limit)
        num_blocks = self._manager.num_blocks_for(num_tokens)
        return num_blocks - prefix.num_resident + prefix.num_idle <= available

    def _enter(self, sequence: Sequence, prefix: Prefix, now: float) -> int:
        self._queue.remove(sequence)
        moves = self._manager.admit(sequence, prefix, self._config.enable_prefix_caching)
        row = sequence.row
        assert row is not None, f"{sequence} was admitted and has no row"
        is_swapped = sequence.swapped is not None
        tier = self._books.tier
        tier.load(sequence, moves, prefix.arriving)
        tier.release_swapped(sequence)  # the loads hold what they read
        if not is_swapped:
            self._count_hit(sequence, prefix.num_computed)
        if sequence.admitted_s is None:
            sequence.admitted_s = now
        if sum(s.row is not None for s in sequence.request.sequences) == 1:
            # Blocks that others' tables held already cost no capacity, and no lease counts them.
            sequence.request.num_blocks_borrowed = prefix.num_resident - prefix.num_idle
        self._books.leases.settle(sequence.request)
        return row

    def _count_hit(self, sequence: Sequence, hit_tokens: int) -> None:
        counters = self._books.counters
        counters.hit_tokens += hit_tokens
        counters.query_tokens += len(sequence.token_ids)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(hit_tokens, sequence.num_prompt_tokens)

    def _fork_samples(self, plan: StepPlan, parent: int, request: Request, end: int) -> None:
        """Samples that begin where the prompt ends share its blocks and its logits; those for
        which there is no row now come later and find the prompt in the cache."""
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
                plan.new_rows.append(self.new_row(row))
        self._books.leases.settle(request)

    def new_row(self, row: int) -> NewRow:
        """What the runner must know of a row."""
        sequence = self._batch.sequence(row)
        return NewRow(
            row=row,
            sequence_id=sequence.id,
            token_ids=self._batch.token_ids[row, : self._batch.num_known(row)].copy(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_table=self._manager.table(row),
            sampling=sequence.request.sampling,
            sample_index=sequence.index,
        )
