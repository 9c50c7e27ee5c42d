"""A whole cluster in one process on a virtual clock: the real controller over simulated replicas.

Replays a workload through `Controller`, exactly as gateways and leaders would drive it, and
measures what clients would see. Only time, the network and the models are simulated: decisions,
leases, the prefix index and the block pools are the real ones.

    arrival ─► reserve ─► lease ─► replica: wait, prefill, decode ─► done
                  └► ticket … grant ┘       └─ report ─► controller ─► grants
"""

import random
import time
from collections.abc import Callable

from ..protos.messages import (
    AdmissionClass,
    CacheIdentity,
    Lease,
    ModelCard,
    Refused,
    ReplicaReport,
    ReserveRequest,
)
from ..scheduler.block_hash import root_hash
from .controller import Controller, ControllerConfig
from .measurements import Measurements
from .replay_replica import Fetch, ReplayReplica, SimulatedRequest, make_request
from .simulated_seat import MakeReplica, Seat
from .simulation_spec import ClusterSpec, Fault, FaultKind, SimulationSpec
from .virtual_clock import VirtualClock
from .workload import TraceRequest, Workload

_MODEL = "simulated"
_GATEWAY = "gateway"
_HEARTBEAT_S = 1.0
_TICK_LAG_S = 0.001  # a report that says the same comes first
_MAX_ATTEMPTS = 50


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
        self._clock = VirtualClock()
        self._next_tick: float | None = None
        self._requests: dict[str, SimulatedRequest] = {}
        self._num_done = 0
        config = ControllerConfig(
            policy=spec.policy, admission=spec.admission, late_binding=spec.late_binding
        )
        self.controller = Controller(config, random.Random(spec.seed), 0.0)
        self._seats = [Seat(number) for number in range(spec.cluster.num_replicas)]
        self._seat_of = {seat.name: seat for seat in self._seats}

    @property
    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._clock.now

    def run(self) -> Measurements:
        """Until every request has ended."""
        for seat in self._seats:
            self._start(seat)
        for fault in self.spec.faults:
            self._clock.at(fault.at_s, lambda fault=fault: self._inject(fault))
        arrivals = enumerate(self._workload.requests)
        self._schedule_arrival(arrivals)
        total = len(self._workload.requests)
        while self._num_done < total:
            assert self._clock.step(), f"{total - self._num_done} requests are lost"
            if self.spec.check:
                self._check()
        self._finish()
        return self.measured

    # Events

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

        self._clock.at(trace.arrival_s, arrive)

    def _schedule_tick(self) -> None:
        wakeup = self.controller.next_wakeup(self.now)
        if wakeup is None:
            return
        when = max(wakeup, self.now) + _TICK_LAG_S
        if self._next_tick is None or when < self._next_tick:
            self._next_tick = when
            self._clock.at(when, lambda: self._tick(when))

    def _tick(self, due: float) -> None:
        if self._next_tick != due:
            return  # an earlier one was scheduled after it
        self._next_tick = None
        wakeup = self.controller.next_wakeup(self.now)
        if wakeup is not None and wakeup <= self.now:
            self._tick_controller()
        self._schedule_tick()

    def _tick_controller(self) -> None:
        for info in self.controller.tick(self.now):
            self._kill(self._seat_of[info.replica_id])
        self._take_grants()

    # Clients

    def _reserve(self, request: SimulatedRequest, excluded: tuple[str, ...] = ()) -> None:
        left = self.spec.deadline_s
        if left is not None:
            left -= self.now - request.trace.arrival_s
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
        answer = self.controller.reserve(message, self.now)
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
            for answer in self.controller.poll_grants(_GATEWAY, self.now):
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
        self._clock.at(self.now + refused.retry_after_s, lambda: self._reserve(request))

    def _submit(self, request: SimulatedRequest, lease: Lease) -> None:
        seat = self._seat_of[lease.replica_id]
        replica = seat.replica
        if request.has_first_appointment and request.first_retry_served is None:
            request.first_retry_served = True
        if replica is None or replica.info.incarnation != lease.incarnation:
            self.controller.replica_failed(lease.replica_id, lease.incarnation, self.now)
            self._resubmit(request, lease.replica_id)
            return
        request.lease = lease
        request.fetch = self._fetch(request, lease, seat)
        if not replica.submit(request, self.now):
            self._resubmit(request, lease.replica_id)
            return
        seat.has_news = True
        self._advance(seat)

    def _fetch(self, request: SimulatedRequest, lease: Lease, seat: Seat) -> Fetch | None:
        """What becomes of the transfer that its lease offers."""
        cost, offer = self.spec.transfer, lease.transfer
        if cost is None or offer is None or not isinstance(seat.replica, ReplayReplica):
            return None
        origin = self._seat_of[offer.source.replica_id]
        fetch, num_tokens = seat.fetch(request, offer, origin, cost, self.now)
        self.measured.transfers += num_tokens > 0
        self.measured.transfers_failed += num_tokens == 0
        self.measured.transferred_tokens += num_tokens
        return fetch

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
        self.measured.note_finished(request, self.spec.cluster.block_size)
        self._num_done += 1
        if self._progress is not None:
            self._progress(1)

    # Replicas

    def _start(self, seat: Seat) -> None:
        info = seat.begin(self.spec, self._identity, self._make_replica)
        card = ModelCard(_MODEL, "", self._identity, info.max_context, 1 << 17, ())
        self.controller.register_replica(info, card, self.now)
        self._report(seat, snapshot=True)
        incarnation = seat.incarnations
        self._clock.at(self.now + _HEARTBEAT_S, lambda: self._beat(seat, incarnation))

    def _beat(self, seat: Seat, incarnation: int) -> None:
        if seat.replica is None or seat.incarnations != incarnation:
            return
        if self.now - seat.last_report >= _HEARTBEAT_S:
            self._report(seat)
            self._take_grants()
        if self.now < seat.frozen_until:
            self._tick_controller()
        self._clock.at(self.now + _HEARTBEAT_S, lambda: self._beat(seat, incarnation))

    def _advance(self, seat: Seat) -> None:
        replica = seat.replica
        if replica is None or self.now < seat.frozen_until:
            return
        happenings, finished = replica.advance(self.now)
        incarnation = seat.incarnations
        for happening in happenings:
            self._clock.at(happening.at, lambda: self._wake(seat, incarnation))
        if seat.has_news or finished or self.now >= seat.last_report + self.spec.report_interval_s:
            seat.has_news = False
            self._report(seat)
        for request in finished:
            self.controller.release(request.key, request.attempt, self.now)
            self._done(request)
        self._take_grants()
        self._schedule_tick()

    def _wake(self, seat: Seat, incarnation: int) -> None:
        if seat.incarnations == incarnation:
            self._advance(seat)

    def _report(self, seat: Seat, *, snapshot: bool = False) -> None:
        replica = seat.replica
        if replica is None or self.now < seat.frozen_until:
            return
        seat.last_report = self.now
        report = replica.report(self.now, snapshot=snapshot)
        if self.now < seat.silent_until:
            return
        if seat.delay_s:
            self._clock.at(self.now + seat.delay_s, lambda: self._deliver(seat, report))
        else:
            self._deliver(seat, report)

    def _deliver(self, seat: Seat, report: ReplicaReport) -> None:
        begin = time.thread_time_ns()
        reply = self.controller.report(report, self.now)
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
        until = self.now + fault.duration_s
        if fault.kind is FaultKind.CRASH:
            self._kill(seat, fault.duration_s)
        elif fault.kind is FaultKind.FREEZE:
            seat.frozen_until = until
            incarnation = seat.incarnations
            self._clock.at(until, lambda: self._wake(seat, incarnation))
        elif fault.kind is FaultKind.LOSE_REPORTS:
            seat.silent_until = until
        else:
            seat.delay_s = fault.duration_s

    def _kill(self, seat: Seat, restart_s: float | None = None) -> None:
        """End an incarnation for certain; its requests go elsewhere, a new one starts later."""
        replica = seat.replica
        if replica is None:
            return
        seat.replica = None
        self.measured.restarts += 1
        self.measured.note_ended(seat.name, replica.computed_tokens, replica.preemptions)
        self.controller.declare_dead(replica.info.replica_id, self.now)
        delay = self.spec.restart_s if restart_s is None else restart_s
        self._clock.at(self.now + delay, lambda: self._start(seat))
        for request in replica.unfinished():
            self._resubmit(request, replica.info.replica_id)

    def _finish(self) -> None:
        for seat in self._seats:
            replica = seat.replica
            if replica is not None:
                self.measured.note_ended(seat.name, replica.computed_tokens, replica.preemptions)
        self.measured.duration_s = self.now - self._workload.requests[0].arrival_s

    def _check(self) -> None:
        self.controller.check_integrity()
        for seat in self._seats:
            if seat.replica is not None:
                seat.replica.check_integrity()


def with_load(workload: Workload, cluster: ClusterSpec, load: float) -> Workload:
    """The workload at so many times the prompt tokens per second that the cluster can prefill."""
    rate = cluster.num_replicas * cluster.cost.prefill_tokens_per_s
    return workload.at_rate(rate * load)
