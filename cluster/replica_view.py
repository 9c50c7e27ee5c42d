"""What the controller knows of each replica: its last report, and what was granted since.

`ReplicaColumns` holds the numbers that routing needs as arrays indexed by slot, so that one
decision costs the same few array operations for 8 replicas and for 1,000. `ReplicaView` is one
replica: it owns its slot's entries and keeps them right. Neither chooses anything.

    available = clean + cached_idle - unused part of accepted leases - grants not yet listed
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protos.messages import (
    BlockCounts,
    ModelCard,
    PoolMap,
    ReplicaCounters,
    ReplicaInfo,
    ReplicaReport,
    ReplicaState,
    ReplicaStatus,
    ReportReply,
    TransferStats,
)
from .prefix_transfer import Links, exchange_group, fetch_prices

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_FLOAT_COLUMNS = (
    "work_end",
    "token_s",
    "decode_step_s",
    "load_token_s",
    "fullness",
    "fetch_token_s",
    "fetch_overhead_s",
    "link_busy_until",
)
_INT_COLUMNS = (
    "available",
    "total",
    "pinned",
    "active",
    "waiting",
    "max_active",
    "prefill_tokens",
    "exchange",
)


class ReplicaColumns:
    """Arrays by slot, as long as there are slots.

    open: may be given leases. available/total/pinned: device blocks. active: requests waiting or
    running there, grants included. work_end: when the prefill work known now will be done.
    prefill_tokens: prompt tokens not computed yet. token_s: prefill seconds per token.
    load_token_s: seconds to bring one cached token from the host tier. fullness: share of the pool
    that running requests and leases hold. exchange, fetch_token_s, fetch_overhead_s,
    link_busy_until: of transfers from other replicas, see `prefix_transfer.Links`; exchanging:
    bit set of the slots that take part in them.
    """

    def __init__(self) -> None:
        self.open: BoolArray = np.zeros(0, dtype=np.bool_)
        self.work_end: FloatArray = np.zeros(0)
        self.token_s: FloatArray = np.zeros(0)
        self.decode_step_s: FloatArray = np.zeros(0)
        self.load_token_s: FloatArray = np.zeros(0)
        self.fullness: FloatArray = np.zeros(0)
        self.available: IntArray = np.zeros(0, dtype=np.int64)
        self.total: IntArray = np.zeros(0, dtype=np.int64)
        self.pinned: IntArray = np.zeros(0, dtype=np.int64)
        self.active: IntArray = np.zeros(0, dtype=np.int64)
        self.waiting: IntArray = np.zeros(0, dtype=np.int64)
        self.max_active: IntArray = np.zeros(0, dtype=np.int64)
        self.prefill_tokens: IntArray = np.zeros(0, dtype=np.int64)
        self.fetch_token_s: FloatArray = np.zeros(0)
        self.fetch_overhead_s: FloatArray = np.zeros(0)
        self.link_busy_until: FloatArray = np.zeros(0)
        self.exchange: IntArray = np.zeros(0, dtype=np.int64)
        self.exchanging = 0
        self.links = self._make_links()
        self._slowest: tuple[float, float] | None = None

    @property
    def num_slots(self) -> int:
        """Slots ever added, those of replicas that are gone included."""
        return len(self.open)

    @property
    def slowest(self) -> tuple[float, float]:
        """The longest time per prompt token and per decode step of all slots, in seconds."""
        if self._slowest is None:
            slowest = self.token_s.max(initial=0.0), self.decode_step_s.max(initial=0.0)
            self._slowest = float(slowest[0]), float(slowest[1])
        return self._slowest

    def set_pace(self, slot: int, token_s: float, decode_step_s: float) -> None:
        """How fast a slot's replica computes."""
        if self.token_s[slot] != token_s or self.decode_step_s[slot] != decode_step_s:
            self.token_s[slot] = token_s
            self.decode_step_s[slot] = decode_step_s
            self._slowest = None

    def set_available(self, slot: int, available: int) -> None:
        """How many blocks a new lease could have there."""
        self.available[slot] = available
        self.fullness[slot] = 1.0 - max(available, 0) / max(int(self.total[slot]), 1)

    def add_slot(self) -> int:
        """One more slot, closed and empty."""
        for name in ("open", *_FLOAT_COLUMNS, *_INT_COLUMNS):
            column = getattr(self, name)
            setattr(self, name, np.append(column, np.zeros_like(column, shape=1)))
        self.links = self._make_links()
        return self.num_slots - 1

    def clear(self, slot: int) -> None:
        """Close the slot and forget its numbers."""
        self.set_exchange(slot, 0)
        self.open[slot] = False
        for name in (*_FLOAT_COLUMNS, *_INT_COLUMNS):
            getattr(self, name)[slot] = 0
        self._slowest = None

    def set_exchange(self, slot: int, group: int) -> None:
        """With whom it exchanges blocks; 0 = nobody."""
        self.exchange[slot] = group
        self.exchanging = self.exchanging & ~(1 << slot) | (group > 0) << slot

    def mean_fullness(self) -> float:
        """Of the open slots; at least one must be."""
        full = self.fullness[self.open]
        return float(np.add.reduce(full)) / len(full)  # half the time of `mean`

    def backlog_s(self, now: float) -> FloatArray:
        """Seconds of prefill work before each slot, float64 [num_slots]."""
        return np.maximum(self.work_end - now, 0.0)

    def _make_links(self) -> Links:
        return Links(
            self.exchange,
            self.token_s,
            self.fetch_token_s,
            self.fetch_overhead_s,
            self.link_busy_until,
        )


