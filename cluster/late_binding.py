"""The default policy: the order of the queue and the choice of replica are one decision.

Nothing is bound before a replica can start it: its prefill queue is (nearly) empty and the blocks
fit. Of all pairs of a waiting request and such a replica, the one of least cost goes first:

    prefill of what is not resident there + loading from its host tier
    + prefill that another replica's cache would have saved (that work is being done twice)
    + crowding of its pool, and the request's share of the pool's time where blocks are scarce
    - a head start that grows with the time already waited

A request stays in the queue while a replica that is busy now would still serve it sooner, its
cached prefix counted more than once, because keeping a prefix in one place has a future value.
Who has been passed over for too long gets a replica held: only what ends before the blocks for
it are there may still start on that one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .binding_costs import BindingCosts, Contenders, LateBindingConfig, Some
from .fair_queue import FairQueue
from .forecast import wait_for_blocks_s
from .prefix_transfer import Fetches, price_fetches
from .replica_view import BoolArray, FloatArray, IntArray, ReplicaColumns
from .routing_policy import RoutedRequest

Releases = Callable[[int], list[tuple[float, int]]]
_EVERY = slice(None)
_MANY_SLOTS = 64  # of more than these only the promising are weighed against all that wait


@dataclass(frozen=True, slots=True)
class Hold:
    """A request that was passed over for long, the slot held for it, and when its blocks fit."""

    row: int
    slot: int
    fits_at: float


@dataclass(slots=True)
class CostTerms:
    """One request's cost per slot, in ms."""

    prefill: FloatArray
    load: FloatArray
    queue: FloatArray
    batch: FloatArray
    affinity: FloatArray
    transfer: FloatArray
    transfer_tokens: FloatArray

    def total(self) -> FloatArray:
        """What decides."""
        cached = self.load + self.transfer + self.affinity
        return self.prefill + cached + self.queue + self.batch


