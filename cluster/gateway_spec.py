"""What a gateway is, over all its lives: plain values. Loads nothing of one."""

from dataclasses import dataclass, field

from .security import GatewaySecurity


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Models whose first replica comes when somebody asks, and how long a request waits for it."""

    models: tuple[str, ...] = ()
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """Ports: 0 = any free one.

    bind_timeout_s: how long to wait for ports that a predecessor still has.
    orphan_s: it outlives whoever created it; once nobody has pinged it for so long, it lets its
        streams end, for up to `retire_s`, and is gone. None = it ends with its creator.
    """

    host: str
    grpc_port: int
    http_port: int
    security: GatewaySecurity | None = None
    on_demand: OnDemand = field(default_factory=OnDemand)
    bind_timeout_s: float = 0.0
    orphan_s: float | None = None
    retire_s: float = 600.0
