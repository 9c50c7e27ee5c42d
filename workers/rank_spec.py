"""What a rank is told of its replica. Loads no torch: whoever starts the ranks passes it on."""

from dataclasses import dataclass
from enum import StrEnum


class Transport(StrEnum):
    """What carries tensors in host memory, and messages."""

    SHARED_MEMORY = "shared-memory"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place among those of its replica.

    group_name: the same on all ranks, new with every incarnation.
    store_host, store_port: where rank 0 listens; read by Transport.TORCH and on GPUs.
    timeout_s: for a rank to enter a collective; start_timeout_s: to come, and to load its weights.
    """

    group_name: str = ""
    rank: int = 0
    world_size: int = 1
    transport: Transport = Transport.SHARED_MEMORY
    store_host: str = "127.0.0.1"
    store_port: int = 0
    timeout_s: float = 30.0
    start_timeout_s: float = 120.0
