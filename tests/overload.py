"""Five times too much for a minute, then half: the clients, and what they saw.

The real controller, replicas and clients on a virtual clock. Clients come back when they are told.
Shared by the test that demands something of it and the benchmark that prints it.
"""

import random
from dataclasses import dataclass, field, replace

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.cluster.replay_replica import ReplayCost, SimulatedRequest
from pagefleet.cluster.simulation_spec import ClusterSpec, SimulationSpec
from pagefleet.cluster.simulator import Simulation
from pagefleet.cluster.stepped_replica import SteppedReplica
from pagefleet.cluster.workload import SyntheticSpec, TraceRequest, Workload, synthetic
from pagefleet.protos.messages import AdmissionClass, Refused

CLUSTER = ClusterSpec(2, 400, 512, ReplayCost(max_running=32))
CAPACITY = 13.0  # requests a second: 64 sequences of about 4.8 s
SLO_S = 2.0
OVERLOAD = (30.0, 80.0)  # once it has set in
AFTER = (90.0, 140.0)


@dataclass(slots=True)
class Served:
    """A request that was served: when it last asked, and when it got what."""

    trace: TraceRequest
    asked_s: float
    first_token_s: float
    finished_s: float

    def seconds_in(self, window: tuple[float, float]) -> float:
        """How long it generated inside the window."""
        begin, end = window
        return max(0.0, min(self.finished_s, end) - max(self.first_token_s, begin))

    def tokens_in(self, window: tuple[float, float]) -> float:
        """What it generated inside the window."""
        share = self.seconds_in(window) / (self.finished_s - self.first_token_s)
        return share * self.trace.num_output_tokens

    def block_seconds_in(self, window: tuple[float, float]) -> float:
        """What it used inside the window."""
        tokens = self.trace.num_prompt_tokens + self.trace.num_output_tokens
        return -(-tokens // CLUSTER.block_size) * self.seconds_in(window)


@dataclass(slots=True)
class Record:
    """What clients saw."""

    asked_s: dict[str, float] = field(default_factory=dict[str, float])
    served: list[Served] = field(default_factory=list[Served])
    hints: list[float | None] = field(default_factory=list[float | None])

    def goodput(self, window: tuple[float, float]) -> float:
        """Tokens a second in the window, of requests that began in time."""
        good = [each for each in self.served if each.first_token_s - each.asked_s <= SLO_S]
        return sum(each.tokens_in(window) for each in good) / (window[1] - window[0])

    def share(self, tenant: str, window: tuple[float, float]) -> float:
        """The tenant's part of all block-seconds in the window."""
        used = {"heavy": 0.0, "light": 0.0}
        for each in self.served:
            used[each.trace.tenant] += each.block_seconds_in(window)
        return used[tenant] / sum(used.values())


class Watched(Simulation):
    """A simulation that keeps a record of its clients."""

    def __init__(self, spec: SimulationSpec, workload: Workload, *args: object) -> None:
        super().__init__(spec, workload, *args)  # pyright: ignore
        self.record = Record()

    def _reserve(self, request: SimulatedRequest, excluded: tuple[str, ...] = ()) -> None:
        self.record.asked_s[request.key] = self.now
        super()._reserve(request, excluded)

    def _take_refusal(self, request: SimulatedRequest, refused: Refused) -> None:
        self.record.hints.append(refused.retry_after_s)
        super()._take_refusal(request, refused)

    def _done(self, request: SimulatedRequest) -> None:
        if request.first_token_s is not None and request.finished_s is not None:
            asked_s = self.record.asked_s[request.key]
            served = Served(request.trace, asked_s, request.first_token_s, request.finished_s)
            self.record.served.append(served)
        super()._done(request)


def phases(*parts: tuple[float, float], heavy: float) -> Workload:
    """(requests a second, seconds) one after the other; tenant "heavy" sends so large a part."""
    rng = random.Random(7)
    requests: list[TraceRequest] = []
    start = 0.0
    for rate, seconds in parts:
        spec = SyntheticSpec(
            num_requests=int(rate * (seconds + 150)), requests_per_s=rate, seed=rng.getrandbits(30)
        )
        conversations = synthetic(spec).requests
        begin = conversations[0].arrival_s + 60.0  # late enough for every turn to be under way
        for request in conversations:
            if begin <= request.arrival_s < begin + seconds:
                tenant = "heavy" if rng.random() < heavy else "light"
                arrival = start + request.arrival_s - begin
                requests.append(replace(request, arrival_s=arrival, tenant=tenant))
        start += seconds
    return Workload("phases", tuple(sorted(requests, key=lambda request: request.arrival_s)))


def watch(workload: Workload, **fields: object) -> Watched:
    admission = AdmissionConfig(max_queue_s=1.0)
    spec = SimulationSpec(CLUSTER, admission=admission, max_retries=50, **fields)  # pyright: ignore
    simulation = Watched(spec, workload)
    simulation.run()
    return simulation


@dataclass(frozen=True, slots=True)
class Overload:
    """One run of it. Goodput: of that at capacity, while the overload lasts and afterwards.
    kept: of the clients that came back in time, how many were served then. heavy_share: of the
    block-seconds, of the tenant that sends `heavy` of all requests. num_left: requests and
    appointments that the controller still has at the end.
    """

    heavy: float
    goodput_overload: float
    goodput_after: float
    num_refusals: int
    num_hints: int
    num_appointments: int
    kept: float
    heavy_share: float
    num_unserved: int
    num_left: int


def run_overload(heavy: float) -> Overload:
    """20 s at capacity, 60 s of five times that, 60 s of half of it."""
    at_capacity = watch(phases((CAPACITY, 80.0), heavy=heavy)).record.goodput((30.0, 80.0))
    workload = phases((CAPACITY, 20.0), (5 * CAPACITY, 60.0), (CAPACITY / 2, 60.0), heavy=heavy)
    simulation = watch(workload)
    record, measured = simulation.record, simulation.measured
    (pool,) = simulation.controller.pools().values()
    return Overload(
        heavy,
        goodput_overload=record.goodput(OVERLOAD) / at_capacity,
        goodput_after=record.goodput(AFTER) / at_capacity,
        num_refusals=len(record.hints),
        num_hints=sum(hint is not None for hint in record.hints),
        num_appointments=measured.first_retries,
        kept=measured.first_retries_served / max(1, measured.first_retries),
        heavy_share=record.share("heavy", OVERLOAD),
        num_unserved=len(workload.requests) - measured.finished,
        num_left=len(pool.queue) + len(pool.gate.book),
    )


def run_preemptions(seed: int) -> dict[AdmissionClass, int]:
    """How often requests of each class were preempted where blocks are short."""
    cluster = ClusterSpec(2, 48, 16, ReplayCost(max_running=16, token_s=0.005), max_context=512)
    rng = random.Random(seed)
    classes = (AdmissionClass.GUARANTEED, AdmissionClass.STANDARD, AdmissionClass.BEST_EFFORT)
    requests = tuple(
        TraceRequest(
            arrival_s=0.02 * number,
            num_prompt_tokens=rng.randrange(20, 120),
            num_output_tokens=rng.randrange(40, 200),
            pieces=((number, 1),),
            admission_class=rng.choice(classes),
        )
        for number in range(120)
    )
    preempted: dict[AdmissionClass, int] = dict.fromkeys(classes, 0)

    class Counted(Watched):
        def _done(self, request: SimulatedRequest) -> None:
            preempted[request.trace.admission_class] += request.num_preemptions
            super()._done(request)

    spec = SimulationSpec(cluster, report_interval_s=0.02, check=True)
    measured = Counted(spec, Workload("classes", requests), SteppedReplica).run()
    assert measured.finished == len(requests), f"{measured.finished} of {len(requests)} finished"
    return preempted
