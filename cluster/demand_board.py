"""Where Serve's policies meet: the newest demand of each model, in the process they all run in.

Its readers and writers are called one after the other. Knows no Ray.
"""

from .autoscaling import BlockDemand, newest

_MAX_AGE_S = 15.0  # what is older says nothing about now


class DemandBoard:
    """The newest demand by application and model, and when it was read."""

    def __init__(self) -> None:
        self._demands: dict[tuple[str, str], tuple[float, BlockDemand]] = {}

    def put(self, app: str, model: str, read_at: float, demand: BlockDemand) -> None:
        """Keep it if it is newer than what stands there."""
        known = self._demands.get((app, model))
        if known is None or newest((known[1], demand)) is not known[1]:
            self._demands[app, model] = (read_at, demand)

    def get(self, app: str, model: str, now: float) -> BlockDemand | None:
        """None = nobody has said anything lately."""
        read_at, demand = self._demands.get((app, model), (float("-inf"), BlockDemand()))
        return demand if now - read_at <= _MAX_AGE_S else None


BOARD = DemandBoard()
