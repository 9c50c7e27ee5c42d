"""A lease for a request, and all the books that it stands in: ledger, index, counts and turns.

Where the request goes, and whether it may, has been decided before. One model with one set of
weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..protos.messages import Lease, ReserveRequest, Weights
from .admission import Need
from .fair_queue import FairQueue
from .lease_table import LeaseRecord
from .prefix_transfer import Source
from .replica_pool import ReplicaPool
from .transfer_offers import TransferOffer, TransferOffers


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that was just given: to a newcomer, or to a request that had waited."""

    request: ReserveRequest
    lease: Lease
    record: LeaseRecord


class Granter:
    """Writes leases; nothing else does."""

    def __init__(
        self,
        pool: ReplicaPool,
        queue: FairQueue,
        transfers: TransferOffers,
        weights: Weights,
        lease_ttl_s: float,
        next_lease_id: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._transfers = transfers
        self._weights = weights
        self._lease_ttl_s = lease_ttl_s
        self._next_lease_id = next_lease_id
        self.num_granted = 0

    def grant(
        self,
        request: ReserveRequest,
        need: Need,
        slot: int,
        hit_tokens: float,
        source: Source,
        now: float,
    ) -> Grant:
        """To a slot that holds so many of its tokens; source: who could send it more."""
        uncached = max(1, request.num_tokens - int(hit_tokens))
        offer = self._transfers.offer(source, slot, hit_tokens, now)
        if offer is not None:
            uncached = max(1, uncached - offer.num_tokens)
        lease = self._make_lease(request, need, slot, uncached, offer)
        record = self._make_record(request, need, slot, lease, uncached, now)
        self._pool.grant(record, request.route_hashes, now)
        self._queue.charge(request.tenant, record.charged)
        self._queue.learn_cost(record.charged)
        self.num_granted += 1
        return Grant(request, lease, record)

    def _make_lease(
        self,
        request: ReserveRequest,
        need: Need,
        slot: int,
        uncached: int,
        offer: TransferOffer | None,
    ) -> Lease:
        info = self._pool.by_slot[slot].info
        return Lease(
            self._next_lease_id(),
            request.request_key,
            request.attempt,
            info.replica_id,
            info.incarnation,
            info.address,
            info.stream_secret,
            need.num_blocks,
            request.num_tokens - uncached,
            self._lease_ttl_s,
            self._weights,
            None if offer is None else offer.transfer,
        )

    def _make_record(
        self,
        request: ReserveRequest,
        need: Need,
        slot: int,
        lease: Lease,
        uncached: int,
        now: float,
    ) -> LeaseRecord:
        columns = self._pool.columns
        start = max(float(columns.work_end[slot]), now)
        prefill_s = start - now + uncached * float(columns.token_s[slot])
        duration = prefill_s + need.expected_output_tokens * float(columns.decode_step_s[slot])
        return LeaseRecord(
            lease.lease_id,
            slot,
            need.num_blocks,
            lease,
            request.gateway_id,
            request.tenant,
            request.admission_class,
            request.num_tokens,
            need.num_blocks,
            uncached,
            now,
            now + self._lease_ttl_s,
            now + duration,
            need.num_blocks * duration,
        )
