"""A frozen snapshot of one scheduler, for reports and metrics."""

from dataclasses import dataclass

from ..protos.messages import BlockCounts, LeaseUse


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start but where they are of now.

    waiting_prefill_tokens: known tokens of all that waits. preemptions_*: by what became of the
    KV. hit_tokens of query_tokens were found in the cache at admission. admissions_deferred:
    steps in which the first in the queue had to wait for blocks. rows_held: rows that skipped a
    step because blocks were on their way. route_digests: XOR of resident route hashes, device and
    host, as of the last events taken.
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
    preemptions_recompute: int
    preemptions_swap: int
    admissions_deferred: int
    rows_held: int
    kv_exhausted: int
    expired: int
    blocks_evicted: int
    copies_on_write: int
    collisions_refused: int
    leases_refused: int
    route_digests: tuple[int, int]

    @property
    def preemptions(self) -> int:
        """Of either kind."""
        return self.preemptions_recompute + self.preemptions_swap
