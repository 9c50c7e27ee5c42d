"""What it costs to bind a request to a replica now: seconds, for all pairs at once.

    prefill of what is not resident there, or of copying it from elsewhere where that is cheaper
    + loading from its host tier
    + prefill that another replica's cache would have saved (that work is being done twice)
    + crowding of its pool, and the request's share of the pool's time where blocks are scarce

and nothing is cheap enough where a replica that is busy now would still serve the request sooner.
Decisions are made in microseconds: what a case does not have (a host tier, transfers, a scarce
pool, busy replicas) costs no array operation. Knows neither the queue's order nor who may go.
"""

from dataclasses import dataclass, field

import numpy as np

from .prefix_transfer import Fetches, TransferConfig, price_fetches
from .replica_view import BoolArray, FloatArray, IntArray, ReplicaColumns

Some = slice | IntArray  # which slots


@dataclass(frozen=True, slots=True)
class LateBindingConfig:
    """Weights; one setting for every cluster.

    start_slack_s: a replica with less prefill work than this can start one more, so that its next
    step is full when the grant arrives. size_cap_s: prefill beyond this counts no more, so that
    long prompts are not passed over for ever shorter ones. duplicate_weight: of prefill that a
    cache elsewhere would save. crowding_s: cost of a full pool. scarcity_weight: of the request's
    share of the pool times its duration, once the pool is fuller than scarcity_from. age_weight:
    of the head start,
    seconds waited to the power age_power. affinity_weight, affinity_full_weight: how often a hit
    counts when weighing a busy replica, and how much more often where all pools are full: a second
    copy of a prefix then drives out something else. hold_after_s, hold_after_waits: who has
    waited longer than the first plus so many times the recent mean wait gets a replica held.
    settle_after_s: who has waited so long, plus hold_after_waits times that mean, takes a replica
    that is free: the busy one that it would rather have may never have room. transfer: when a
    prefix is copied from another replica instead of computed.
    """

    start_slack_s: float = 0.0
    size_cap_s: float = 0.7
    duplicate_weight: float = 1.0
    crowding_s: float = 0.6
    scarcity_weight: float = 1.3
    scarcity_from: float = 0.75
    age_weight: float = 0.06
    age_power: float = 1.5
    affinity_weight: float = 1.4
    affinity_full_weight: float = 1.5
    settle_after_s: float = 5.0
    hold_after_s: float = 15.0
    hold_after_waits: float = 3.0
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, slots=True)
class Contenders:
    """Requests to weigh: one a row [num_rows, 1], hits [num_rows, num_slots]; or one alone, as
    scalars, its hits [num_slots]. hits: tokens on the device. durations: seconds. sources: slots
    that could send most of each, and how many tokens; None where nobody exchanges blocks.
    may_wait: whether it may stay in the queue for a busy replica."""

    tokens: FloatArray | float
    needs: IntArray | int
    durations: FloatArray | float
    hits: FloatArray
    host_hits: FloatArray | None
    sources: tuple[IntArray | int, FloatArray | float] | None = None
    may_wait: BoolArray | bool = True

    def on_host(self) -> FloatArray | None:
        """Tokens on the host tiers beyond those on the device; the last one is always computed."""
        if self.host_hits is None:
            return None
        return np.minimum(self.host_hits, self.tokens - 1.0 - self.hits)


class BindingCosts:
    """Holds only its settings."""

    def __init__(self, config: LateBindingConfig) -> None:
        self.config = config

    def of_pairs(
        self, contenders: Contenders, replicas: ReplicaColumns, slots: Some, now: float
    ) -> FloatArray:
        """Seconds per request and slot of `slots`; inf where a busy replica would be better."""
        token_s, on_host = replicas.token_s[slots], contenders.on_host()
        hits = contenders.hits if on_host is None else contenders.hits + on_host
        fetches = self._fetches(contenders, replicas, hits, slots, now)
        work_s = (contenders.tokens - contenders.hits[..., slots]) * token_s
        if fetches is not None:
            work_s -= fetches.tokens * token_s - fetches.seconds
        costs = np.minimum(work_s, self.config.size_cap_s)
        costs += self.config.crowding_s * replicas.fullness[slots]
        if on_host is not None:
            costs += on_host[..., slots] * (replicas.load_token_s[slots] - token_s)
        redone = _redone(hits, replicas.open, slots, fetches)
        costs += self.config.duplicate_weight * redone * token_s
        scarcity_s = self._scarcity_s(contenders, replicas, slots)
        if scarcity_s is not None:
            costs += scarcity_s
        later = self._better_later(contenders.tokens, hits, replicas, slots, now, fetches)
        if later is not None:
            costs[later & contenders.may_wait] = np.inf
        return costs

    def _fetches(
        self,
        contenders: Contenders,
        replicas: ReplicaColumns,
        hits: FloatArray,
        slots: Some,
        now: float,
    ) -> Fetches | None:
        """What would be copied from elsewhere; None where that is to have no say."""
        config, sources = self.config.transfer, contenders.sources
        if sources is None or replicas.mean_fullness() > config.max_fullness:
            return None
        return price_fetches(config, replicas.links, *sources, hits[..., slots], slots, now)

    def _scarcity_s(
        self, contenders: Contenders, replicas: ReplicaColumns, slots: Some
    ) -> FloatArray | None:
        """What the request's share of the pool's time costs; None while no pool is scarce."""
        config = self.config
        above = replicas.fullness[slots] - config.scarcity_from
        if np.maximum.reduce(above) <= 0.0:
            return None
        weight = config.scarcity_weight / (1.0 - config.scarcity_from)
        share = contenders.needs / np.maximum(replicas.total[slots], 1)
        return weight * np.maximum(above, 0.0) * share * contenders.durations

    def _better_later(
        self,
        tokens: FloatArray | float,
        hits: FloatArray,
        replicas: ReplicaColumns,
        slots: Some,
        now: float,
        fetches: Fetches | None,
    ) -> BoolArray | None:
        """Which pairs a replica that is busy now would still beat, its hits counted over; None
        where none is busy."""
        config = self.config
        is_busy = replicas.open & (replicas.work_end > now + config.start_slack_s)
        busy = is_busy.nonzero()[0]
        if len(busy) == 0:
            return None
        full = replicas.mean_fullness()
        affinity = config.affinity_weight + config.affinity_full_weight * full
        weighted = (tokens - affinity * hits) * replicas.token_s
        done = weighted[..., busy] + (replicas.work_end[busy] - now)
        start = weighted[..., slots]
        if fetches is not None:  # they count once: what they bring stands in two places
            start = start - fetches.tokens * replicas.token_s[slots] + fetches.seconds
        return np.minimum.reduce(done, axis=-1, keepdims=True) < start


def _redone(
    hits: FloatArray, is_open: BoolArray, slots: Some, fetches: Fetches | None
) -> FloatArray:
    """Tokens to compute that are cached on another replica already."""
    best_hits = np.maximum.reduce(hits, axis=-1, keepdims=True, where=is_open, initial=0.0)
    redone = best_hits - hits[..., slots]
    return redone if fetches is None else np.maximum(redone - fetches.tokens, 0.0)
