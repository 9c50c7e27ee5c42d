"""What a leader tells the controller, and when.

Registers, reports after steps (rate-limited) and at least each second, repeats what may have been
lost, and obeys the replies. Knows no Ray: the controller is behind `ControllerLink`. Decides
nothing about blocks.

    change ─► wait until 50 ms after the last report ─► take stats between two steps ─► report
    reply:  unknown ─► register, then a snapshot     needs_snapshot ─► a snapshot
            fence   ─► the leader stops serving      draining       ─► it ends once it is empty
            lost    ─► again, after a pause          reset_order    ─► forget what is cached
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ..protos.errors import Unavailable
from ..protos.messages import (
    ModelCard,
    PoolMap,
    ReplicaCounters,
    ReplicaInfo,
    ReplicaReport,
    ReportReply,
    RouteEvents,
    TransferPeer,
    TransferStats,
)
from ..scheduler.scheduler import Scheduler
from ..scheduler.stats import SchedulerStats
from .controller_link import ControllerLink, ControllerUnreachable
from .step_times import StepTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReportedEngine(Protocol):
    """What is reported of an engine."""

    @property
    def steps_done(self) -> int:
        """The watchdog's pulse."""
        ...

    @property
    def step_times(self) -> StepTimes:
        """Measured speed."""
        ...

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Run `function` between two steps."""
        ...

    def take_output_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample that ended by itself since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one report says, read between two steps."""

    stats: SchedulerStats
    events: RouteEvents
    finished_leases: tuple[int, ...]
    is_snapshot: bool
    maps: tuple[PoolMap | None, PoolMap | None]