@dataclass(slots=True)
class ReplicaView:
    """One incarnation of one replica, as far as reports and grants tell.

    granted_*: sums over leases that no report has listed yet. promised_blocks: what accepted
    leases still may take, by the last report. drain_until: when its streams have to move; None
    where it does not drain, or drains on an earlier controller's order. maps: of the device and
    the host pool, the last that came.
    """

    info: ReplicaInfo
    card: ModelCard
    slot: int
    columns: ReplicaColumns
    registered_at: float
    draining: bool = False
    renews: bool = False
    reset_order: int = 0
    drain_until: float | None = None
    suspect: bool = False
    dead: bool = False
    report: ReplicaReport | None = None
    reported_at: float = 0.0
    moved_at: float = 0.0
    next_sequence: int | None = None
    needs_snapshot: bool = True
    promised_blocks: int = 0
    granted_blocks: int = 0
    granted_tokens: int = 0
    num_granted: int = 0
    transfers_offered: int = 0
    reports_lost: int = 0
    snapshots_asked: int = 0
    maps: tuple[PoolMap, ...] = ()

    @property
    def state(self) -> ReplicaState:
        """Where it stands; only a ready replica is given leases."""
        if self.dead:
            return ReplicaState.DEAD
        if self.draining:
            return ReplicaState.DRAINING
        if self.suspect:
            return ReplicaState.SUSPECT
        return ReplicaState.STARTING if self.report is None else ReplicaState.READY

    @property
    def free_blocks(self) -> int:
        """Blocks that an allocation could have had at the last report."""
        return 0 if self.report is None else self.report.device.free

    @property
    def available_blocks(self) -> int:
        """Blocks that a new lease could have; negative when best-effort growth ate promises."""
        return self.free_blocks - self.promised_blocks - self.granted_blocks

    @property
    def leased_blocks(self) -> int:
        """What leases still may take."""
        return self.promised_blocks + self.granted_blocks

    @property
    def longest_step_s(self) -> float:
        """What a step may take at the speed it has now."""
        reported = 0.0 if self.report is None else self.report.step_p99_s
        return reported or self.info.decode_step_s

    @property
    def num_working(self) -> int:
        """Requests that its leader has, by the last report."""
        return 0 if self.report is None else self.report.num_running + self.report.num_waiting

    @property
    def num_active(self) -> int:
        """Requests waiting or running there, grants included."""
        if self.report is None:
            return self.num_granted
        return self.report.num_running + self.report.num_waiting + self.num_granted

    def has_reset(self, order: int) -> bool:
        """Whether it has obeyed the order to forget what it has cached."""
        return self.report is not None and self.report.reset_order >= order

    def take_report(self, report: ReplicaReport, promised_blocks: int, now: float) -> None:
        """Replace the counts by the report's; a moved step counter is a sign of life."""
        if self.report is None or report.steps_done != self.report.steps_done:
            self.moved_at = now
        self.report = report
        if report.device_map is not None and report.host_map is not None:
            self.maps = report.device_map, report.host_map
        self.reported_at = now
        self.promised_blocks = promised_blocks
        self.suspect = False
        # so that a controller that was not there when it was told learns of it
        self.draining |= report.draining
        self.renews |= report.renews
        self.refresh(now)

    def ask_for_snapshot(self) -> None:
        """What is mirrored of it is not what it has."""
        if not self.needs_snapshot:
            self.needs_snapshot = True
            self.snapshots_asked += 1

    def reply(self, now: float, *, needs_snapshot: bool = False) -> ReportReply:
        """What its leader is answered."""
        if self.drain_until is None:
            return ReportReply(needs_snapshot=needs_snapshot, reset_order=self.reset_order)
        return ReportReply(
            needs_snapshot=needs_snapshot,
            draining=True,
            drain_s=max(0.0, self.drain_until - now),
            renews=self.renews,
            reset_order=self.reset_order,
        )

    def drain(self, until: float | None, now: float) -> None:
        """No more leases, and its streams move at `until`; None = it serves again."""
        self.draining = until is not None
        self.drain_until = until
        self.refresh(now)

    def add_grant(self, num_blocks: int, uncached_tokens: int, now: float) -> None:
        """A lease was granted that the leader does not know yet."""
        self.granted_blocks += num_blocks
        self.granted_tokens += uncached_tokens
        self.num_granted += 1
        columns, slot = self.columns, self.slot
        columns.set_available(slot, self.available_blocks)
        columns.active[slot] += 1
        columns.waiting[slot] += 1
        columns.prefill_tokens[slot] += uncached_tokens
        work_end, token_s = float(columns.work_end[slot]), float(columns.token_s[slot])
        columns.work_end[slot] = max(work_end, now) + uncached_tokens * token_s

    def drop_grant(self, num_blocks: int, uncached_tokens: int) -> None:
        """A grant was listed by a report, given back, or expired; `refresh` follows."""
        self.granted_blocks -= num_blocks
        self.granted_tokens -= uncached_tokens
        self.num_granted -= 1
        assert min(self.granted_blocks, self.granted_tokens, self.num_granted) >= 0, (
            f"{self.info.replica_id}: negative grants {self.granted_blocks}, "
            f"{self.granted_tokens}, {self.num_granted}"
        )

    def refresh(self, now: float) -> None:
        """Write the slot's entries anew from the report and the grants."""
        columns, slot, report = self.columns, self.slot, self.report
        columns.open[slot] = self.state is ReplicaState.READY
        columns.active[slot] = self.num_active
        columns.max_active[slot] = self.info.max_num_sequences
        decode_step_s = self.info.decode_step_s
        waiting_tokens = self.granted_tokens
        if report is not None:
            waiting_tokens += report.waiting_prefill_tokens
            columns.total[slot] = report.device.total
            columns.pinned[slot] = report.device.referenced + report.device.fenced
            columns.waiting[slot] = report.num_waiting + self.num_granted
            decode_step_s = report.decode_step_s or decode_step_s
            columns.load_token_s[slot] = self._load_token_s(report)
        columns.set_pace(slot, 1.0 / max(self._prefill_rate, 1e-9), decode_step_s)
        columns.set_available(slot, self.available_blocks)
        columns.prefill_tokens[slot] = waiting_tokens
        columns.work_end[slot] = self._work_end(now)
        self._refresh_exchange()

    def _refresh_exchange(self) -> None:
        columns, slot, report = self.columns, self.slot, self.report
        if report is None or self.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            columns.set_exchange(slot, 0)
            return
        columns.set_exchange(slot, exchange_group(self.info))
        load_token_s = float(columns.load_token_s[slot])
        prices = fetch_prices(self.info, report.transfers, load_token_s)
        columns.fetch_token_s[slot], columns.fetch_overhead_s[slot] = prices

    def status(
        self, now: float, indexed_device: int, indexed_host: int, num_leases: int
    ) -> ReplicaStatus:
        """The replica for status pages."""
        report = self.report
        return ReplicaStatus(
            replica_id=self.info.replica_id,
            incarnation=self.info.incarnation,
            model=self.info.model,
            state=self.state,
            address=self.info.address,
            device=report.device if report else BlockCounts(),
            host=report.host if report else BlockCounts(),
            num_waiting=report.num_waiting if report else 0,
            num_running=report.num_running if report else 0,
            leased_blocks=self.leased_blocks,
            available_blocks=max(0, self.available_blocks),
            hit_tokens=report.hit_tokens if report else 0,
            query_tokens=report.query_tokens if report else 0,
            preemptions=report.preemptions if report else 0,
            steps_done=report.steps_done if report else 0,
            indexed_device=indexed_device,
            indexed_host=indexed_host,
            report_age_s=now - self.reported_at if report else None,
            node_id=self.info.node_id,
            preemptions_swap=report.preemptions_swap if report else 0,
            copy_bytes_per_s=report.copy_bytes_per_s if report else 0.0,
            prefill_tokens_per_s=self._prefill_rate,
            decode_step_s=report.decode_step_s if report else 0.0,
            num_leases=num_leases,
            renews=self.renews,
            weights_version=self.info.identity.weights_version,
            counters=report.counters if report else ReplicaCounters(),
            transfers_offered=self.transfers_offered,
            transfers=report.transfers if report else TransferStats(),
            reports_lost=self.reports_lost,
            snapshots_asked=self.snapshots_asked,
        )

    @property
    def _prefill_rate(self) -> float:
        measured = self.report.prefill_tokens_per_s if self.report else 0.0
        return measured or self.info.prefill_tokens_per_s or 1.0

    def _work_end(self, now: float) -> float:
        token_s = float(self.columns.token_s[self.slot])
        if self.report is None:
            return now + self.granted_tokens * token_s
        # The reported work has been shrinking since the report was made.
        reported_end = self.reported_at + self.report.waiting_prefill_tokens * token_s
        return max(reported_end, now) + self.granted_tokens * token_s

    def _load_token_s(self, report: ReplicaReport) -> float:
        if not report.copy_bytes_per_s or not self.info.block_bytes:
            return 0.0
        block_s = self.info.block_bytes / report.copy_bytes_per_s
        return block_s / self.info.identity.block_size
