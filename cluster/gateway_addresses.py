"""Where a gateway listens. Loads nothing of one: whoever starts it is told these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """Where clients find a gateway: host:port of each front."""

    grpc: str
    http: str
