"""Which replicas there are, whose incarnations have ended, and who has stopped moving.

The watchdog's part of the controller: it says who is dead and ends nothing. Knows no request.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..protos.messages import ReplicaInfo
from .model_pool import ModelPool
from .replica_view import ReplicaView

_WATCHDOG_STEPS = 20  # a step may take so many times its usual length before it counts as stuck
_LOOK_INTERVAL_S = 0.1  # between two looks at all replicas: ticks may come much oftener
_MAX_REMEMBERED_DEAD = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """A replica's incarnation and the pool that it belongs to."""

    pool: ModelPool
    view: ReplicaView


class ReplicaRoster:
    """Members by replica id, and incarnations that are over.

    watchdog_s: without a report, or with work but without a step, for so long, or for 20 of its
    longest steps, a replica is dead.
    """

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._members: dict[str, Member] = {}
        self._dead: dict[tuple[str, str], None] = {}  # oldest first
        self._looked_at = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ReplicaView]:
        return (member.view for member in self._members.values())

    def get(self, replica_id: str, incarnation: str | None = None) -> Member | None:
        """The replica's member, if it is of that incarnation."""
        member = self._members.get(replica_id)
        if member is None or incarnation in (None, member.view.info.incarnation):
            return member
        return None

    def add(self, pool: ModelPool, view: ReplicaView) -> None:
        """An incarnation begins."""
        self._members[view.info.replica_id] = Member(pool, view)

    def remove(self, replica_id: str) -> Member:
        """It is over."""
        return self._members.pop(replica_id)

    def bury(self, info: ReplicaInfo) -> None:
        """That incarnation never comes back."""
        self._dead[(info.replica_id, info.incarnation)] = None
        if len(self._dead) > _MAX_REMEMBERED_DEAD:
            del self._dead[next(iter(self._dead))]

    def is_dead(self, replica_id: str, incarnation: str) -> bool:
        """Whether the incarnation has been buried: it is fenced if it speaks."""
        return (replica_id, incarnation) in self._dead

    def find_dead(self, now: float) -> list[ReplicaInfo]:
        """Who is silent or stuck; looks ten times a second at most."""
        if now - self._looked_at < _LOOK_INTERVAL_S:
            return []
        self._looked_at = now
        return [view.info for view in self if self._has_stopped(view, now)]

    def _has_stopped(self, view: ReplicaView, now: float) -> bool:
        patience_s = max(self._watchdog_s, _WATCHDOG_STEPS * view.longest_step_s)
        is_silent = now - max(view.reported_at, view.registered_at) > patience_s
        is_stuck = view.num_working > 0 and now - view.moved_at > patience_s
        return is_silent or is_stuck
