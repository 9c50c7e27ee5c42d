"""Makers of the controller's inputs, and a replica that keeps a ledger as a leader does."""

import itertools
import random
from dataclasses import dataclass, field

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.cluster.binding_costs import LateBindingConfig
from pagefleet.cluster.controller import Controller, ControllerConfig
from pagefleet.cluster.replica_view import ReplicaColumns
from pagefleet.protos.messages import (
    AdmissionClass,
    BlockCounts,
    CacheIdentity,
    Lease,
    LeaseUse,
    ModelCard,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
    ReserveRequest,
    RouteEvents,
)

IDENTITY = CacheIdentity("fingerprint", 1, "float32", 16)


def make_hashes(count: int, chain: int = 0) -> tuple[bytes, ...]:
    """So many route hashes of one prompt."""
    return tuple(f"{chain:8d}{depth:8d}".encode() for depth in range(count))


def make_info(replica_id: str = "r0", incarnation: str = "a", **fields: object) -> ReplicaInfo:
    """A replica of 100 blocks of 16 tokens."""
    values: dict[str, object] = {
        "replica_id": replica_id,
        "incarnation": incarnation,
        "model": "m",
        "identity": IDENTITY,
        "address": f"{replica_id}:1",
        "stream_secret": "secret",
        "num_blocks": 100,
        "num_host_blocks": 0,
        "max_context": 4096,
        "max_num_sequences": 64,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 0.01,
    }
    return ReplicaInfo(**(values | fields))  # pyright: ignore


def make_card(info: ReplicaInfo) -> ModelCard:
    """The card of the replica's model."""
    return ModelCard(info.model, "", info.identity, info.max_context, 1000, (2,))


_keys = itertools.count()


def make_request(**fields: object) -> ReserveRequest:
    """A guaranteed request of 64 prompt tokens and at most 16 more: 5 blocks."""
    values: dict[str, object] = {
        "request_key": f"q{next(_keys)}",
        "attempt": 1,
        "gateway_id": "g",
        "model": "m",
        "route_hashes": (),
        "num_tokens": 64,
        "num_samples": 1,
        "max_tokens": 16,
        "admission_class": AdmissionClass.GUARANTEED,
    }
    return ReserveRequest(**(values | fields))  # pyright: ignore


def make_columns(count: int, **values: list[float]) -> ReplicaColumns:
    """The numbers of so many empty replicas of 100 blocks that compute 1,000 tokens a second."""
    columns = ReplicaColumns()
    for slot in range(count):
        columns.add_slot()
        columns.open[slot] = True
        columns.token_s[slot] = 1e-3
        columns.max_active[slot] = 64
        columns.total[slot] = 100
        columns.set_available(slot, 100)
    for name, column in values.items():
        getattr(columns, name)[:] = column
    return columns


def make_controller(
    policy: str = "default",
    *,
    admission: AdmissionConfig | None = None,
    start_slack_s: float = 1e9,
    seed: int = 0,
    **fields: object,
) -> Controller:
    """Binds whatever fits by default: prefill backlog is what a test has to ask for."""
    config = ControllerConfig(
        policy=policy,
        admission=admission or AdmissionConfig(),
        late_binding=LateBindingConfig(start_slack_s=start_slack_s),
        **fields,  # pyright: ignore
    )
    return Controller(config, random.Random(seed), 0.0)


@dataclass
class FakeReplica:
    """A leader's ledger and pool by count, without an engine."""

    info: ReplicaInfo
    total: int = 100
    used: dict[int, int] = field(default_factory=dict)
    remaining: dict[int, int] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    resident: set[bytes] = field(default_factory=set)
    stored: set[bytes] = field(default_factory=set)
    removed: set[bytes] = field(default_factory=set)
    sequence: int = 0
    steps: int = 0
    epoch: int = 0
    prefill_tokens: int = 0

    @property
    def free(self) -> int:
        return self.total - sum(self.used.values())

    def accept(self, lease: Lease) -> bool:
        """False is the leader's NACK: the promised blocks are not there."""
        if lease.num_blocks > self.free - sum(self.remaining.values()):
            return False
        self.remaining[lease.lease_id] = lease.num_blocks
        self.used[lease.lease_id] = 0
        return True

    def take(self, lease_id: int, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.remaining[lease_id])
        self.remaining[lease_id] -= num_blocks
        self.used[lease_id] += num_blocks
        self.steps += 1

    def finish(self, lease_id: int) -> None:
        del self.used[lease_id], self.remaining[lease_id]
        self.finished.append(lease_id)
        self.steps += 1

    def store(self, *hashes: bytes) -> None:
        new = set(hashes) - self.resident
        self.resident |= new
        self.removed -= new
        self.stored |= new

    def drop(self, *hashes: bytes) -> None:
        gone = set(hashes) & self.resident
        self.resident -= gone
        self.removed |= gone - self.stored
        self.stored -= gone

    def report(self, *, snapshot: bool = False, **fields: object) -> ReplicaReport:
        """The next report; taking it consumes the changes, as a leader's does."""
        self.sequence += 1
        digest = 0
        for route_hash in self.resident:
            digest ^= int.from_bytes(route_hash)
        if snapshot:
            events = RouteEvents(stored_device=tuple(self.resident))
        else:
            events = RouteEvents(tuple(self.stored), tuple(self.removed))
        self.stored, self.removed = set(), set()
        finished, self.finished = tuple(self.finished), []
        used = sum(self.used.values())
        values: dict[str, object] = {
            "replica_id": self.info.replica_id,
            "incarnation": self.info.incarnation,
            "epoch": self.epoch,
            "sequence_number": self.sequence,
            "steps_done": self.steps,
            "device": BlockCounts(clean=self.total - used, referenced=used),
            "host": BlockCounts(),
            "leases": tuple(LeaseUse(*item) for item in self.remaining.items()),
            "finished_leases": finished,
            "num_waiting": 0,
            "num_running": len(self.used),
            "waiting_prefill_tokens": self.prefill_tokens,
            "prefill_tokens_per_s": self.info.prefill_tokens_per_s,
            "decode_step_s": self.info.decode_step_s,
            "copy_bytes_per_s": 0.0,
            "preemptions": 0,
            "events": events,
            "digest_device": digest,
            "is_snapshot": snapshot,
        }
        return ReplicaReport(**(values | fields))  # pyright: ignore


def join(controller: Controller, info: ReplicaInfo, now: float = 0.0) -> FakeReplica:
    """Register a replica and send its first snapshot."""
    replica = FakeReplica(info, info.num_blocks)
    reply = controller.register_replica(info, make_card(info), now)
    assert reply.needs_snapshot, f"{reply} to a new incarnation"
    controller.report(replica.report(snapshot=True), now)
    return replica


def tell(controller: Controller, replica: FakeReplica, now: float, **fields: object) -> ReportReply:
    """Report, and answer a request for a snapshot."""
    reply = controller.report(replica.report(**fields), now)  # pyright: ignore
    if reply.needs_snapshot:
        reply = controller.report(replica.report(snapshot=True), now)
    return reply