class Reporter:
    """Reports one incarnation of one replica. `tick` does what is due; `run` calls it in time.

    Args:
        on_fence: called when the controller has declared this incarnation dead.
        on_drain: called, with each reply that says so, when this replica has to go, and with the
            seconds its streams may still take.
        on_peers: called with each such reply: who may take over what is hot of its cache.
        transfer_stats: what was fetched from other replicas; None = nothing can be.
        min_interval_s, max_interval_s: between reports while things change, and while they do not.
        map_interval_s: between two maps of the pools, while the controller asks for them.
        retry_s: pause after a call that failed.
    """

    def __init__(
        self,
        engine: ReportedEngine,
        link: ControllerLink,
        info: ReplicaInfo,
        card: ModelCard,
        *,
        on_fence: Callable[[], None],
        on_drain: Callable[[float], None],
        on_peers: Callable[[tuple[TransferPeer, ...]], None] | None = None,
        transfer_stats: Callable[[], TransferStats] | None = None,
        clock: Callable[[], float] = time.monotonic,
        min_interval_s: float = 0.05,
        max_interval_s: float = 1.0,
        retry_s: float = 0.5,
        map_interval_s: float = 0.5,
    ) -> None:
        self._engine = engine
        self._link = link
        self._info = info
        self._card = card
        self._on_fence = on_fence
        self._on_drain = on_drain
        self._on_peers = on_peers
        self._transfer_stats = transfer_stats or TransferStats
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._max_interval_s = max_interval_s
        self._retry_s = retry_s
        self._map_interval_s = map_interval_s
        self._map_cells = 0  # of each map; 0 = nobody looks
        self._map_not_before = clock()
        self._is_registered = False
        self._needs_snapshot = True
        self._changed = asyncio.Event()
        self._last_report_at: float | None = None
        self._not_before = clock()
        self._sequence_number = 0
        self._taking: asyncio.Future[_Taken] | None = None
        self._last_taken: _Taken | None = None
        self._unconfirmed_leases: tuple[int, ...] = ()
        self.is_draining = False
        self.renews = False
        self._reset_order = 0
        self._reset_blocks = 0
        self._reset: asyncio.Future[int] | None = None
        self.num_failed_calls = 0

    @property
    def has_changes(self) -> bool:
        """Whether a change is waiting to be reported."""
        return self._changed.is_set()

    def notice_change(self) -> None:
        """There is something new to report. Only on the loop that runs this reporter."""
        self._changed.set()

    async def run(self) -> None:
        """Report until cancelled, or until the engine has ended."""
        try:
            while True:
                await self._pause(await self.tick())
        except Unavailable:
            logger.info("the engine has ended, and with it its reports")

    async def register(self) -> bool:
        """Make this incarnation known; False if the controller could not be reached."""
        try:
            reply = await self._link.register_replica(self._info, self._card)
        except ControllerUnreachable as error:
            self._note_failure(error)
            return False
        self._is_registered = True
        self._needs_snapshot = True  # a controller that did not know us has nothing of ours
        self._obey(reply)
        return True

    async def tick(self) -> float:
        """Do what is due now; answers the seconds until something is, if nothing changes."""
        if not self._is_registered:
            return 0.0 if await self.register() else self._retry_s
        wait_s = self._due_at() - self._clock()
        if wait_s > 0.0:
            return wait_s
        self._changed.clear()
        report = self._make_report(await self._take())
        if report is not None:
            await self._send(report)
        return max(self._due_at() - self._clock(), 0.0)

    def _due_at(self) -> float:
        if self._last_report_at is None:
            return self._not_before
        is_early = self._changed.is_set() or self._needs_snapshot
        interval_s = self._min_interval_s if is_early else self._max_interval_s
        return max(self._last_report_at + interval_s, self._not_before)

    async def _pause(self, seconds: float) -> None:
        if self._changed.is_set():
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # -- what a report says ------------------------------------------------------------------

    async def _take(self) -> _Taken | None:
        """Stats and events of one moment; None while a long step is not letting us in."""
        if self._taking is None:
            take = partial(_take, is_snapshot=self._needs_snapshot, map_cells=self._map_cells_now())
            self._taking = asyncio.wrap_future(self._engine.call(take))
        await asyncio.wait({self._taking}, timeout=self._max_interval_s)
        if not self._taking.done():
            return None
        taken, self._taking = self._taking.result(), None
        return taken

    def _map_cells_now(self) -> int:
        """A map costs a scan of the pool: not with every report."""
        now = self._clock()
        if not self._map_cells or now < self._map_not_before:
            return 0
        self._map_not_before = now + self._map_interval_s
        return self._map_cells

    def _make_report(self, taken: _Taken | None) -> ReplicaReport | None:
        """The next report; during a long step the last one again, which shows that we live."""
        if taken is None:
            if self._last_taken is None:
                return None
            taken = replace(self._last_taken, events=RouteEvents(), finished_leases=())
            taken = replace(taken, is_snapshot=False, maps=(None, None))
        self._last_taken = taken
        self._unconfirmed_leases += taken.finished_leases
        self._sequence_number += 1
        stats = taken.stats
        return ReplicaReport(
            replica_id=self._info.replica_id,
            incarnation=self._info.incarnation,
            epoch=stats.epoch,
            sequence_number=self._sequence_number,
            steps_done=self._engine.steps_done,
            device=stats.device,
            host=stats.host,
            leases=stats.leases,
            finished_leases=self._unconfirmed_leases,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            waiting_prefill_tokens=stats.waiting_prefill_tokens,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_s=self._engine.step_times.decode_step_s,
            step_p99_s=self._engine.step_times.p99_s,
            copy_bytes_per_s=stats.copy_bytes_per_s,
            preemptions=stats.preemptions,
            events=taken.events,
            digest_device=stats.route_digests[0],
            digest_host=stats.route_digests[1],
            is_snapshot=taken.is_snapshot,
            hit_tokens=stats.hit_tokens,
            query_tokens=stats.query_tokens,
            # statistics: told once, and no harm if it is lost
            finished_output_tokens=self._engine.take_output_lengths(),
            draining=self.is_draining,
            renews=self.renews,
            reset_order=self._reset_order,
            reset_blocks=self._reset_blocks,
            preemptions_swap=stats.preemptions_swap,
            counters=_counters(stats),
            transfers=self._transfer_stats(),
            device_map=taken.maps[0],
            host_map=taken.maps[1],
        )

    # -- calls and their replies -------------------------------------------------------------

    async def _send(self, report: ReplicaReport) -> None:
        self._last_report_at = self._clock()
        try:
            reply = await self._link.report(report)
        except ControllerUnreachable as error:
            # Its sequence number is spent: a controller that missed it sees the gap and asks
            # for a snapshot. Leases are told again until a reply came.
            self._note_failure(error)
            return
        self._unconfirmed_leases = self._unconfirmed_leases[len(report.finished_leases) :]
        if report.is_snapshot:
            self._needs_snapshot = False
        self._obey(reply)

    def _obey(self, reply: ReportReply) -> None:
        if reply.fence:
            self._on_fence()
        elif reply.draining:
            self.renews |= reply.renews
            self._on_drain(reply.drain_s)
            if self._on_peers is not None:  # what was computed with old weights is of no use
                self._on_peers(() if reply.renews else reply.peers)
        if reply.reset_order > self._reset_order and self._reset is None:
            self._begin_reset(reply.reset_order)
        self._map_cells = reply.map_cells
        if reply.unknown:
            self._is_registered = False
        if reply.needs_snapshot or reply.unknown:
            self._needs_snapshot = True

    def _begin_reset(self, order: int) -> None:
        """Between two steps; the next report says that it is done, in a new epoch."""

        def note(reset: asyncio.Future[int]) -> None:
            self._reset = None
            if not reset.cancelled() and reset.exception() is None:
                self._reset_order, self._reset_blocks = order, reset.result()
                self._changed.set()

        self._reset = asyncio.wrap_future(self._engine.call(Scheduler.reset_prefix_cache))
        self._reset.add_done_callback(note)

    def _note_failure(self, error: ControllerUnreachable) -> None:
        self.num_failed_calls += 1
        self._not_before = self._clock() + self._retry_s
        logger.warning("the controller could not be reached: %s", error)


def _counters(stats: SchedulerStats) -> ReplicaCounters:
    return ReplicaCounters(
        blocks_evicted=stats.blocks_evicted,
        host_blocks_evicted=stats.host_evicted,
        blocks_stored=stats.blocks_stored,
        blocks_loaded=stats.blocks_loaded,
        copies_failed=stats.copies_failed,
        copies_on_write=stats.copies_on_write,
        collisions_refused=stats.collisions_refused,
        expired=stats.expired,
        admissions_deferred=stats.admissions_deferred,
        rows_held=stats.rows_held,
        swaps_refused=stats.swaps_refused,
        queue_full=stats.queue_full,
        leases_refused=stats.leases_refused,
        kv_exhausted=stats.kv_exhausted,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
    )


def _take(scheduler: Scheduler, is_snapshot: bool, map_cells: int) -> _Taken:
    """Runs on the engine's thread."""
    if is_snapshot:
        scheduler.take_route_events()  # what they tell is in the snapshot
        events = scheduler.route_snapshot()[0]
    else:
        events = scheduler.take_route_events()
    maps = scheduler.block_maps(map_cells) if map_cells else (None, None)
    return _Taken(scheduler.stats(), events, scheduler.take_finished_leases(), is_snapshot, maps)
