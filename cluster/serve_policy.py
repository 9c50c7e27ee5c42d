"""The autoscaling policies that Serve's controller calls, ten times a second.

They read only what has reached that process: gateways tell the block demand of every model in
their statistics, also while a model has no replica that could. The gateways' policy puts it on the
`demand_board`, the replicas' policies read it there; both run in the one process of Serve's
controller. Nothing here waits for anybody. The arithmetic is `autoscaling`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

# The module, not the board: Serve copies what a policy refers to, but modules are one in a process.
from . import demand_board
from .autoscaling import from_stats, replicas_wanted


class Reading(Protocol):
    """One number at one time, as Serve keeps it."""

    @property
    def timestamp(self) -> float: ...

    @property
    def value(self) -> float: ...


class ScalingContext(Protocol):
    """What is used of Serve's `AutoscalingContext`."""

    @property
    def app_name(self) -> str | None: ...

    @property
    def target_num_replicas(self) -> int: ...

    @property
    def current_time(self) -> float | None: ...

    @property
    def policy_state(self) -> dict[str, object]: ...

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[object, Sequence[Reading]]] | None: ...


Decision = tuple[int, dict[str, object]]


def watch_gateways(context: ScalingContext) -> Decision:
    """Read what the gateways say; how many of them there are does not change."""
    for stats, read_at in _last_stats(context.raw_metrics or {}):
        for model, demand in from_stats(stats).items():
            demand_board.BOARD.put(context.app_name or "", model, read_at, demand)
    return context.target_num_replicas, context.policy_state


class BlockDeficitPolicy:
    """Replicas of one model after its block deficit; as they are while nothing is known."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, context: ScalingContext) -> Decision:
        now = context.current_time or 0.0
        demand = demand_board.BOARD.get(context.app_name or "", self._model, now)
        if demand is None:
            return context.target_num_replicas, context.policy_state
        return replicas_wanted(demand), context.policy_state


def _last_stats(
    metrics: Mapping[str, Mapping[object, Sequence[Reading]]],
) -> list[tuple[dict[str, float], float]]:
    """The last reading of each gateway: named numbers and their time."""
    by_gateway: dict[object, tuple[dict[str, float], float]] = {}
    for name, series_by_gateway in metrics.items():
        for gateway, series in series_by_gateway.items():
            if series:
                stats, read_at = by_gateway.get(gateway, ({}, 0.0))
                stats[name] = series[-1].value
                by_gateway[gateway] = (stats, max(read_at, series[-1].timestamp))
    return list(by_gateway.values())
