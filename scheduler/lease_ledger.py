"""The leases this replica has accepted and what each may still take. Knows blocks as numbers.

The leader keeps this ledger: the controller grants from reports that may be late, so the leader
may refuse. Only guaranteed leases bind blocks here; for the others `remaining` is what the
controller keeps out of its own arithmetic.
"""

import math
from dataclasses import dataclass

from ..protos.errors import Overloaded
from ..protos.messages import LeaseUse
from .integrity import check


class LeaseRefused(Overloaded):
    """The blocks that the controller promised are not there: try elsewhere, or later."""

    reason = "LEASE_REFUSED"


@dataclass(slots=True)
class _Entry:
    """lease_id: None for a guarantee made without the controller."""

    lease_id: int | None
    is_guaranteed: bool
    remaining: int


class LeaseLedger:
    """One entry per request that has a lease or a guarantee."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._finished: list[int] = []
        self.num_reserved = 0  # blocks that guaranteed requests may still take
        self.num_refused = 0

    def accept(
        self, request_key: str, lease_id: int | None, num_blocks: int, is_guaranteed: bool
    ) -> None:
        """Enter a lease. Whether its blocks are there has been asked before."""
        self._entries[request_key] = _Entry(lease_id, is_guaranteed, num_blocks)
        if is_guaranteed:
            self.num_reserved += num_blocks

    def refuse(self, problem: str) -> LeaseRefused:
        """The error to raise; counted."""
        self.num_refused += 1
        return LeaseRefused(problem)

    def set_remaining(self, request_key: str, num_blocks: int) -> None:
        """What the request may still take; nothing happens if it has no lease."""
        entry = self._entries.get(request_key)
        if entry is None:
            return
        if entry.is_guaranteed:
            self.num_reserved += num_blocks - entry.remaining
        entry.remaining = num_blocks

    def reserved_for_others(self, request_key: str) -> int:
        """Blocks that this request must leave alone."""
        if not self.num_reserved:
            return 0
        entry = self._entries.get(request_key)
        own = entry.remaining if entry is not None and entry.is_guaranteed else 0
        return self.num_reserved - own

    def num_left(self, request_key: str) -> float:
        """Blocks that the request may still take; no lease, no limit."""
        entry = self._entries.get(request_key)
        return math.inf if entry is None else entry.remaining

    def close(self, request_key: str) -> None:
        """The request has ended."""
        entry = self._entries.pop(request_key, None)
        if entry is None:
            return
        if entry.is_guaranteed:
            self.num_reserved -= entry.remaining
        if entry.lease_id is not None:
            self._finished.append(entry.lease_id)

    def take_finished(self) -> tuple[int, ...]:
        """Leases that have ended since the last call."""
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    @property
    def num_unused(self) -> int:
        """Blocks that all accepted leases may still take."""
        return sum(entry.remaining for entry in self._entries.values())

    def uses(self) -> tuple[LeaseUse, ...]:
        """Every accepted, unfinished lease of the controller's."""
        return tuple(
            LeaseUse(entry.lease_id, entry.remaining)
            for entry in self._entries.values()
            if entry.lease_id is not None
        )

    def __contains__(self, request_key: str) -> bool:
        return request_key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def check_integrity(self) -> None:
        """No remainder is negative and the sum is right."""
        for key, entry in self._entries.items():
            check(entry.remaining >= 0, f"lease of {key}: {entry}")
        total = sum(e.remaining for e in self._entries.values() if e.is_guaranteed)
        check(total == self.num_reserved, f"{total} reserved, {self.num_reserved} counted")
