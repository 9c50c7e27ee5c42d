"""The routing policies of other systems, as baselines behind our interface.

Each binds on arrival, as its original does. Formulas and constants are those of the projects'
current defaults; costs are in each policy's own unit. Sizes that they count in their own blocks
are counted in 512 tokens, so that a policy decides alike whatever our block size is.
"""

import numpy as np
import xxhash

from ..scheduler.block_hash import route_depth, route_tokens
from .prefix_index import bits
from .replica_view import FloatArray, ReplicaColumns
from .routing_policy import RoutedRequest

_UNIT_TOKENS = 512


class Baseline:
    """What the baselines share: bound on arrival, no memory of their own."""

    name = ""
    late_binding = False
    speculative = False

    def placed(self, request: RoutedRequest, slot: int) -> None:
        """Nothing to remember."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""


class RoundRobin(Baseline):
    """The next replica in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        slots = np.arange(replicas.num_slots)
        return ((slots - self._next) % max(1, replicas.num_slots)).astype(np.float64)

    def placed(self, request: RoutedRequest, slot: int) -> None:
        self._next = slot + 1


class LeastRequests(Baseline):
    """The fewest requests waiting or running."""

    name = "least-requests"

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        return replicas.active.astype(np.float64)


def _two_of(request: RoutedRequest, slots: np.ndarray) -> np.ndarray:
    if len(slots) <= 2:
        return slots
    first = request.draw("first", len(slots))
    second = request.draw("second", len(slots) - 1)
    return slots[[first, second + (second >= first)]]


def _only(slots: np.ndarray, costs: FloatArray) -> FloatArray:
    limited = np.full(len(costs), np.inf)
    limited[slots] = costs[slots]
    return limited


class PowerOfTwo(Baseline):
    """Two at random, the one with fewer requests."""

    name = "power-of-two"

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        pair = _two_of(request, np.flatnonzero(request.candidates))
        return _only(pair, replicas.active.astype(np.float64))


class ConsistentHash(Baseline):
    """Rendezvous hash of the first 1,024 tokens, passed on where load exceeds 1.25 of the mean."""

    name = "consistent-hash"
    _prefix_tokens = 1024
    _bound = 1.25

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        depth = route_depth(self._prefix_tokens, request.block_size)
        depth = min(depth, len(request.route_hashes))
        key = request.route_hashes[depth - 1] if depth else request.key.encode()
        ranks = _shuffled(key, replicas.num_slots)
        active = replicas.active
        mean = (active[request.candidates].sum() + 1) / max(1, int(request.candidates.sum()))
        over = active + 1 > np.ceil(self._bound * mean)
        return ranks + np.where(over, 2.0**60, 0.0)


def _shuffled(key: bytes, num_slots: int) -> FloatArray:
    """Ranks that put the slots in an order of the key's own."""
    digest = xxhash.xxh3_64_intdigest
    ranks = [digest(key + slot.to_bytes(4, "little")) >> 12 for slot in range(num_slots)]
    return np.array(ranks, dtype=np.float64)


