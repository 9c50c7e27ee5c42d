"""Where a request should go: one method, a cost per replica, the lowest wins.

Defines what a policy sees and the registry of policies. Whether a request *may* go somewhere, and
what is reserved for it, is decided outside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from .prefix_transfer import NOWHERE, Source
from .replica_view import BoolArray, FloatArray, ReplicaColumns


@dataclass(slots=True)
class RoutedRequest:
    """One request as policies see it; arrays are by slot.

    candidates: slots it may go to. device_tokens: prompt tokens resident on the device.
    host_tokens: further ones on the host tier. route_tokens: tokens covered by the whole chain.
    source: who could send most of it to another replica.
    """

    key: str
    route_hashes: tuple[bytes, ...]
    num_tokens: int
    num_blocks: int
    block_size: int
    expected_output_tokens: float
    candidates: BoolArray
    device_tokens: FloatArray
    host_tokens: FloatArray | None = None
    source: Source = NOWHERE

    def uncached_tokens(self) -> FloatArray:
        """Tokens to compute per slot; the last prompt token always is."""
        return np.maximum(self.num_tokens - self.hit_tokens(), 1.0)

    def hit_tokens(self) -> FloatArray:
        """Tokens that need no computing per slot."""
        if self.host_tokens is None:
            return np.minimum(self.device_tokens, self.num_tokens - 1.0)
        return np.minimum(self.device_tokens + self.host_tokens, self.num_tokens - 1.0)

    def draw(self, purpose: str, limit: int) -> int:
        """A number below `limit`, random by request id, the same each time it is asked."""
        return xxhash.xxh3_64_intdigest(f"{purpose}/{self.key}".encode()) % limit


class RoutingPolicy(Protocol):
    """One way to choose a replica.

    late_binding: False = bound on arrival, to wait at the replica; True = bound when it can start.
    speculative: whether prompts that were routed but not yet computed count as resident.
    """

    name: str
    late_binding: bool
    speculative: bool

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        """Cost per slot, float64 [num_slots]; only differences between slots matter."""
        ...

    def placed(self, request: RoutedRequest, slot: int) -> None:
        """The request was given to that slot."""
        ...

    def forget(self, slot: int) -> None:
        """The slot's replica is gone or restarted."""
        ...


def cheapest(request: RoutedRequest, costs: FloatArray) -> int | None:
    """The candidate of least cost; ties are broken at random by request id."""
    masked = np.where(request.candidates, costs, np.inf)
    best = masked.min(initial=np.inf)
    if best == np.inf:
        return None
    ties = np.flatnonzero(masked == best)
    if len(ties) == 1:
        return int(ties[0])
    return int(ties[request.draw("tie", len(ties))])


PolicyFactory = Callable[[], RoutingPolicy]
