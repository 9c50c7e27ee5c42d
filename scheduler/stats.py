"""A frozen snapshot of one scheduler, for reports and metrics."""

from dataclasses import dataclass

from ..protos.messages import BlockCounts, LeaseUse
from .books import Books


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start but where they are of now.

    waiting_prefill_tokens: known tokens, of all that waits, whose KV is not on the host.
    hit_tokens of query_tokens were found in the cache at admission.
    One count per way to meet exhaustion: blocks_evicted (idle content reclaimed),
    admissions_deferred (steps in which the first in the queue had to wait for blocks), rows_held
    (rows that skipped a step because blocks were on their way), preemptions_recompute,
    preemptions_swap, swaps_refused (no room on the host, recomputed instead), queue_full and
    leases_refused (sent away with a hint), kv_exhausted (ended alone with partial output).
    host_evicted: ready host blocks that made room. blocks_stored / blocks_loaded: copied between
    the tiers. copies_failed: jobs. prefill_tokens_per_s, copy_bytes_per_s: running means.
    draft_tokens: guessed ahead; accepted_tokens: of these, those that were right.
    route_digests: XOR of resident route hashes, device and host, as of the last events taken.
    """

    epoch: int
    steps: int
    device: BlockCounts
    host: BlockCounts
    num_waiting: int
    num_running: int
    waiting_prefill_tokens: int
    leases: tuple[LeaseUse, ...]
    hit_tokens: int
    query_tokens: int
    blocks_evicted: int
    admissions_deferred: int
    rows_held: int
    preemptions_recompute: int
    preemptions_swap: int
    swaps_refused: int
    queue_full: int
    leases_refused: int
    kv_exhausted: int
    expired: int
    copies_on_write: int
    collisions_refused: int
    host_evicted: int
    blocks_stored: int
    blocks_loaded: int
    copies_failed: int
    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    route_digests: tuple[int, int]
    draft_tokens: int
    accepted_tokens: int

    @property
    def preemptions(self) -> int:
        """Of either kind."""
        return self.preemptions_recompute + self.preemptions_swap


def make_stats(books: Books, epoch: int, steps: int) -> SchedulerStats:
    """Read the books; the leases must have been settled."""
    counters, tier = books.counters, books.tier
    return SchedulerStats(
        epoch=epoch,
        steps=steps,
        device=books.pool.stats(),
        host=books.host.stats(),
        num_waiting=len(books.queue),
        num_running=len(books.batch),
        waiting_prefill_tokens=books.queue.num_tokens,
        leases=books.ledger.uses(),
        hit_tokens=counters.hit_tokens,
        query_tokens=counters.query_tokens,
        blocks_evicted=books.pool.num_evicted,
        admissions_deferred=counters.admissions_deferred,
        rows_held=counters.rows_held,
        preemptions_recompute=counters.preemptions_recompute,
        preemptions_swap=counters.preemptions_swap,
        swaps_refused=counters.swaps_refused,
        queue_full=counters.queue_full,
        leases_refused=books.ledger.num_refused,
        kv_exhausted=counters.kv_exhausted,
        expired=counters.expired,
        copies_on_write=counters.copies_on_write,
        collisions_refused=books.index.num_refused,
        host_evicted=books.host.num_evicted,
        blocks_stored=tier.num_stored,
        blocks_loaded=tier.num_loaded,
        copies_failed=tier.num_failed,
        prefill_tokens_per_s=books.costs.prefill_tokens_per_s,
        copy_bytes_per_s=books.costs.copy_bytes_per_s,
        route_digests=books.routes.digests,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
    )