class _RoutedTree:
    """Prefixes by where they were *routed*: what routers without cache events know."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}

    def longest(self, hashes: tuple[bytes, ...], alive: int) -> tuple[int, int]:
        """Depth of the longest known prefix, and the slots it was routed to."""
        holders = 0
        for depth, route_hash in enumerate(hashes):
            mask = self._masks.get(route_hash, 0) & alive
            if not mask:
                return depth, holders
            holders = mask
        return len(hashes), holders

    def insert(self, request: RoutedRequest, slot: int) -> None:
        bit = 1 << slot
        known = 0
        for depth, route_hash in enumerate(request.route_hashes, 1):
            mask = self._masks.get(route_hash, 0)
            if mask & bit:
                known = depth
            else:
                self._masks[route_hash] = mask | bit
        # What follows the last hash is never found again, but its text is in the tree.
        new = request.num_tokens - route_tokens(known, request.block_size)
        self._sizes[slot] = self._sizes.get(slot, 0) + new

    def sizes(self, num_slots: int) -> FloatArray:
        """Tokens by slot."""
        return np.array([self._sizes.get(slot, 0) for slot in range(num_slots)], dtype=np.float64)

    def forget(self, slot: int) -> None:
        keep = ~(1 << slot)
        self._masks = {key: mask & keep for key, mask in self._masks.items() if mask & keep}
        self._sizes.pop(slot, None)


def _candidate_mask(request: RoutedRequest) -> int:
    mask = 0
    for slot in np.flatnonzero(request.candidates):
        mask |= 1 << int(slot)
    return mask


def _match_share(request: RoutedRequest, depth: int) -> float:
    return route_tokens(depth, request.block_size) / max(1, request.num_tokens)


class RayPrefix(Baseline):
    """Ray Serve's prefix affinity: the longest match, else the smallest tree; then two choices.

    Its imbalance threshold is infinite by default, so load matters only between holders.
    """

    name = "ray-prefix"
    _least_match = 0.1

    def __init__(self) -> None:
        self._tree = _RoutedTree()

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        depth, holders = self._tree.longest(request.route_hashes, _candidate_mask(request))
        if _match_share(request, depth) >= self._least_match:
            slots = np.fromiter(bits(holders), dtype=np.int64)
        else:
            sizes = np.where(request.candidates, self._tree.sizes(replicas.num_slots), np.inf)
            slots = np.flatnonzero(sizes == sizes.min())
        pair = _two_of(request, slots)
        return _only(pair, replicas.active.astype(np.float64))

    def placed(self, request: RoutedRequest, slot: int) -> None:
        self._tree.insert(request, slot)

    def forget(self, slot: int) -> None:
        self._tree.forget(slot)


class SglangCacheAware(Baseline):
    """sglang's cache-aware router: shortest queue when unbalanced, else best match, else the
    least loaded. Thresholds 0.3, 64 and 1.5: those of its command line."""

    name = "sglang"
    _least_match = 0.3
    _absolute = 64
    _relative = 1.5

    def __init__(self) -> None:
        self._tree = _RoutedTree()

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        active = replicas.active.astype(np.float64)
        loads = active[request.candidates]
        most, least = loads.max(initial=0.0), loads.min(initial=np.inf)
        if most - least > self._absolute and most > self._relative * least:
            return active
        depth, holders = self._tree.longest(request.route_hashes, _candidate_mask(request))
        if _match_share(request, depth) > self._least_match:
            # A node of its tree names its holders in an arbitrary order that never changes.
            order = _shuffled(request.route_hashes[depth - 1], len(active))
            return _only(np.fromiter(bits(holders), dtype=np.int64), order)
        return active

    def placed(self, request: RoutedRequest, slot: int) -> None:
        self._tree.insert(request, slot)

    def forget(self, slot: int) -> None:
        self._tree.forget(slot)


class Dynamo(Baseline):
    """Dynamo's KV router: blocks to prefill plus blocks in use, overlap weight 1."""

    name = "dynamo"
    _host_credit = 0.75

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        credit = request.device_tokens
        if request.host_tokens is not None:
            credit = credit + self._host_credit * request.host_tokens
        pending = replicas.prefill_tokens + request.num_tokens
        scale = request.block_size / _UNIT_TOKENS
        in_use = replicas.pinned.astype(np.float64) * scale
        return np.maximum((pending - credit) / _UNIT_TOKENS, 0.0) + in_use


class Llmd(Baseline):
    """llm-d's precise scorers: prefix 2, KV utilisation 1, queue 1."""

    name = "llmd"

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        prefix = request.device_tokens / max(1, request.num_tokens)
        free = 1.0 - replicas.pinned / np.maximum(replicas.total, 1)
        waiting = replicas.waiting.astype(np.float64)
        queues = waiting[request.candidates]
        most, least = queues.max(initial=0.0), queues.min(initial=0.0)
        queue = np.ones_like(waiting) if most == least else (most - waiting) / (most - least)
        return -(2.0 * prefix + free + queue)


class LMetric(Baseline):
    """LMetric: new prefill tokens times batch size, both after the request is placed."""

    name = "lmetric"

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        pending = replicas.prefill_tokens + request.uncached_tokens()
        return pending * (replicas.active + 1.0)


class MinTtft(Baseline):
    """The least time to the first token: prefill work before it plus its own."""

    name = "min-ttft"

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        pending = replicas.prefill_tokens + request.uncached_tokens()
        return 1e3 * pending * replicas.token_s


BASELINES = (
    RoundRobin,
    LeastRequests,
    PowerOfTwo,
    ConsistentHash,
    RayPrefix,
    SglangCacheAware,
    Dynamo,
    Llmd,
    LMetric,
    MinTtft,
)
