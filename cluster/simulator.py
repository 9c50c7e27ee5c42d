"""A whole cluster in one process on a virtual clock: the real controller over simulated replicas.

Replays a workload through `Controller`, exactly as gateways and leaders would drive it, and
measures what clients would see. Only time, the network and the models are simulated: decisions,
leases, the prefix index and the block pools are the real ones.

    arrival ─► reserve ─► lease ─► replica: wait, prefill, decode ─► done
                  └► ticket … grant ┘       └─ report ─► controller ─► grants
"""

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from ..protos.messages import (
    AdmissionClass,
    CacheIdentity,
    Lease,
    ModelCard,
    Refused,
    ReplicaInfo,
    ReplicaReport,
    ReserveRequest,
    TransferStats,
)
from ..scheduler.block_hash import root_hash
from .admission import AdmissionConfig
from .binding_costs import LateBindingConfig
from .controller import Controller, ControllerConfig
from .replay_replica import (
    Fetch,
    Happening,
    ReplayCost,
    ReplayReplica,
    SimulatedRequest,
    make_request,
)
from .workload import TraceRequest, Workload

_MODEL = "simulated"
_GATEWAY = "gateway"
_HEARTBEAT_S = 1.0
_TICK_LAG_S = 0.001  # a report that says the same comes first
_MAX_ATTEMPTS = 50


class FaultKind(StrEnum):
    """What can be done to a replica."""

    CRASH = "crash"  # its processes die; a new incarnation starts after the duration
    FREEZE = "freeze"  # it does nothing for the duration, or until it is declared dead
    LOSE_REPORTS = "lose-reports"  # none of its reports arrives for the duration
    DELAY_REPORTS = "delay-reports"  # its reports arrive so much later: the duration


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. replica: its number, from 0."""

    kind: FaultKind
    at_s: float
    replica: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The simulated cluster."""

    num_replicas: int = 8
    num_blocks: int = 3906
    block_size: int = 512
    cost: ReplayCost = field(default_factory=ReplayCost)
    max_context: int = 1 << 17


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What copying blocks from one replica to another takes. kv_bytes_per_token: of one rank."""

    bytes_per_s: float
    kv_bytes_per_token: int = 128 * 1024
    overhead_s: float = 0.005


@dataclass(frozen=True, slots=True)
class SimulationSpec:
    """One run: a policy on a workload.

    deadline_s: of every request. max_retries: how often a refused client comes back.
    report_interval_s: least time between reports without arrivals or ends. transfer: None =
    replicas exchange no blocks.
    check: assert the integrity of every part after every event (slow).
    """

    cluster: ClusterSpec
    policy: str = "default"
    admission: AdmissionConfig = field(
        default_factory=lambda: AdmissionConfig(
            max_queued_requests=1_000_000, max_queued_tokens=1 << 60
        )
    )
    late_binding: LateBindingConfig = field(default_factory=LateBindingConfig)
    faults: tuple[Fault, ...] = ()
    deadline_s: float | None = None
    max_retries: int = 3
    restart_s: float = 10.0
    report_interval_s: float = 0.0
    seed: int = 0
    check: bool = False
    transfer: TransferCost | None = None


class SimulatedReplica(Protocol):
    """What the simulator needs of a replica, whatever its cost model."""

    info: ReplicaInfo
    computed_tokens: int
    preemptions: int

    def submit(self, request: SimulatedRequest, now: float) -> bool: ...

    def advance(self, now: float) -> tuple[list[Happening], list[SimulatedRequest]]: ...

    def report(self, now: float, *, snapshot: bool = False) -> ReplicaReport: ...

    def unfinished(self) -> list[SimulatedRequest]: ...

    def check_integrity(self) -> None: ...


@dataclass(slots=True)
class Measurements:
    """What a run leaves behind."""

    ttft_s: list[float] = field(default_factory=list[float])
    tpot_s: list[float] = field(default_factory=list[float])
    decision_us: list[float] = field(default_factory=list[float])
    report_us: list[float] = field(default_factory=list[float])
    hit_tokens: int = 0
    prompt_tokens: int = 0
    refused: int = 0
    expired: int = 0
    refusals: int = 0
    first_retries: int = 0
    first_retries_served: int = 0
    restarts: int = 0
    transfers: int = 0
    transfers_failed: int = 0
    transferred_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    duration_s: float = 0.0
    computed_tokens: dict[str, int] = field(default_factory=dict[str, int])
    tenant_block_s: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Seat:
    """One replica's place in the cluster: its incarnations follow one another here."""

    number: int
    replica: SimulatedReplica | None = None
    incarnations: int = 0
    frozen_until: float = 0.0
    silent_until: float = 0.0
    delay_s: float = 0.0
    last_report: float = 0.0
    has_news: bool = False
    link_busy_until: float = 0.0


