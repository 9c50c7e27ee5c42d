"""What replicas have been told that outlives one answer: to drain, and to forget what they cached.

Orders go out with the answers to reports, and what has become of them comes back with later
reports. Which weights a replica is to have is `weights_orders`. Moves no stream itself.
"""

from collections.abc import Iterable

from ..protos.messages import CacheReset
from .replica_view import ReplicaView


class ReplicaOrders:
    """Drains by replica, whatever its incarnation; resets by number."""

    def __init__(self) -> None:
        self._drains: dict[str, float] = {}  # replica id → when its streams have to move
        self._num_resets = 0

    def drain(self, replica_id: str, until: float) -> None:
        """Its streams move then at the latest: a later order never gives them more time."""
        self._drains[replica_id] = min(until, self._drains.get(replica_id, until))

    def end_drain(self, replica_id: str) -> None:
        """It serves again."""
        self._drains.pop(replica_id, None)

    def drain_until(self, replica_id: str) -> float | None:
        """When its streams have to move; None where it is not to drain."""
        return self._drains.get(replica_id)

    def reset(self, views: Iterable[ReplicaView]) -> int:
        """These are to forget what they have cached, on all tiers; the order's number."""
        self._num_resets += 1
        for view in views:
            view.reset_order = self._num_resets
        return self._num_resets

    def resets(
        self, order: int, views: Iterable[ReplicaView]
    ) -> tuple[tuple[CacheReset, ...], tuple[str, ...]]:
        """What those have done that the order concerns, and who of them has not answered."""
        done: list[CacheReset] = []
        missing: list[str] = []
        for view in views:
            if view.reset_order < order:
                continue
            report = view.report
            if report is None or not view.has_reset(order):
                missing.append(view.info.replica_id)
            else:
                done.append(CacheReset(report.replica_id, report.reset_blocks, report.epoch))
        return tuple(done), tuple(missing)
