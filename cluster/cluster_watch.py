"""One gateway's watchers of the cluster: each gets what changed since its last update.

However many watch, and however often, the controller is asked no more than a few times a second.
Knows views and who has seen what; no protocol.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..protos.errors import InvalidArgument, Overloaded
from ..protos.messages import ClusterView, PoolMap
from .controller_client import ControllerClient
from .recent_rates import Rates, RecentRates

DEFAULT_PERIOD_S = 1.0
MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 60.0
_MAX_WATCHERS = 64
_MAX_FIRST_DECISIONS = 64  # of those made before the watcher came
_HITS_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterUpdate:
    """What one watcher is told: the view, with those maps and decisions only that it lacks.

    query_tokens, hit_tokens: looked up and found by all replicas in the last seconds.
    """

    view: ClusterView
    rates: Rates
    query_tokens: int
    hit_tokens: int


@dataclass(slots=True)
class _Seen:
    """What a watcher has already."""

    maps: dict[tuple[str, str], PoolMap] = field(default_factory=dict[tuple[str, str], PoolMap])
    last_decision: int | None = None


class ClusterWatch:
    """Shared by all watchers of one gateway."""

    def __init__(
        self,
        controller: ControllerClient,
        rates: RecentRates,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._rates = rates
        self._clock = clock
        self._view: ClusterView | None = None
        self._view_at = 0.0
        self._fetching: asyncio.Task[None] | None = None
        self._hits: deque[tuple[float, int, int]] = deque()
        self._closed = asyncio.Event()
        self.num_watchers = 0

    async def updates(self, period_s: float) -> AsyncGenerator[ClusterUpdate]:
        """One now, then one each period until the reader has enough.

        Raises InvalidArgument, Overloaded where too many watch, and what the controller raises.
        """
        if not MIN_PERIOD_S <= period_s <= MAX_PERIOD_S:
            raise InvalidArgument("period_s", f"must be from {MIN_PERIOD_S:g} to {MAX_PERIOD_S:g}")
        if self.num_watchers >= _MAX_WATCHERS:
            raise Overloaded(f"{_MAX_WATCHERS} watch already", retry_after_s=10.0)
        self.num_watchers += 1
        seen = _Seen()
        try:
            while not self._closed.is_set():
                view = await self._latest()
                yield self._update(view, seen)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), period_s)
        finally:
            self.num_watchers -= 1

    def close(self) -> None:
        """End every watcher's updates: the gateway stops, and need not wait for them."""
        self._closed.set()

    async def _latest(self) -> ClusterView:
        """A view of this moment, or one that another watcher has just got."""
        if self._view is None or self._clock() - self._view_at >= MIN_PERIOD_S:
            if self._fetching is None or self._fetching.done():
                self._fetching = asyncio.create_task(self._fetch())
            await asyncio.shield(self._fetching)
        assert self._view is not None, "fetched, or raised"
        return self._view

    async def _fetch(self) -> None:
        self._view = await self._controller.watch()
        now = self._view_at = self._clock()
        replicas = self._view.state.replicas
        queries = sum(replica.query_tokens for replica in replicas)
        hits = sum(replica.hit_tokens for replica in replicas)
        if self._hits and queries < self._hits[-1][1]:
            self._hits.clear()  # a replica is gone, and what it had counted
        self._hits.append((now, queries, hits))
        while now - self._hits[0][0] > _HITS_WINDOW_S:
            self._hits.popleft()

    def _update(self, view: ClusterView, seen: _Seen) -> ClusterUpdate:
        pools = tuple(
            pool for pool in view.pools if seen.maps.get((pool.replica_id, pool.tier)) != pool.map
        )
        seen.maps = {(pool.replica_id, pool.tier): pool.map for pool in view.pools}
        decisions = view.decisions
        newest = decisions[-1].number if decisions else 0
        if seen.last_decision is None:
            decisions = decisions[-_MAX_FIRST_DECISIONS:]
        elif newest >= seen.last_decision:  # else the controller began anew: all are new
            decisions = tuple(item for item in decisions if item.number > (seen.last_decision or 0))
        seen.last_decision = newest
        first, last = self._hits[0], self._hits[-1]
        return ClusterUpdate(
            view=replace(view, pools=pools, decisions=decisions),
            rates=self._rates.rates(),
            query_tokens=last[1] - first[1],
            hit_tokens=last[2] - first[2],
        )