MakeReplica = Callable[[ReplicaInfo, ReplayCost], SimulatedReplica]


class Simulation:
    """One run. Feed it with `run`; everything is decided by the workload and the seed."""

    def __init__(
        self,
        spec: SimulationSpec,
        workload: Workload,
        make_replica: MakeReplica = ReplayReplica,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.spec = spec
        self.measured = Measurements()
        self._workload = workload
        self._make_replica = make_replica
        self._progress = progress
        self._identity = CacheIdentity(_MODEL, 1, "bfloat16", spec.cluster.block_size)
        self._root = root_hash(self._identity)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now = 0.0
        self._next_tick: float | None = None
        self._requests: dict[str, SimulatedRequest] = {}
        self._num_done = 0
        config = ControllerConfig(
            policy=spec.policy, admission=spec.admission, late_binding=spec.late_binding
        )
        self.controller = Controller(config, random.Random(spec.seed), 0.0)
        self._seats = [_Seat(number) for number in range(spec.cluster.num_replicas)]
        self._seat_of = {f"replica-{seat.number}": seat for seat in self._seats}

    def run(self) -> Measurements:
        """Until every request has ended."""
        for seat in self._seats:
            self._start(seat)
        for fault in self.spec.faults:
            self._at(fault.at_s, lambda fault=fault: self._inject(fault))
        arrivals = enumerate(self._workload.requests)
        self._schedule_arrival(arrivals)
        total = len(self._workload.requests)
        while self._num_done < total:
            assert self._events, f"{total - self._num_done} requests are lost"
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            if self.spec.check:
                self._check()
        self._finish()
        return self.measured

    # Events

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        when = max(when, self._now)  # what fell due while a replica was frozen
        heapq.heappush(self._events, (when, self._num_events, happen))

    def _schedule_arrival(self, arrivals: "enumerate[TraceRequest]") -> None:
        following = next(arrivals, None)
        if following is None:
            return
        number, trace = following
        block_size = self.spec.cluster.block_size

        def arrive() -> None:
            request = make_request(f"request-{number}", trace, self._root, block_size)
            self._requests[request.key] = request
            self._schedule_arrival(arrivals)
            self._reserve(request)

        self._at(trace.arrival_s, arrive)

    def _schedule_tick(self) -> None:
        wakeup = self.controller.next_wakeup(self._now)
        if wakeup is None:
            return
        when = max(wakeup, self._now) + _TICK_LAG_S
        if self._next_tick is None or when < self._next_tick:
            self._next_tick = when
            self._at(when, lambda: self._tick(when))

    def _tick(self, due: float) -> None:
        if self._next_tick != due:
            return  # an earlier one was scheduled after it
        self._next_tick = None
        wakeup = self.controller.next_wakeup(self._now)
        if wakeup is not None and wakeup <= self._now:
            self._tick_controller()
        self._schedule_tick()

    def _tick_controller(self) -> None:
        for info in self.controller.tick(self._now):
            self._kill(self._seat_of[info.replica_id])
        self._take_grants()

    # Clients

    def _reserve(self, request: SimulatedRequest, excluded: tuple[str, ...] = ()) -> None:
        left = self.spec.deadline_s
        if left is not None:
            left -= self._now - request.trace.arrival_s
        is_default = self.spec.policy == "default"
        message = ReserveRequest(
            request_key=request.key,
            attempt=request.attempt,
            gateway_id=_GATEWAY,
            model=_MODEL,
            route_hashes=request.route_hashes,
            num_tokens=request.num_prompt_tokens,
            num_samples=1,
            max_tokens=request.trace.num_output_tokens,
            admission_class=(
                request.trace.admission_class if is_default else AdmissionClass.BEST_EFFORT
            ),
            tenant=request.trace.tenant,
            deadline_s=left,
            retry_token=request.retry_token,
            excluded=excluded,
        )
        begin = time.thread_time_ns()
        answer = self.controller.reserve(message, self._now)
        self.measured.decision_us.append((time.thread_time_ns() - begin) / 1e3)
        self._take(request, answer)
        self._take_grants()
        self._schedule_tick()

    def _take(self, request: SimulatedRequest, answer: object) -> None:
        if isinstance(answer, Lease):
            self._submit(request, answer)
        elif isinstance(answer, Refused):
            self._take_refusal(request, answer)

    def _take_grants(self) -> None:
        # A submission sends a report, which may bring further grants: until there are none.
        while self.controller.has_grants(_GATEWAY):
            for answer in self.controller.poll_grants(_GATEWAY, self._now):
                request = self._requests.get(answer.request_key)
                if request is not None and request.attempt == answer.attempt:
                    self._take(request, answer)

    def _take_refusal(self, request: SimulatedRequest, refused: Refused) -> None:
        self.measured.refusals += 1
        if refused.error == "DeadlineExceeded":
            self.measured.expired += 1
            self._done(request)
            return
        if request.has_first_appointment:
            request.first_retry_served = False
        request.num_refusals += 1
        if refused.retry_after_s is None or request.num_refusals > self.spec.max_retries:
            self.measured.refused += 1
            self._done(request)
            return
        request.retry_token = refused.retry_token
        self._at(self._now + refused.retry_after_s, lambda: self._reserve(request))

    def _submit(self, request: SimulatedRequest, lease: Lease) -> None:
        seat = self._seat_of[lease.replica_id]
        replica = seat.replica
        if request.has_first_appointment and request.first_retry_served is None:
            request.first_retry_served = True
        if replica is None or replica.info.incarnation != lease.incarnation:
            self.controller.replica_failed(lease.replica_id, lease.incarnation, self._now)
            self._resubmit(request, lease.replica_id)
            return
        request.lease = lease
        request.fetch = self._fetch(request, lease, seat)
        if not replica.submit(request, self._now):
            self._resubmit(request, lease.replica_id)
            return
        seat.has_news = True
        self._advance(seat)

    def _fetch(self, request: SimulatedRequest, lease: Lease, seat: _Seat) -> Fetch | None:
        """What becomes of the transfer that its lease offers."""
        cost, offer, replica = self.spec.transfer, lease.transfer, seat.replica
        if cost is None or offer is None or not isinstance(replica, ReplayReplica):
            return None
        origin = self._seat_of[offer.source.replica_id]
        source, num_blocks = origin.replica, 0
        if (
            isinstance(source, ReplayReplica)
            and source.info.incarnation == offer.source.incarnation
            and self._now >= origin.frozen_until
        ):
            num_blocks = source.num_held(request)
        missing = max(0, num_blocks - replica.num_held(request))
        num_tokens = missing * self.spec.cluster.block_size
        begin = max(self._now, origin.link_busy_until, seat.link_busy_until)
        end = begin + cost.overhead_s + num_tokens * cost.kv_bytes_per_token / cost.bytes_per_s
        if not missing or end - self._now > offer.timeout_s:
            self.measured.transfers_failed += 1
            return Fetch(min(end, self._now + offer.timeout_s), 0)
        origin.link_busy_until = seat.link_busy_until = end
        self.measured.transfers += 1
        self.measured.transferred_tokens += num_tokens
        return Fetch(end, num_blocks)

    def _resubmit(self, request: SimulatedRequest, failed: str) -> None:
        """Its replica is gone: the gateway tries elsewhere."""
        request.attempt += 1
        request.lease = None
        if request.attempt > _MAX_ATTEMPTS:
            self.measured.refused += 1
            self._done(request)
            return
        self._reserve(request, (failed,))

    def _done(self, request: SimulatedRequest) -> None:
        del self._requests[request.key]
        measured = self.measured
        if request.num_refusals and request.first_retry_served is not None:
            measured.first_retries += 1
            measured.first_retries_served += request.first_retry_served
        self._num_done += 1
        if self._progress is not None:
            self._progress(1)
        if request.first_token_s is None or request.finished_s is None:
            return
        measured.finished += 1
        measured.ttft_s.append(request.first_token_s - request.trace.arrival_s)
        output_s = request.finished_s - request.first_token_s
        measured.tpot_s.append(output_s / max(1, request.trace.num_output_tokens))
        measured.hit_tokens += request.hit_tokens
        measured.prompt_tokens += request.num_prompt_tokens
        num_tokens = request.num_prompt_tokens + request.trace.num_output_tokens
        blocks = -(-num_tokens // self.spec.cluster.block_size)
        tenant = request.trace.tenant
        held_s = measured.tenant_block_s.get(tenant, 0.0) + blocks * output_s
        measured.tenant_block_s[tenant] = held_s

    # Replicas

    def _start(self, seat: _Seat) -> None:
        cluster, transfer = self.spec.cluster, self.spec.transfer
        size = cluster.block_size
        seat.incarnations += 1
        info = ReplicaInfo(
            replica_id=f"replica-{seat.number}",
            incarnation=f"life-{seat.incarnations}",
            model=_MODEL,
            identity=self._identity,
            address="",
            stream_secret="",
            num_blocks=cluster.num_blocks,
            num_host_blocks=0,
            max_context=cluster.max_context,
            max_num_sequences=cluster.cost.max_running,
            prefill_tokens_per_s=cluster.cost.prefill_tokens_per_s,
            decode_step_s=cluster.cost.token_s,
            block_bytes=0 if transfer is None else transfer.kv_bytes_per_token * size,
            actors=() if transfer is None else (f"replica-{seat.number}",),
        )
        is_default = self.spec.policy == "default"
        cost = replace(cluster.cost, reports_progress=is_default)
        seat.replica = self._make_replica(info, cost)
        if transfer is not None and isinstance(seat.replica, ReplayReplica):
            seat.replica.transfers = TransferStats(
                done=1, bytes_per_s=transfer.bytes_per_s, overhead_s=transfer.overhead_s
            )
        seat.frozen_until = 0.0
        card = ModelCard(_MODEL, "", self._identity, info.max_context, 1 << 17, ())
        self.controller.register_replica(info, card, self._now)
        self._report(seat, snapshot=True)
        self._at(self._now + _HEARTBEAT_S, lambda: self._beat(seat, seat.incarnations))

    def _beat(self, seat: _Seat, incarnation: int) -> None:
        if seat.replica is None or seat.incarnations != incarnation:
            return
        if self._now - seat.last_report >= _HEARTBEAT_S:
            self._report(seat)
            self._take_grants()
        if self._now < seat.frozen_until:
            self._tick_controller()
        self._at(self._now + _HEARTBEAT_S, lambda: self._beat(seat, incarnation))

    def _advance(self, seat: _Seat) -> None:
        replica = seat.replica
        if replica is None or self._now < seat.frozen_until:
            return
        happenings, finished = replica.advance(self._now)
        incarnation = seat.incarnations
        for happening in happenings:
            self._at(happening.at, lambda: self._wake(seat, incarnation))
        if seat.has_news or finished or self._now >= seat.last_report + self.spec.report_interval_s:
            seat.has_news = False
            self._report(seat)
        for request in finished:
            self.controller.release(request.key, request.attempt, self._now)
            self._done(request)
        self._take_grants()
        self._schedule_tick()

    def _wake(self, seat: _Seat, incarnation: int) -> None:
        if seat.incarnations == incarnation:
            self._advance(seat)

    def _report(self, seat: _Seat, *, snapshot: bool = False) -> None:
        replica = seat.replica
        if replica is None or self._now < seat.frozen_until:
            return
        seat.last_report = self._now
        report = replica.report(self._now, snapshot=snapshot)
        if self._now < seat.silent_until:
            return
        if seat.delay_s:
            self._at(self._now + seat.delay_s, lambda: self._deliver(seat, report))
        else:
            self._deliver(seat, report)

    def _deliver(self, seat: _Seat, report: ReplicaReport) -> None:
        begin = time.thread_time_ns()
        reply = self.controller.report(report, self._now)
        self.measured.report_us.append((time.thread_time_ns() - begin) / 1e3)
        replica = seat.replica
        if replica is None or replica.info.incarnation != report.incarnation:
            return
        if reply.fence:
            self._kill(seat)
        elif reply.needs_snapshot and not report.is_snapshot:
            self._report(seat, snapshot=True)

    # Faults

    def _inject(self, fault: Fault) -> None:
        seat = self._seats[fault.replica]
        until = self._now + fault.duration_s
        if fault.kind is FaultKind.CRASH:
            self._kill(seat, fault.duration_s)
        elif fault.kind is FaultKind.FREEZE:
            seat.frozen_until = until
            incarnation = seat.incarnations
            self._at(until, lambda: self._wake(seat, incarnation))
        elif fault.kind is FaultKind.LOSE_REPORTS:
            seat.silent_until = until
        else:
            seat.delay_s = fault.duration_s

    def _kill(self, seat: _Seat, restart_s: float | None = None) -> None:
        """End an incarnation for certain; its requests go elsewhere, a new one starts later."""
        replica = seat.replica
        if replica is None:
            return
        seat.replica = None
        self.measured.restarts += 1
        self._count_computed(seat, replica)
        self.controller.declare_dead(replica.info.replica_id, self._now)
        delay = self.spec.restart_s if restart_s is None else restart_s
        self._at(self._now + delay, lambda: self._start(seat))
        for request in replica.unfinished():
            self._resubmit(request, replica.info.replica_id)

    def _finish(self) -> None:
        for seat in self._seats:
            if seat.replica is not None:
                self._count_computed(seat, seat.replica)
        self.measured.duration_s = self._now - self._workload.requests[0].arrival_s

    def _count_computed(self, seat: _Seat, replica: SimulatedReplica) -> None:
        computed = self.measured.computed_tokens
        name = f"replica-{seat.number}"
        computed[name] = computed.get(name, 0) + replica.computed_tokens
        self.measured.preemptions += replica.preemptions

    def _check(self) -> None:
        self.controller.check_integrity()
        for seat in self._seats:
            if seat.replica is not None:
                seat.replica.check_integrity()


def with_load(workload: Workload, cluster: ClusterSpec, load: float) -> Workload:
    """The workload at so many times the prompt tokens per second that the cluster can prefill."""
    rate = cluster.num_replicas * cluster.cost.prefill_tokens_per_s
    return workload.at_rate(rate * load)
