"""The default policy: the order of the queue and the choice of replica are one decision.

Nothing is bound before a replica can start it: its prefill queue is (nearly) empty and the blocks
fit. Of all pairs of a waiting request and such a replica, the one of least cost goes first:

    prefill of what is not resident there + loading from its host tier
    + prefill that another replica's cache would have saved (that work is being done twice)
    + crowding of its pool
    - a head start that grows with the time already waited

A request stays in the queue while a replica that is busy now would still serve it sooner, its
cached prefix counted more than once, because keeping a prefix in one place has a future value.
"""

from dataclasses import dataclass

import numpy as np

from .fair_queue import FairQueue
from .replica_view import BoolArray, FloatArray, ReplicaColumns
from .routing_policy import RoutedRequest


@dataclass(frozen=True, slots=True)
class LateBindingConfig:
    """Weights, all in seconds or dimensionless; one setting for every cluster.

    start_slack_s: a replica with less prefill work than this can start one more, so that its next
    step is full when the grant arrives. crowding_s: cost of a full pool. age_weight: head start
    per second waited. affinity_weight: how often a hit counts when weighing a busy replica.
    hold_after_s: who has waited longer gets a replica held for it.
    """

    start_slack_s: float = 0.0
    crowding_s: float = 0.5
    age_weight: float = 0.3
    affinity_weight: float = 4.0
    hold_after_s: float = 20.0


@dataclass(slots=True)
class CostTerms:
    """One request's cost per slot, in ms."""

    prefill: FloatArray
    load: FloatArray
    queue: FloatArray
    batch: FloatArray
    affinity: FloatArray

    def total(self) -> FloatArray:
        """What decides."""
        return self.prefill + self.load + self.queue + self.batch + self.affinity


class LateBinding:
    """Holds only its settings: all state is in the queue and the columns."""

    name = "default"
    late_binding = True
    speculative = True

    def __init__(self, config: LateBindingConfig | None = None) -> None:
        self.config = config or LateBindingConfig()

    def placed(self, request: RoutedRequest, slot: int) -> None:
        """Nothing to remember."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""

    def cost_ms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> FloatArray:
        """The cost of binding this request now."""
        return self.terms(request, replicas, now).total()

    def terms(self, request: RoutedRequest, replicas: ReplicaColumns, now: float) -> CostTerms:
        """The cost, term by term."""
        count = replicas.num_slots
        token_ms = 1e3 * replicas.token_s[:count]
        hits = request.hit_tokens()
        best_hit = hits[replicas.open[:count]].max(initial=0.0)
        load = np.zeros(count)
        if request.host_tokens is not None:
            load = 1e3 * request.host_tokens * replicas.load_token_s[:count]
        return CostTerms(
            prefill=request.uncached_tokens() * token_ms,
            load=load,
            queue=1e3 * replicas.backlog_s(now),
            batch=1e3 * self.config.crowding_s * _pinned_share(replicas),
            affinity=np.maximum(best_hit - hits, 0.0) * token_ms,
        )

    def can_start(self, replicas: ReplicaColumns, now: float) -> BoolArray:
        """Slots whose next step has room for another prompt."""
        count = replicas.num_slots
        idle = replicas.work_end[:count] <= now + self.config.start_slack_s
        return idle & replicas.open[:count] & (replicas.active < replicas.max_active)[:count]

    def choose(
        self, queue: FairQueue, replicas: ReplicaColumns, now: float
    ) -> tuple[int, int] | None:
        """The (row of the queue, slot) to bind now, if any."""
        startable = self.can_start(replicas, now)
        slots = np.flatnonzero(startable)
        if len(slots) == 0 or len(queue) == 0:
            return None
        turn = queue.in_turn()
        pair = self._choose_among(queue, replicas, slots, turn, now)
        if pair is None and turn is not None:  # rather another tenant's request than an idle slot
            pair = self._choose_among(queue, replicas, slots, None, now)
        return pair

    def _choose_among(
        self,
        queue: FairQueue,
        replicas: ReplicaColumns,
        slots: np.ndarray,
        turn: BoolArray | None,
        now: float,
    ) -> tuple[int, int] | None:
        rows = np.flatnonzero(queue.waiting if turn is None else turn)
        fits = queue.needs[rows, None] <= replicas.available[slots]
        fits &= ~queue.barred[np.ix_(rows, slots)]
        if not fits.any():
            return None
        costs = self._pair_costs_s(queue, replicas, rows, slots, now)
        costs[~fits] = np.inf
        best = int(costs.argmin())
        if costs.flat[best] == np.inf:
            return None
        return int(rows[best // len(slots)]), int(slots[best % len(slots)])

    def _pair_costs_s(
        self,
        queue: FairQueue,
        replicas: ReplicaColumns,
        rows: np.ndarray,
        slots: np.ndarray,
        now: float,
    ) -> FloatArray:
        """Seconds per (row, slot); inf where a busy replica would be better."""
        config, count = self.config, replicas.num_slots
        tokens = queue.tokens[rows, None]
        hits = np.minimum(queue.hits[rows, :count], tokens - 1.0)
        token_s = replicas.token_s[:count]
        here = hits[:, slots]
        open_hits = np.where(replicas.open[:count], hits, 0.0)
        prefill = (tokens - here) * token_s[slots]
        lost = np.maximum(open_hits.max(axis=1, keepdims=True) - here, 0.0) * token_s[slots]
        crowding = config.crowding_s * _pinned_share(replicas)[slots]
        waited = now - queue.since[rows, None]
        costs = prefill + lost + crowding - config.age_weight * waited
        sooner = self._served_sooner(replicas, tokens, hits, now) < (
            (tokens - config.affinity_weight * here) * token_s[slots]
        )
        return np.where(sooner, np.inf, costs)

    def _served_sooner(
        self, replicas: ReplicaColumns, tokens: FloatArray, hits: FloatArray, now: float
    ) -> FloatArray:
        """When the best replica that is busy now would be done, its hits counted over."""
        count = replicas.num_slots
        weighted = (tokens - self.config.affinity_weight * hits) * replicas.token_s[:count]
        done = replicas.backlog_s(now) + weighted
        busy = replicas.open[:count] & (replicas.work_end[:count] > now)
        return np.where(busy, done, np.inf).min(axis=1, keepdims=True)


def _pinned_share(replicas: ReplicaColumns) -> FloatArray:
    count = replicas.num_slots
    return replicas.pinned[:count] / np.maximum(replicas.total[:count], 1)
