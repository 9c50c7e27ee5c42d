"""Every lease that may still take blocks, and how each one ends.

The leader of a replica keeps the ledger; this table mirrors it. A lease is **granted** until a
report lists it as accepted (or as finished), then **listed** until a report no longer does. Only
reports, an expiry before acceptance, or the end of the incarnation free its blocks here: a client
that gives a lease back may have used it already, which the next report tells.

    granted --report lists it--> listed --report omits it or says finished--> gone
       |  given back: gone with the next report, whichever way it names it
       +--not listed in time--> expired
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..protos.messages import AdmissionClass, Lease, LeaseUse


@dataclass(slots=True)
class LeaseRecord:
    """One lease. `lease` is None for one learnt from a report after a controller restart.

    slot: the replica's slot in its model's pool. remaining: blocks it still may take.
    expected_end: when its blocks are expected back. charged: block-seconds already charged.
    """

    lease_id: int
    slot: int
    remaining: int
    lease: Lease | None = None
    gateway_id: str = ""
    tenant: str = ""
    admission_class: AdmissionClass = AdmissionClass.STANDARD
    num_tokens: int = 0
    num_blocks: int = 0
    uncached_tokens: int = 0
    granted_at: float = 0.0
    expires_at: float = 0.0
    expected_end: float = 0.0
    charged: float = 0.0
    listed: bool = False
    given_back: bool = False
    claimed: tuple[bytes, ...] = ()
    request_id: str = ""


@dataclass(slots=True)
class _SlotLeases:
    granted: dict[int, LeaseRecord] = field(default_factory=dict[int, LeaseRecord])
    listed: dict[int, LeaseRecord] = field(default_factory=dict[int, LeaseRecord])
    promised: int = 0


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """What a report changed: grants that it lists for the first time, and leases that ended."""

    accepted: tuple[LeaseRecord, ...]
    ended: tuple[LeaseRecord, ...]


class LeaseTable:
    """The leases of one model's replicas, by id and by slot."""

    def __init__(self) -> None:
        self._by_id: dict[int, LeaseRecord] = {}
        self._slots: dict[int, _SlotLeases] = {}
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self._by_id.values())

    def of_slot(self, slot: int) -> Iterator[LeaseRecord]:
        """All leases of one replica."""
        leases = self._slots.get(slot)
        if leases is not None:
            yield from leases.granted.values()
            yield from leases.listed.values()

    def num_of_slot(self, slot: int) -> int:
        """How many leases a replica has."""
        leases = self._slots.get(slot)
        return 0 if leases is None else len(leases.granted) + len(leases.listed)

    def promised(self, slot: int) -> int:
        """What the listed leases of a replica still may take."""
        leases = self._slots.get(slot)
        return 0 if leases is None else leases.promised

    def grant(self, record: LeaseRecord) -> None:
        """Add a lease that its leader does not know yet."""
        assert record.lease_id not in self._by_id, f"lease {record.lease_id} granted twice"
        self._by_id[record.lease_id] = record
        self._slot(record.slot).granted[record.lease_id] = record
        heapq.heappush(self._expiries, (record.expires_at, record.lease_id))

    def give_back(self, record: LeaseRecord) -> None:
        """The client no longer wants it; the next report tells what became of it."""
        record.given_back = True

    def drop(self, record: LeaseRecord) -> None:
        """Take out a lease that certainly never reached its leader."""
        assert not record.listed, f"lease {record.lease_id} is in its leader's ledger"
        self._remove(record)

    def apply_ledger(
        self, slot: int, uses: tuple[LeaseUse, ...], finished: tuple[int, ...]
    ) -> LedgerChange:
        """Mirror a report: it lists every accepted, unfinished lease of the replica."""
        leases = self._slot(slot)
        before = leases.listed
        accepted: list[LeaseRecord] = []
        ended: list[LeaseRecord] = []
        leases.listed = {}
        leases.promised = 0
        for use in uses:
            record = before.pop(use.lease_id, None)
            if record is None:
                record = leases.granted.pop(use.lease_id, None)
                if record is None:
                    record = self._adopt(slot, use)
                else:
                    accepted.append(record)
                record.listed = True
            record.remaining = use.remaining_blocks
            leases.listed[use.lease_id] = record
            leases.promised += use.remaining_blocks
        for lease_id in finished:
            record = leases.granted.pop(lease_id, None)
            if record is not None:  # accepted and finished between two reports
                accepted.append(record)
                ended.append(record)
        for record in leases.granted.values():
            if record.given_back:
                ended.append(record)
                accepted.append(record)
        for record in ended:
            leases.granted.pop(record.lease_id, None)
        ended.extend(before.values())
        for record in ended:
            del self._by_id[record.lease_id]
        return LedgerChange(tuple(accepted), tuple(ended))

    def pop_expired(self, now: float) -> list[LeaseRecord]:
        """Take out the grants that no report listed in time."""
        expired: list[LeaseRecord] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            record = self._by_id.get(lease_id)
            if record is not None and not record.listed:
                self._remove(record)
                expired.append(record)
        return expired

    def next_expiry(self) -> float | None:
        """When `pop_expired` should be called next, at the latest."""
        return self._expiries[0][0] if self._expiries else None

    def void_slot(self, slot: int) -> list[LeaseRecord]:
        """End every lease of a replica whose incarnation is over."""
        ended = list(self.of_slot(slot))
        for record in ended:
            del self._by_id[record.lease_id]
        self._slots.pop(slot, None)
        return ended

    def check_integrity(self) -> None:
        """Assert that the maps agree and that no count is negative."""
        by_slot = [
            record
            for leases in self._slots.values()
            for record in (*leases.granted.values(), *leases.listed.values())
        ]
        assert len(by_slot) == len(self._by_id), f"{len(by_slot)} by slot, {len(self._by_id)} by id"
        for slot, leases in self._slots.items():
            assert all(not record.listed for record in leases.granted.values())
            assert all(record.listed for record in leases.listed.values())
            promised = sum(record.remaining for record in leases.listed.values())
            assert promised == leases.promised, f"slot {slot}: {promised} != {leases.promised}"
            for record in (*leases.granted.values(), *leases.listed.values()):
                assert record.slot == slot and self._by_id[record.lease_id] is record
                assert record.remaining >= 0, f"lease {record.lease_id} may take {record.remaining}"

    def _adopt(self, slot: int, use: LeaseUse) -> LeaseRecord:
        # Granted by an earlier life of the controller, or listed after it had expired here.
        record = LeaseRecord(use.lease_id, slot, use.remaining_blocks, num_blocks=0)
        self._by_id[use.lease_id] = record
        return record

    def _remove(self, record: LeaseRecord) -> None:
        del self._by_id[record.lease_id]
        leases = self._slots[record.slot]
        leases.granted.pop(record.lease_id, None)
        if leases.listed.pop(record.lease_id, None) is not None:
            leases.promised -= record.remaining

    def _slot(self, slot: int) -> _SlotLeases:
        leases = self._slots.get(slot)
        if leases is None:
            leases = self._slots[slot] = _SlotLeases()
        return leases
