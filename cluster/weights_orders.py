"""Which weights a model's replicas are to have, and whose turn it is to get them.

One replica at a time: while one is replaced the others serve, and one that does not come back
with the new weights stops the roll. Soft state: replicas say what they have and whether somebody
ordered it, so a controller that restarts goes on with the roll. Knows no time and moves nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..protos.messages import ReplicaInfo, ReplicaState, WantedWeights
from .replica_view import ReplicaView


@dataclass(slots=True)
class WeightsOrder:
    """One model's.

    drain_s: how long streams may go on where nobody else has their weights. rolls: whether
    replicas with older weights are to be replaced; else somebody else sees to that. replacing: the
    replica that was told to go and is not back.
    """

    wanted: WantedWeights
    drain_s: float
    rolls: bool
    replacing: str | None = None


class WeightsOrders:
    """By model."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._orders: dict[str, WeightsOrder] = {}

    def wanted(self, model: str) -> WantedWeights | None:
        """What a replica that starts now is to load; None = what it was made for."""
        order = self._orders.get(model)
        return None if order is None else order.wanted

    def give(self, model: str, checkpoint: str, version: int, drain_s: float) -> None:
        """From now on it is these, everywhere."""
        known = self._orders.get(model)
        replacing = None if known is None else known.replacing
        wanted = WantedWeights(checkpoint, version)
        self._orders[model] = WeightsOrder(wanted, drain_s, rolls=True, replacing=replacing)

    def note_registered(self, info: ReplicaInfo) -> None:
        """A replica is there, or back, with these weights."""
        order = self._orders.get(info.model)
        version = info.identity.weights_version
        if order is None or version > order.wanted.version:
            wanted = WantedWeights(info.checkpoint, version)
            order = WeightsOrder(wanted, self._drain_s, rolls=info.weights_ordered)
            self._orders[info.model] = order
        if version == order.wanted.version and order.replacing == info.replica_id:
            order.replacing = None

    def note_leaving(self, model: str, replica_id: str) -> None:
        """A replica goes for good: nobody has to wait for it."""
        order = self._orders.get(model)
        if order is not None and order.replacing == replica_id:
            order.replacing = None

    def next_turn(
        self, model: str, views: Iterable[ReplicaView]
    ) -> tuple[ReplicaView, float] | None:
        """The replica to be replaced now, and how long the last streams of its weights may take."""
        order = self._orders.get(model)
        if order is None or not order.rolls or order.replacing is not None:
            return None
        views = list(views)
        if any(view.state is not ReplicaState.READY for view in views):
            return None
        for view in views:
            if view.info.identity.weights_version < order.wanted.version:
                order.replacing = view.info.replica_id
                return view, order.drain_s
        return None
