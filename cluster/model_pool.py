"""One model with one set of weights: its replicas, its queue, its policy, and the one step that
joins them.

Route and reserve happen in the same call, in one owner, so nobody can see room that another has
just taken. Knows nothing of gateways, of Ray, or of other models.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..protos.messages import (
    AdmissionClass,
    CacheIdentity,
    ModelCard,
    Refused,
    ReplicaReport,
    ReportReply,
    ReserveRequest,
)
from .admission import AdmissionConfig, Need
from .admission_gate import AdmissionGate, refused, refused_deadline
from .appointments import AppointmentBook
from .binding_costs import Contenders
from .fair_queue import FairQueue, WaitingRequest
from .forecast import ArrivalRate
from .grants import Grant, Granter
from .late_binding import LateBinding
from .lease_table import LeaseRecord
from .prefix_transfer import NOWHERE, Source, TransferConfig
from .replica_pool import ReplicaPool
from .replica_view import FloatArray, IntArray, ReplicaView
from .routing_policy import RoutedRequest, RoutingPolicy, cheapest
from .transfer_offers import TransferOffers

_PRIORITY_S = 10.0  # one level of priority is worth so many seconds of waiting
_MAX_LEVELS = 100

Ended = Sequence[LeaseRecord]


class Start(NamedTuple):
    """Where a request can start: what it needs there, what it finds, and who could send more."""

    slot: int
    need: Need
    hit_tokens: float
    source: Source


@dataclass(slots=True)
class PoolStats:
    """Totals since the start, for status pages."""

    refused: int = 0
    expired: int = 0


@dataclass(slots=True)
class ModelPool:
    """Everything the controller knows and does for one model."""

    model: str
    block_size: int
    policy: RoutingPolicy
    admission: AdmissionConfig
    lease_ttl_s: float
    next_lease_id: Callable[[], int]
    rng: random.Random
    identity: CacheIdentity
    card: ModelCard
    pool: ReplicaPool = field(init=False)
    queue: FairQueue = field(default_factory=FairQueue, init=False)
    arrivals: ArrivalRate = field(default_factory=ArrivalRate, init=False)
    stats: PoolStats = field(default_factory=PoolStats, init=False)
    gate: AdmissionGate = field(init=False)
    transfers: TransferOffers = field(init=False)
    granter: Granter = field(init=False)
    _deadlines: list[tuple[float, int, WaitingRequest]] = field(
        default_factory=list[tuple[float, int, WaitingRequest]], init=False
    )
    _num_queued: int = field(default=0, init=False)
    _served_at: float | None = field(default=None, init=False)
    # Newcomers that may be granted at once: watching the index is for those who stay.
    _unwatched: dict[int, WaitingRequest] = field(
        default_factory=dict[int, WaitingRequest], init=False
    )

    def __post_init__(self) -> None:
        self.pool = ReplicaPool(self.block_size, speculative=self.policy.speculative)
        book = AppointmentBook(self.admission.appointments, self.rng)
        self.gate = AdmissionGate(self.admission, self.pool, self.queue, book, self.block_size)
        config = TransferConfig(enabled=False)  # the baselines know no transfers
        if isinstance(self.policy, LateBinding):
            config = self.policy.config.transfer
        self.transfers = TransferOffers(config, self.pool)
        self.granter = Granter(
            self.pool,
            self.queue,
            self.transfers,
            self.identity.weights,
            self.lease_ttl_s,
            self.next_lease_id,
        )

    @property
    def num_serving(self) -> int:
        """Replicas that take requests, or soon will."""
        return sum(not view.draining for view in self.pool.replicas.values())

    # Replicas

    def remove_replica(self, view: ReplicaView) -> Ended:
        """Its incarnation is over; returns the leases that are void."""
        ended = self.pool.remove(view)
        self._settle(ended, view.reported_at)
        self.policy.forget(view.slot)
        self.queue.admit_to(view.slot)
        return ended

    def take_report(
        self, view: ReplicaView, report: ReplicaReport, now: float
    ) -> tuple[ReportReply, Ended]:
        """Mirror a report and learn from what ended; returns the answer and the ended leases."""
        reply, ended = self.pool.take_report(view, report, now)
        if reply.draining:
            reply = replace(reply, peers=self.transfers.peers_of(view))
        for tokens in report.finished_output_tokens:
            self.gate.lengths.observe(tokens)
        self._settle(ended, now)
        return reply, ended

    # Requests

    def submit(self, request: ReserveRequest, now: float) -> Grant | WaitingRequest | Refused:
        """Route and reserve, or queue, or refuse; the caller has checked that the key is new.

        Grants to other requests that this one sets free are left to the next `pump`.
        """
        refusal = self.gate.refuse(request, now)
        if refusal is not None:
            self.stats.refused += 1
            return refusal
        need = self.gate.need_of(request)
        if request.attempt <= 1:
            self.arrivals.add(need.num_blocks, now)
        grant = None
        if not self.policy.late_binding:
            grant = self._bind_on_arrival(request, need, now)
        elif not len(self.queue):
            grant = self._start_at_once(request, need, now)
        return grant or self._admit(request, need, now)

    def take_over(self, waiting: WaitingRequest, now: float) -> WaitingRequest | Refused:
        """Queue a request that waits in another pool, as if it had come here first."""
        request, deadline_at = waiting.request, waiting.deadline_at
        problem = self.gate.never_fits(request)
        if problem is not None:
            return refused(request, "InvalidArgument", problem)
        if deadline_at is not None:
            request = replace(request, deadline_s=max(0.0, deadline_at - now))
        return self._admit(request, self.gate.need_of(request), now, since=waiting.since)

    def pump(self, now: float) -> list[Grant]:
        """Give leases to waiting requests while one can start somewhere."""
        grants: list[Grant] = []
        while len(self.queue):
            self._refresh_hits()
            pair = self._choose(now)
            if pair is None:
                break
            waiting, slot = self.queue.at(pair[0]), pair[1]
            hit = self.queue.hits[waiting.row, slot] + self.queue.host_hits[waiting.row, slot]
            need = waiting.need.without(int(self.queue.shared[waiting.row, slot]))
            self.withdraw(waiting)
            self.queue.learn_wait(now - waiting.since)
            self.gate.granted(waiting, now)
            source = self.transfers.source_of(waiting.request)
            grants.append(self.granter.grant(waiting.request, need, slot, float(hit), source, now))
        self._watch_unwatched()
        return grants

    def withdraw(self, waiting: WaitingRequest) -> None:
        """Take a request out of the queue without an answer."""
        self.queue.remove(waiting)
        if self._unwatched.pop(waiting.row, None) is None:
            self.pool.index.unwatch(waiting.request.route_hashes, waiting.row)

    def expire(self, now: float) -> tuple[Ended, list[tuple[WaitingRequest, Refused]]]:
        """End grants that were never taken up, and refuse requests that wait in vain."""
        records = self.pool.expire(now)
        self._settle(records, now)
        refused: list[tuple[WaitingRequest, Refused]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, waiting = heapq.heappop(self._deadlines)
            if self.queue.get(waiting.request.request_key) is waiting:
                self.withdraw(waiting)
                self.stats.expired += 1
                refused.append((waiting, refused_deadline(waiting.request)))
        return records, [*refused, *self._refuse_abandoned(now)]

    def drop_grant(self, record: LeaseRecord, now: float) -> None:
        """Undo a grant that never reached its client."""
        self.pool.drop_grant(record, now)
        self._settle((record,), now)

    def next_wakeup(self, now: float) -> float | None:
        """When time alone could change something: an expiry, a deadline, a backlog worked off."""
        moments = [self._deadlines[0][0]] if self._deadlines else []
        expiry = self.pool.leases.next_expiry()
        if expiry is not None:
            moments.append(expiry)
        if len(self.queue):
            columns = self.pool.columns
            ends = columns.work_end[columns.open]
            later = ends[ends > now]
            if len(later):
                moments.append(float(later.min()))
        return min(moments, default=None)

    def check_integrity(self) -> None:
        """Assert that every part agrees with itself and with the others."""
        self.pool.check_integrity()
        self.queue.check_integrity()
        self.gate.book.check_integrity()

    # One step each

    def _refuse_abandoned(self, now: float) -> list[tuple[WaitingRequest, Refused]]:
        """Refuse what waits where no replica serves, and none has come in time."""
        if self.num_serving or self._served_at is None:
            self._served_at = now
        patience_s = max(self.admission.outage_s, self.admission.hold_s)
        if now - self._served_at <= patience_s:
            return []
        # Where replicas come on demand, the demand began with the request.
        holds = self.admission.hold_s > 0.0
        abandoned = [
            waiting for waiting in self.queue if not holds or now - waiting.arrived_at > patience_s
        ]
        for waiting in abandoned:
            self.withdraw(waiting)
        self.stats.refused += len(abandoned)
        reason = "no replica serves the model any more"
        return [
            (waiting, refused(waiting.request, "Unavailable", reason, retry_after_s=1.0))
            for waiting in abandoned
        ]

    def routed(self, request: ReserveRequest, need: Need) -> RoutedRequest:
        """The request as policies see it."""
        columns = self.pool.columns
        device, host = self.pool.match(request.route_hashes)
        candidates = columns.open.copy()
        for replica_id in request.excluded:
            view = self.pool.replicas.get(replica_id)
            if view is not None:
                candidates[view.slot] = False
        if not candidates.any():  # rather one that failed than none
            candidates = columns.open.copy()
        return RoutedRequest(
            request.request_key,
            request.route_hashes,
            request.num_tokens,
            need.num_blocks,
            self.block_size,
            need.expected_output_tokens,
            candidates,
            device,
            host,
            self.transfers.source_of(request),
        )

    def _bind_on_arrival(self, request: ReserveRequest, need: Need, now: float) -> Grant | None:
        routed = self.routed(request, need)
        if request.admission_class is not AdmissionClass.BEST_EFFORT:
            columns = self.pool.columns
            routed.candidates &= columns.available >= need.num_blocks
        if not routed.candidates.any():
            return None
        slot = cheapest(routed, self.policy.cost_ms(routed, self.pool.columns, now))
        if slot is None:
            return None
        if request.admission_class is AdmissionClass.BEST_EFFORT:
            need = Need(0, need.growth_tokens, need.expected_output_tokens)
        self.policy.placed(routed, slot)
        hit = float(routed.hit_tokens()[slot])
        return self.granter.grant(request, need, slot, hit, NOWHERE, now)

    def _start_at_once(self, request: ReserveRequest, need: Need, now: float) -> Grant | None:
        """What `_admit` and `pump` would come to where nobody else waits, at less cost."""
        start = self.start_now(request, need, now)
        if start is None:
            return None
        refused_at = self.gate.keep_appointment(request, now)
        self.queue.learn_wait(0.0 if refused_at is None else now - refused_at)
        return self.granter.grant(
            request, start.need, start.slot, start.hit_tokens, start.source, now
        )

    def start_now(self, request: ReserveRequest, need: Need, now: float) -> Start | None:
        """Where a policy that binds late would start it now, if nobody else waits; None = nowhere.
        Changes nothing."""
        assert isinstance(self.policy, LateBinding), f"{self.policy.name} does not bind late"
        hits, host_hits, shared = self._match(request)
        columns = self.pool.columns
        candidates = need.num_blocks - shared <= columns.available
        for replica_id in self._excluded(request):
            candidates[self.pool.replicas[replica_id].slot] = False
        source = self.transfers.source_of(request)
        newcomer = Contenders(
            float(request.num_tokens),
            need.num_blocks,
            self.gate.duration_s(request, need),
            hits,
            host_hits,
            None if source is NOWHERE else (source.slot, source.num_tokens),
        )
        slot = self.policy.choose_newcomer(newcomer, candidates, columns, now)
        if slot is None:
            return None
        hit = float(hits[slot]) + (0.0 if host_hits is None else float(host_hits[slot]))
        return Start(slot, need.without(int(shared[slot])), hit, source)

    def _admit(
        self, request: ReserveRequest, need: Need, now: float, since: float | None = None
    ) -> WaitingRequest:
        refused_at = self.gate.keep_appointment(request, now)
        since = now if since is None else since
        if refused_at is not None:
            since = refused_at
        level = max(-_MAX_LEVELS, min(_MAX_LEVELS, request.priority))
        if request.admission_class is AdmissionClass.BEST_EFFORT:
            level -= 1
        waiting = WaitingRequest(
            request,
            need,
            since,
            now,
            None if request.deadline_s is None else now + request.deadline_s,
            _PRIORITY_S * level,
            self.gate.duration_s(request, need),
            self._excluded_mask(request),
        )
        row = self.queue.add(waiting, self.pool.columns.num_slots)
        self._set_hits(row, request)
        self._unwatched[row] = waiting
        if waiting.deadline_at is not None:
            self._num_queued += 1
            heapq.heappush(self._deadlines, (waiting.deadline_at, self._num_queued, waiting))
        return waiting

    def _excluded_mask(self, request: ReserveRequest) -> int:
        mask = 0
        for replica_id in self._excluded(request):
            mask |= 1 << self.pool.replicas[replica_id].slot
        return mask

    def _excluded(self, request: ReserveRequest) -> list[str]:
        """The replicas that it must not go to: rather one that failed than none."""
        if not request.excluded:
            return []
        known = [name for name in set(request.excluded) if name in self.pool.replicas]
        return known if len(known) < len(self.pool.replicas) else []

    def releases(self, slot: int) -> list[tuple[float, int]]:
        """When which blocks of a replica are expected back."""
        return [
            (record.expected_end, record.num_blocks) for record in self.pool.leases.of_slot(slot)
        ]

    def _choose(self, now: float) -> tuple[int, int] | None:
        if isinstance(self.policy, LateBinding):
            return self.policy.choose(self.queue, self.pool.columns, now, self.releases)
        # A policy that binds on arrival only queues what fits nowhere: oldest first.
        for waiting in self.queue:
            routed = self.routed(waiting.request, waiting.need)
            available = self.pool.columns.available
            routed.candidates &= available >= waiting.need.num_blocks
            slot = cheapest(routed, self.policy.cost_ms(routed, self.pool.columns, now))
            return None if slot is None else (waiting.row, slot)
        return None

    def _settle(self, ended: Ended, now: float) -> None:
        """Correct what was charged by what was really used."""
        for record in ended:
            if record.lease is not None:
                used = record.num_blocks * (now - record.granted_at)
                self.queue.charge(record.tenant, used - record.charged)

    def _refresh_hits(self) -> None:
        self.queue.widen(self.pool.columns.num_slots)
        for row in self.pool.index.take_touched():
            assert isinstance(row, int), f"{row!r} is not a row"
            self._set_hits(row, self.queue.at(row).request)

    def _watch_unwatched(self) -> None:
        for row, waiting in self._unwatched.items():
            self.pool.index.watch(waiting.request.route_hashes, row)
            self._set_hits(row, waiting.request)
        self._unwatched.clear()

    def _set_hits(self, row: int, request: ReserveRequest) -> None:
        hits, host_hits, shared = self._match(request)
        self.queue.set_source(row, self.transfers.source_of(request))
        self.queue.hits[row, : len(hits)] = hits
        self.queue.shared[row, : len(hits)] = shared
        if host_hits is not None:
            self.queue.has_host_hits = True
        if self.queue.has_host_hits:
            self.queue.host_hits[row, : len(hits)] = 0.0 if host_hits is None else host_hits

    def _match(self, request: ReserveRequest) -> tuple[FloatArray, FloatArray | None, IntArray]:
        """By slot: tokens that need no computing, those on the host tier, and blocks in use there
        that it would share."""
        device, host = self.pool.match(request.route_hashes)
        hits = np.minimum(device, request.num_tokens - 1.0)  # the last token is always computed
        # A guarantee holds whatever becomes of those who share the prompt now.
        if request.admission_class is AdmissionClass.GUARANTEED or not np.count_nonzero(device):
            return hits, host, np.zeros(len(hits), dtype=np.int64)
        return hits, host, self.pool.shared_blocks(request.route_hashes)
