"""The gate of one model's queue: how much a request needs, and whether it may wait for it.

Refuses what can never run and, under overload, what would wait too long, with a time to come back.
Reads the replicas and the queue; grants nothing and moves nobody.
"""

from dataclasses import dataclass, field

from ..protos.messages import AdmissionClass, Refused, ReserveRequest
from .admission import AdmissionConfig, Need, compute_need, least_blocks
from .appointments import AppointmentBook
from .fair_queue import FairQueue, WaitingRequest
from .forecast import OutputLengths
from .replica_pool import ReplicaPool
from .wait_forecast import Capacity, WaitForecast, Work

# Appointments leave so much room for an error of the forecast; newcomers fill what it leaves.
_SLACK = 1.1


@dataclass(slots=True)
class AdmissionGate:
    """Everything that stands between a request and the queue.

    lengths: of outputs, learnt as requests end. book: refused clients' appointments.
    """

    config: AdmissionConfig
    pool: ReplicaPool
    queue: FairQueue
    book: AppointmentBook
    block_size: int
    lengths: OutputLengths = field(default_factory=OutputLengths)
    forecast: WaitForecast = field(default_factory=WaitForecast)

    def refuse(self, request: ReserveRequest, now: float, *, book: bool = True) -> Refused | None:
        """Why it is not even queued. book: whether a full queue makes an appointment."""
        if not self.pool.replicas and not self.config.hold_s:
            return refused(request, "Unavailable", "no replica is ready", retry_after_s=1.0)
        if request.deadline_s is not None and request.deadline_s <= 0.0:
            return refused_deadline(request)
        problem = self.never_fits(request)
        if problem is not None:
            return refused(request, "InvalidArgument", problem)
        return self._refuse_overload(request, now, book=book)

    def need_of(self, request: ReserveRequest) -> Need:
        """The size of its lease."""
        most = self.pool.max_num_blocks
        need = compute_need(
            request,
            self.lengths,
            block_size=self.block_size,
            max_context=self.pool.max_context,
            standard_quantile=self.config.standard_quantile,
        )
        if need.num_blocks <= most:
            return need
        return Need(most, need.growth_tokens, need.expected_output_tokens)

    def duration_s(self, request: ReserveRequest, need: Need) -> float:
        """How long it will hold its blocks."""
        token_s, step_s = self.pool.columns.slowest
        return request.num_tokens * token_s + need.expected_output_tokens * step_s

    def expected_wait_s(self, tenant: str, now: float) -> float:
        """Seconds until a newcomer of the tenant would start, after all that goes before it."""
        columns = self.pool.columns
        is_open = columns.open
        if not is_open.any():
            return self.config.appointments.max_retry_after_s
        soonest = float(columns.backlog_s(now)[is_open].min())
        booked_s = self.book.kept_share * self.book.booked_s(tenant, now)
        return soonest + self.forecast.factor * self._queued_s(tenant) + booked_s

    def keep_appointment(self, request: ReserveRequest, now: float) -> float | None:
        """It is let in; answers when it was refused, if it comes by appointment."""
        appointment = self.book.find(request.retry_token, now)
        if appointment is None:
            return None
        self.book.keep(request.retry_token)
        return appointment.refused_at

    def granted(self, waiting: WaitingRequest, now: float) -> None:
        """It has left the queue with a lease: learn how fast the cluster works."""
        alone_s = self._capacity().seconds_for(waiting.work)
        self.forecast.granted(alone_s, now, others_wait=len(self.queue) > 0)

    def never_fits(self, request: ReserveRequest) -> str | None:
        """Why no replica could ever run it; None if one could."""
        if request.admission_class is AdmissionClass.GUARANTEED and request.max_tokens is None:
            return "sampling.max_tokens: a guaranteed request must set it"
        max_context, most = self.pool.max_context, self.pool.max_num_blocks
        if request.num_tokens >= max_context + (request.max_tokens == 0):
            return f"prompt: {request.num_tokens} tokens, the model's context is {max_context}"
        least = least_blocks(request, self.block_size)
        if least > most:
            return f"prompt: needs {least} blocks at least, the largest pool has {most}"
        return None

    # One step each

    def _refuse_overload(
        self, request: ReserveRequest, now: float, *, book: bool
    ) -> Refused | None:
        config, queue = self.config, self.queue
        appointment = self.book.find(request.retry_token, now)
        if appointment is not None and self.book.is_early(appointment, now):
            return refused(
                request,
                "Overloaded",
                "before the time of its appointment",
                retry_after_s=appointment.due - now,
                retry_token=request.retry_token,
            )
        if appointment is not None or len(queue) == 0:
            return None
        over_s = 0.0
        if config.max_queue_s is not None:
            over_s = self.expected_wait_s(request.tenant, now) - config.max_queue_s
        if over_s <= 0.0 and not self._is_full(request):
            return None
        if not book:
            return refused(request, "Overloaded", "the queue is full", retry_after_s=over_s)
        service_s = self._service_s(request)
        token, after_s = self.book.make(
            request.tenant, now, room_in_s=max(over_s, service_s), service_s=service_s
        )
        return refused(
            request,
            "Overloaded",
            "the queue is full",
            retry_after_s=after_s,
            retry_token=token,
        )

    def _is_full(self, request: ReserveRequest) -> bool:
        """Whether the queue is at a bound, and the tenant at its share of it."""
        config, queue = self.config, self.queue
        tenant = request.tenant
        num_tenants = len(queue.tenants | {tenant})
        num_tokens = queue.work_of(tenant).num_tokens + request.num_tokens
        return (
            len(queue) >= config.max_queued_requests
            and queue.num_waiting(tenant) * num_tenants >= config.max_queued_requests
        ) or (
            queue.num_tokens + request.num_tokens > config.max_queued_tokens
            and num_tokens * num_tenants > config.max_queued_tokens
        )

    def _service_s(self, request: ReserveRequest) -> float:
        """How long the tenant's share of the cluster needs for this request."""
        need = self.need_of(request)
        duration_s = self.duration_s(request, need)
        work = Work.of(request.num_tokens, need.num_blocks, request.num_samples, duration_s)
        num_tenants = len(self.queue.tenants | self.book.tenants | {request.tenant})
        return _SLACK * self._capacity().seconds_for(work) * self.forecast.factor * num_tenants

    def _prefill_rate(self) -> float:
        columns = self.pool.columns
        is_open = columns.open
        if not is_open.any():
            return 1.0
        return float((1.0 / columns.token_s[is_open]).sum())

    def _queued_s(self, tenant: str) -> float:
        """How long the queue keeps the cluster busy before the tenant's next turn, uncorrected:
        all of it, or the tenant's own at the tenant's share."""
        queue, capacity = self.queue, self._capacity()
        num_tenants = len(queue.tenants | {tenant})
        own_s = capacity.seconds_for(queue.work_of(tenant)) * num_tenants
        return min(capacity.seconds_for(queue.work), own_s)

    def _capacity(self) -> Capacity:
        columns = self.pool.columns
        is_open = columns.open
        return Capacity(
            self._prefill_rate(),
            int(columns.total[is_open].sum()),
            int(columns.max_active[is_open].sum()),
        )


def refused(
    request: ReserveRequest,
    error: str,
    reason: str,
    *,
    retry_after_s: float | None = None,
    retry_token: str = "",
) -> Refused:
    """An answer to this attempt of the request."""
    return Refused(request.request_key, request.attempt, error, reason, retry_after_s, retry_token)


def refused_deadline(request: ReserveRequest) -> Refused:
    """It came too late to run."""
    return refused(request, "DeadlineExceeded", "its deadline passed before it could start")
