"""What is simulated: the cluster, the policy, what goes wrong, and how clients behave."""

from dataclasses import dataclass, field
from enum import StrEnum

from .admission import AdmissionConfig
from .binding_costs import LateBindingConfig
from .replay_replica import ReplayCost


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
