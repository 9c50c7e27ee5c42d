"""What it costs to copy a prefix from one replica to another, against computing it again.

    copying = a wait for the two replicas' links + what any transfer takes + bytes over bandwidth
              + loading them from the host tier, all as measured, over the share that succeeds
    it pays where computing takes more than `caution` times that, by `min_gain_s` at least

Arrays in, arrays out: knows slots and seconds; who asks, and what is granted, is decided outside.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protos.messages import ReplicaInfo, TransferStats

# Before a replica has fetched anything: within one host it is several times as fast.
START_BYTES_PER_S = 1e9
START_OVERHEAD_S = 0.01
NO_SOURCE = -1

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """When a transfer is offered. max_wait_s: for one, whatever computing would take.
    max_fullness: where the pools are fuller than this on average, who is chosen does not depend on
    transfers: a second copy of a prefix drives out something else.
    """

    enabled: bool = True
    caution: float = 1.5
    min_gain_s: float = 0.005
    min_wait_s: float = 0.25
    max_wait_s: float = 5.0
    max_fullness: float = 0.5


@dataclass(frozen=True, slots=True)
class Source:
    """The replica that holds most of a prompt, and how many of its tokens."""

    slot: int = NO_SOURCE
    num_tokens: float = 0.0


NOWHERE = Source()


@dataclass(frozen=True, slots=True)
class Fetches:
    """By (request, slot): tokens that would be copied there, and the seconds that takes; 0 where
    computing them is cheaper."""

    tokens: FloatArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Links:
    """What pricing needs of replicas, by slot.

    groups: replicas of the same number exchange blocks; 0 = with nobody. token_s: to compute one;
    fetch_token_s, overhead_s: to copy one, and what a transfer takes besides. busy_until: by
    transfers granted already.
    """

    groups: IntArray
    token_s: FloatArray
    fetch_token_s: FloatArray
    overhead_s: FloatArray
    busy_until: FloatArray


def exchange_group(info: ReplicaInfo) -> int:
    """Equal for replicas whose blocks are alike on every rank; 0 = it exchanges none."""
    if not info.actors or not info.block_bytes:
        return 0
    return info.block_bytes * 4096 + len(info.actors)


def fetch_prices(
    info: ReplicaInfo, stats: TransferStats, load_token_s: float
) -> tuple[float, float]:
    """Seconds to copy one token to the replica, and what any transfer takes besides."""
    succeeds = (stats.done + 2.0) / (stats.done + stats.failed + 2.0)
    rate = stats.bytes_per_s or START_BYTES_PER_S
    overhead_s = stats.overhead_s or START_OVERHEAD_S
    token_s = info.block_bytes / info.identity.block_size / rate
    return (token_s + load_token_s) / succeeds, overhead_s / succeeds


def price_fetches(
    config: TransferConfig,
    links: Links,
    source_slots: IntArray | int,
    source_tokens: FloatArray | float,
    hits: FloatArray,
    slots: slice | IntArray,
    now: float,
) -> Fetches:
    """For requests whose best sources are given, on some slots that hold `hits` of their tokens.

    source_slots, source_tokens: [num_requests, 1], no tokens where there is none;
    hits: [num_requests, number of slots]. Or of one request alone, as scalars, with hits [number
    of slots].
    """
    groups = links.groups[slots]
    more = source_tokens - hits
    starts = np.maximum(links.busy_until[slots], np.maximum(links.busy_until[source_slots], now))
    seconds = starts - now + links.overhead_s[slots] + more * links.fetch_token_s[slots]
    gain = more * links.token_s[slots] - config.caution * seconds
    pays = (more > 0.0) & (gain >= config.min_gain_s)
    pays &= (groups == links.groups[source_slots]) & (groups > 0)
    return Fetches(more * pays, seconds * pays)
