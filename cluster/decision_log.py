"""The controller's last decisions, for who wants to know why a request went where it did.

A ring of bounded length. What every decision records is at hand when it is made; what each replica
would have cost is worked out, and kept, only while someone watches, and not for every request of a
busy cluster. Decides nothing.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ..protos.messages import DecisionView, Explanation, ReplicaExplanation, ReserveRequest

_MAX_DECISIONS = 512
_COSTS_PERIOD_S = 0.05  # they take longer than the decision itself
WATCHED_S = 5.0  # who watches asks again within this time


class _Decision(NamedTuple):  # made for every request: a dataclass takes four times as long
    number: int
    at: float
    request: ReserveRequest
    decision: str
    reason: str
    replica_id: str
    hit_tokens: int
    lease_blocks: int
    waited_s: float
    replicas: tuple[ReplicaExplanation, ...]


class DecisionLog:
    """Decisions of all models, oldest first."""

    def __init__(self) -> None:
        self._ring: deque[_Decision] = deque(maxlen=_MAX_DECISIONS)
        self._asked: dict[str, tuple[ReplicaExplanation, ...]] = {}  # by request key
        self._num_decisions = 0
        self._watched_until = float("-inf")
        self._costs_not_before = float("-inf")

    def watch(self, now: float) -> None:
        """Someone looks now, and will again."""
        self._watched_until = now + WATCHED_S

    def is_watched(self, now: float) -> bool:
        """Whether replicas shall send maps of their pools."""
        return now < self._watched_until

    def wants_costs(self, now: float) -> bool:
        """Whether to work out what each replica would cost the request that has just come."""
        if not self.is_watched(now) or now < self._costs_not_before:
            return False
        self._costs_not_before = now + _COSTS_PERIOD_S
        return True

    def asked(self, request: ReserveRequest, explanation: Explanation) -> None:
        """A request has come; what each replica would cost it, at that moment."""
        while len(self._asked) >= _MAX_DECISIONS:  # some never come to a decision
            del self._asked[next(iter(self._asked))]
        self._asked[request.request_key] = explanation.replicas

    def add(
        self,
        decision: str,
        reason: str,
        request: ReserveRequest,
        now: float,
        *,
        replica_id: str = "",
        hit_tokens: int = 0,
        lease_blocks: int = 0,
        waited_s: float = 0.0,
    ) -> None:
        """A decision was made."""
        costs: tuple[ReplicaExplanation, ...] = ()
        if self._asked:
            take = self._asked.get if decision == "wait" else self._asked.pop
            costs = _chosen_and_best_other(take(request.request_key, ()), replica_id)
        self._num_decisions += 1
        self._ring.append(
            _Decision(
                self._num_decisions,
                now,
                request,
                decision,
                reason,
                replica_id,
                hit_tokens,
                lease_blocks,
                waited_s,
                costs,
            )
        )

    def views(self, now: float) -> tuple[DecisionView, ...]:
        """All that is kept, oldest first."""
        return tuple(_view(entry, now) for entry in self._ring)

    def recent_prompts(self) -> Iterator[ReserveRequest]:
        """The requests that the decisions kept were on, each once."""
        return iter({entry.request.request_key: entry.request for entry in self._ring}.values())


def _chosen_and_best_other(
    replicas: tuple[ReplicaExplanation, ...], chosen: str
) -> tuple[ReplicaExplanation, ...]:
    mine = [replica for replica in replicas if replica.replica_id == chosen]
    others = [replica for replica in replicas if replica.replica_id != chosen]
    best = min(others, key=lambda other: (not other.eligible, other.total_ms), default=None)
    return (*mine, *(() if best is None else (best,)))


def _view(entry: _Decision, now: float) -> DecisionView:
    request = entry.request
    return DecisionView(
        number=entry.number,
        age_s=now - entry.at,
        request_key=request.request_key,
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        decision=entry.decision,
        reason=entry.reason,
        replica_id=entry.replica_id,
        num_tokens=request.num_tokens,
        hit_tokens=entry.hit_tokens,
        lease_blocks=entry.lease_blocks,
        waited_s=entry.waited_s,
        replicas=entry.replicas,
    )
