"""One replica's place in a simulated cluster: its incarnations follow one another here.

Knows what faults do to it and for how long its link is taken. When things happen, and what the
controller is told of them, is the simulator's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..protos.messages import (
    CacheIdentity,
    PrefixTransfer,
    ReplicaInfo,
    ReplicaReport,
    TransferStats,
)
from .replay_replica import Fetch, Happening, ReplayCost, ReplayReplica, SimulatedRequest
from .simulation_spec import SimulationSpec, TransferCost


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


MakeReplica = Callable[[ReplicaInfo, ReplayCost], SimulatedReplica]


@dataclass(slots=True)
class Seat:
    """replica: the incarnation that lives; None = none does. frozen_until, silent_until, delay_s:
    the faults that it suffers."""

    number: int
    replica: SimulatedReplica | None = None
    incarnations: int = 0
    frozen_until: float = 0.0
    silent_until: float = 0.0
    delay_s: float = 0.0
    last_report: float = 0.0
    has_news: bool = False
    link_busy_until: float = 0.0

    @property
    def name(self) -> str:
        """The replica's id, the same for all incarnations."""
        return f"replica-{self.number}"

    def begin(
        self, spec: SimulationSpec, identity: CacheIdentity, make_replica: MakeReplica
    ) -> ReplicaInfo:
        """The next incarnation lives, empty."""
        self.incarnations += 1
        self.frozen_until = 0.0
        info = self._describe(spec, identity)
        cost = replace(spec.cluster.cost, reports_progress=spec.policy == "default")
        self.replica = make_replica(info, cost)
        if spec.transfer is not None and isinstance(self.replica, ReplayReplica):
            bandwidth, overhead_s = spec.transfer.bytes_per_s, spec.transfer.overhead_s
            measured = TransferStats(done=1, bytes_per_s=bandwidth, overhead_s=overhead_s)
            self.replica.transfers = measured
        return info

    def fetch(
        self,
        request: SimulatedRequest,
        offer: PrefixTransfer,
        origin: "Seat",
        cost: TransferCost,
        now: float,
    ) -> tuple[Fetch, int]:
        """What becomes of a transfer that a lease here offers: when it ends, and how many tokens
        have been copied by then; none = it has failed."""
        assert isinstance(self.replica, ReplayReplica), f"{self.name} exchanges no blocks"
        num_blocks = origin.num_held(request, offer, now)
        missing = max(0, num_blocks - self.replica.num_held(request))
        num_tokens = missing * self.replica.info.identity.block_size
        begin = max(now, origin.link_busy_until, self.link_busy_until)
        end = begin + cost.overhead_s + num_tokens * cost.kv_bytes_per_token / cost.bytes_per_s
        if not missing or end - now > offer.timeout_s:
            return Fetch(min(end, now + offer.timeout_s), 0), 0
        origin.link_busy_until = self.link_busy_until = end
        return Fetch(end, num_blocks), num_tokens

    def num_held(self, request: SimulatedRequest, offer: PrefixTransfer, now: float) -> int:
        """How many of the prompt's first blocks this could send, as the offer says it can."""
        replica = self.replica
        if not isinstance(replica, ReplayReplica) or now < self.frozen_until:
            return 0
        if replica.info.incarnation != offer.source.incarnation:
            return 0
        return replica.num_held(request)

    def _describe(self, spec: SimulationSpec, identity: CacheIdentity) -> ReplicaInfo:
        cluster, transfer = spec.cluster, spec.transfer
        kv_bytes = 0 if transfer is None else transfer.kv_bytes_per_token
        return ReplicaInfo(
            replica_id=self.name,
            incarnation=f"life-{self.incarnations}",
            model=identity.model_fingerprint,
            identity=identity,
            address="",
            stream_secret="",
            num_blocks=cluster.num_blocks,
            num_host_blocks=0,
            max_context=cluster.max_context,
            max_num_sequences=cluster.cost.max_running,
            prefill_tokens_per_s=cluster.cost.prefill_tokens_per_s,
            decode_step_s=cluster.cost.token_s,
            block_bytes=kv_bytes * cluster.block_size,
            actors=() if transfer is None else (self.name,),
        )