class LateBinding:
    """Holds only its settings: all state is in the queue and the columns."""

    name = "default"
    late_binding = True
    speculative = True

    def __init__(self, config: LateBindingConfig | None = None) -> None:
        self.config = config or LateBindingConfig()
        self._costs = BindingCosts(self.config)

    def placed(self, request: RoutedRequest, slot: int) -> None:
        """Nothing to remember."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        """The cost of binding this request now."""
        return self.terms(request, replicas, now).total()

    def terms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> CostTerms:
        """The cost, term by term."""
        token_ms = 1e3 * replicas.token_s
        hits = request.hit_tokens()
        best_hit = hits[replicas.open].max(initial=0.0)
        load = np.zeros_like(token_ms)
        if request.host_tokens is not None:
            load = 1e3 * request.host_tokens * replicas.load_token_s
        fetches = self._fetches_of(request, replicas, now)
        fetched = np.minimum(fetches.tokens, request.uncached_tokens() - 1.0)
        near = hits + fetched
        return CostTerms(
            prefill=(request.uncached_tokens() - fetched) * token_ms,
            transfer=1e3 * fetches.seconds,
            transfer_tokens=fetched,
            load=load,
            queue=1e3 * replicas.backlog_s(now),
            batch=1e3 * self.config.crowding_s * replicas.fullness,
            affinity=self.config.duplicate_weight * np.maximum(best_hit - near, 0.0) * token_ms,
        )

    def _fetches_of(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> Fetches:
        source = request.source
        return price_fetches(
            self.config.transfer,
            replicas.links,
            source.slot,
            source.num_tokens,
            request.hit_tokens(),
            _EVERY,
            now,
        )

    def can_start(self, replicas: ReplicaColumns, now: float) -> BoolArray:
        """Slots whose next step has room for another prompt."""
        idle = replicas.work_end <= now + self.config.start_slack_s
        idle &= replicas.open
        idle &= replicas.active < replicas.max_active
        return idle

    def choose_newcomer(
        self, newcomer: Contenders, candidates: BoolArray, replicas: ReplicaColumns, now: float
    ) -> int | None:
        """The slot to bind one request to now if nobody else waits. candidates: where it fits."""
        startable = self.can_start(replicas, now)
        startable &= candidates
        if not np.count_nonzero(startable):
            return None
        costs = self._costs.of_pairs(newcomer, replicas, _EVERY, now)
        costs[~startable] = np.inf
        best = int(costs.argmin())
        return None if costs[best] == np.inf else best

    def choose(
        self, queue: FairQueue, replicas: ReplicaColumns, now: float, releases: Releases
    ) -> tuple[int, int] | None:
        """The (row of the queue, slot) to bind now, if any. releases: (end, blocks) by slot."""
        startable = self.can_start(replicas, now)
        slots = startable.nonzero()[0]
        if len(slots) == 0 or len(queue) == 0:
            return None
        hold = self._find_hold(queue, replicas, now, releases)
        if (
            hold is not None
            and startable[hold.slot]
            and self._wanted(queue, hold.row, hold.slot) <= replicas.available[hold.slot]
        ):
            return hold.row, hold.slot
        if len(slots) > _MANY_SLOTS:
            slots = _promising(queue, replicas, slots)
        turn = queue.in_turn()
        pair = self._choose_among(queue, replicas, slots, turn, now, hold)
        if pair is None and turn is not None:  # rather another tenant's request than an idle slot
            pair = self._choose_among(queue, replicas, slots, None, now, hold)
        return pair

    def _find_hold(
        self, queue: FairQueue, replicas: ReplicaColumns, now: float, releases: Releases
    ) -> Hold | None:
        config = self.config
        patience = config.hold_after_s + config.hold_after_waits * queue.mean_wait_s
        oldest = queue.longest_waiting()
        if oldest is None or now - oldest.arrived_at <= patience:
            return None
        row = oldest.row
        best: Hold | None = None
        for slot in np.flatnonzero(replicas.open & ~queue.barred[row]).tolist():
            missing = self._wanted(queue, row, slot) - int(replicas.available[slot])
            wait = wait_for_blocks_s(missing, releases(slot), now) if missing > 0 else 0.0
            if wait is None:
                continue
            fits_at = max(now + wait, float(replicas.work_end[slot]))
            if best is None or fits_at < best.fits_at:
                best = Hold(row, slot, fits_at)
        return best

    def _wanted(self, queue: FairQueue, row: int, slot: int) -> int:
        return int(queue.needs[row] - queue.shared[row, slot])

    def _choose_among(
        self,
        queue: FairQueue,
        replicas: ReplicaColumns,
        slots: IntArray,
        turn: BoolArray | None,
        now: float,
        hold: Hold | None,
    ) -> tuple[int, int] | None:
        rows = (queue.waiting if turn is None else turn).nonzero()[0]
        if len(rows) == 0:
            return None
        some_rows, some_slots = _narrow(rows), _narrow(slots)
        fits = queue.fitting(some_rows, some_slots, replicas.available)
        if hold is not None:
            fits[:, slots == hold.slot] &= (now + queue.durations[rows] <= hold.fits_at)[:, None]
        if not fits.any():
            return None
        waited = now - queue.since[some_rows, None]
        contenders = Contenders(
            queue.tokens[some_rows, None],
            queue.needs[some_rows, None],
            queue.durations[some_rows, None],
            queue.hits[some_rows],
            queue.host_hits[some_rows] if queue.has_host_hits else None,
            self._sources(queue, replicas, some_rows),
            waited <= self.config.settle_after_s + self.config.hold_after_waits * queue.mean_wait_s,
        )
        costs = self._costs.of_pairs(contenders, replicas, some_slots, now)
        costs -= self.config.age_weight * self._head_start(waited)
        costs[~fits] = np.inf
        best = int(costs.argmin())
        if costs.flat[best] == np.inf:
            return None
        return int(rows[best // len(slots)]), int(slots[best % len(slots)])

    def _sources(
        self, queue: FairQueue, replicas: ReplicaColumns, rows: Some
    ) -> tuple[IntArray, FloatArray] | None:
        if not self.config.transfer.enabled or replicas.exchanging.bit_count() < 2:
            return None
        return queue.source_slots[rows, None], queue.source_tokens[rows, None]

    def _head_start(self, waited: FloatArray) -> FloatArray:
        """By seconds waited; they are negative where a lower priority comes later."""
        return np.maximum(waited, 0.0) ** self.config.age_power + np.minimum(waited, 0.0)


def _promising(queue: FairQueue, replicas: ReplicaColumns, slots: IntArray) -> IntArray:
    """Of many slots those that hold more of some prompt than others do, and the emptiest: the
    rest are worth no more than these."""
    hits = queue.hits[queue.waiting][:, slots]
    if queue.has_host_hits:
        hits += queue.host_hits[queue.waiting][:, slots]
    holds_more = (hits > hits.min(axis=1, keepdims=True)).any(axis=0)
    emptiest = np.argpartition(replicas.fullness[slots], _MANY_SLOTS // 2)[: _MANY_SLOTS // 2]
    holds_more[emptiest] = True
    return slots[holds_more]


def _narrow(indices: IntArray) -> Some:
    """Neighbours as a slice: a view costs less than a copy."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first < len(indices) else indices
