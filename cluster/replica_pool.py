"""The replicas of one model as their reports and our grants tell: index, ledger, counts.

Keeps the mirror true: gaps and wrong digests ask for a snapshot, a new incarnation voids all that
was known of the old one. Chooses nothing and knows no queue.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ..protos.messages import ModelCard, ReplicaInfo, ReplicaReport, ReplicaStatus, ReportReply
from ..scheduler.block_hash import route_tokens
from .lease_table import LeaseRecord, LeaseTable
from .prefix_index import PrefixIndex, Tier
from .replica_view import FloatArray, IntArray, ReplicaColumns, ReplicaView


class ReplicaPool:
    """The mirror of one model's replicas."""

    def __init__(self, block_size: int, *, speculative: bool = True) -> None:
        self.block_size = block_size
        self.columns = ReplicaColumns()
        self.index = PrefixIndex()
        self.leases = LeaseTable()
        self.replicas: dict[str, ReplicaView] = {}
        self.by_slot: dict[int, ReplicaView] = {}
        self._speculative = speculative
        self._free_slots: list[int] = []
        self._alive = 0
        self._route_tokens: FloatArray = np.zeros(1)
        self._route_blocks: IntArray = np.zeros(1, dtype=np.int64)
        self.max_context = 0
        self.max_num_blocks = 0

    def add(self, info: ReplicaInfo, card: ModelCard, now: float) -> ReplicaView:
        """A new incarnation; its predecessor must have been removed."""
        assert info.replica_id not in self.replicas, f"{info.replica_id} is registered"
        slot = self._free_slots.pop() if self._free_slots else self._add_slot()
        view = ReplicaView(info, card, slot, self.columns, now, reported_at=now, moved_at=now)
        self.replicas[info.replica_id] = view
        self.by_slot[slot] = view
        self._alive |= 1 << slot
        if len(self.replicas) == 1:  # what was before is gone
            self.max_context = self.max_num_blocks = 0
        self.max_context = max(self.max_context, info.max_context)
        self.max_num_blocks = max(self.max_num_blocks, info.num_blocks)
        view.refresh(now)
        return view

    def remove(self, view: ReplicaView) -> list[LeaseRecord]:
        """Forget an incarnation: its cache, its counts; its leases are returned, void."""
        ended = self.leases.void_slot(view.slot)
        self._unclaim(ended)
        self.index.clear(view.slot)
        self.columns.clear(view.slot)
        del self.replicas[view.info.replica_id]
        del self.by_slot[view.slot]
        self._alive &= ~(1 << view.slot)
        self._free_slots.append(view.slot)
        self._lower_limits()
        return ended

    def take_report(
        self, view: ReplicaView, report: ReplicaReport, now: float
    ) -> tuple[ReportReply, tuple[LeaseRecord, ...]]:
        """Mirror one report; returns the answer and the leases that it ended."""
        expected = view.next_sequence
        if expected is not None and report.sequence_number < expected:
            return view.reply(now), ()
        if expected is not None and report.sequence_number > expected:
            view.reports_lost += report.sequence_number - expected
            if not report.is_snapshot:
                view.ask_for_snapshot()
        view.next_sequence = report.sequence_number + 1
        self._mirror_index(view, report)
        change = self.leases.apply_ledger(view.slot, report.leases, report.finished_leases)
        for record in change.accepted:
            view.drop_grant(record.num_blocks, record.uncached_tokens)
        self._unclaim(change.ended)
        view.take_report(report, self.leases.promised(view.slot), now)
        return view.reply(now, needs_snapshot=view.needs_snapshot), change.ended

    def grant(self, record: LeaseRecord, route_hashes: tuple[bytes, ...], now: float) -> None:
        """Book a lease on its replica; its prompt counts as coming to the index."""
        view = self.by_slot[record.slot]
        self.leases.grant(record)
        view.add_grant(record.num_blocks, record.uncached_tokens, now)
        if self._speculative:
            record.claimed = route_hashes
            self.index.claim(record.slot, route_hashes)

    def drop_grant(self, record: LeaseRecord, now: float) -> None:
        """Undo a grant that never reached its client."""
        self.leases.drop(record)
        self._undo(record, now)

    def expire(self, now: float) -> list[LeaseRecord]:
        """Undo the grants that no report listed in time."""
        expired = self.leases.pop_expired(now)
        for record in expired:
            self._undo(record, now)
        return expired

    def match(self, route_hashes: Sequence[bytes]) -> tuple[FloatArray, FloatArray | None]:
        """Prompt tokens resident per slot: on the device, and further ones on the host tier."""
        tokens_at = self._tokens_at(len(route_hashes))
        depths = self.index.device_depths(route_hashes, self._alive, speculative=self._speculative)
        device = tokens_at[depths]
        reach = self.index.reach(route_hashes, self._alive)
        return device, None if reach is None else tokens_at[reach] - device

    def fullest_cache(self, route_hashes: Sequence[bytes], among: int) -> tuple[int, float]:
        """Of the slots in a bit set, the first that holds most of a prompt for certain, on either
        tier, and how many tokens; 0 where none holds anything."""
        depth, holders = self.index.deepest(route_hashes, among)
        slot = (holders & -holders).bit_length() - 1
        return slot, float(self._tokens_at(depth)[depth])

    def shared_blocks(self, route_hashes: Sequence[bytes]) -> IntArray:
        """Leading blocks per slot that running prompts hold: to share them costs nothing."""
        depths = self.index.pinned_depths(route_hashes, self._alive)
        return self._blocks_at(len(route_hashes))[depths]

    def statuses(self, now: float) -> list[ReplicaStatus]:
        """One per replica."""
        index = self.index
        return [
            view.status(
                now,
                index.num_held(view.slot, Tier.DEVICE),
                index.num_held(view.slot, Tier.HOST),
                self.leases.num_of_slot(view.slot),
            )
            for view in self.replicas.values()
        ]

    def check_integrity(self) -> None:
        """Assert that sums, columns, index and ledger agree."""
        self.index.check_integrity()
        self.leases.check_integrity()
        claimed = {(record.slot, each) for record in self.leases for each in record.claimed}
        entries = self.index.stats().claimed_entries
        assert entries == len(claimed), f"{entries} claims in the index, {len(claimed)} by lease"
        for view in self.replicas.values():
            granted = [record for record in self.leases.of_slot(view.slot) if not record.listed]
            assert view.num_granted == len(granted), f"{view.num_granted} != {len(granted)}"
            assert view.granted_blocks == sum(record.num_blocks for record in granted)
            assert view.granted_tokens == sum(record.uncached_tokens for record in granted)
            assert view.promised_blocks == self.leases.promised(view.slot)
            assert self.columns.available[view.slot] == view.available_blocks
            assert self.columns.active[view.slot] == view.num_active

    def _lower_limits(self) -> None:
        infos = [view.info for view in self.replicas.values()]
        if infos:  # the next one will be like the last
            self.max_context = max(info.max_context for info in infos)
            self.max_num_blocks = max(info.num_blocks for info in infos)

    def _add_slot(self) -> int:
        self.columns.add_slot()
        return self.index.add_slot()

    def _mirror_index(self, view: ReplicaView, report: ReplicaReport) -> None:
        if view.report is not None and report.epoch != view.report.epoch:
            # A cache reset: nothing of before is resident, nor will be.
            self._unclaim(self.leases.of_slot(view.slot))
            self.index.clear(view.slot)
        if report.is_snapshot:
            self.index.replace(view.slot, report.events)
            view.needs_snapshot = False
        else:
            self.index.apply(view.slot, report.events)
        if not self._digests_agree(view.slot, report):
            view.ask_for_snapshot()

    def _digests_agree(self, slot: int, report: ReplicaReport) -> bool:
        return (
            self.index.digest(slot, Tier.DEVICE) == report.digest_device
            and self.index.digest(slot, Tier.HOST) == report.digest_host
        )

    def _undo(self, record: LeaseRecord, now: float) -> None:
        view = self.by_slot[record.slot]
        view.drop_grant(record.num_blocks, record.uncached_tokens)
        view.refresh(now)
        self._unclaim((record,))

    def _unclaim(self, records: Iterable[LeaseRecord]) -> None:
        for record in records:
            if record.claimed:
                self.index.unclaim(record.slot, record.claimed)
                record.claimed = ()

    def _tokens_at(self, depth: int) -> FloatArray:
        """Tokens covered by the first k route hashes, for k up to `depth` at least."""
        if depth >= len(self._route_tokens):
            covered = [route_tokens(each, self.block_size) for each in range(2 * depth + 1)]
            self._route_tokens = np.array(covered, dtype=np.float64)
        return self._route_tokens

    def _blocks_at(self, depth: int) -> IntArray:
        """The same in blocks."""
        if depth >= len(self._route_blocks):
            self._route_blocks = self._tokens_at(depth).astype(np.int64) // self.block_size
        return self._route_blocks
