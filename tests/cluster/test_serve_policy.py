"""What Serve's controller decides from what gateways told it, and from nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from pagefleet.cluster import demand_board
from pagefleet.cluster.autoscaling import BlockDemand, to_stats
from pagefleet.cluster.demand_board import DemandBoard
from pagefleet.cluster.serve_policy import BlockDeficitPolicy, watch_gateways

NOW = 1000.0
FULL = BlockDemand(1.0, 1.0, 150.0, 0.0, 0.0, 0.0, 100.0, 9.0, 1.0)  # 3 replicas are wanted
IDLE = BlockDemand(1.0, 1.0, replica_blocks=100.0, num_replicas=1.0)


@dataclass
class Context:
    """As Serve makes it for one deployment."""

    app_name: str = "fleet"
    target_num_replicas: int = 1
    current_time: float = NOW
    policy_state: dict[str, object] = field(default_factory=dict)
    raw_metrics: dict[str, dict[object, list[object]]] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def board() -> Iterator[None]:
    """A new process of Serve's controller."""
    before, demand_board.BOARD = demand_board.BOARD, DemandBoard()
    yield
    demand_board.BOARD = before


def told(*by_gateway: BlockDemand | list[BlockDemand], at: float = NOW) -> Context:
    """What each gateway said of model `m`, earlier readings before later ones."""
    metrics: dict[str, dict[object, list[object]]] = {"ongoing_requests": {"g0": []}}
    for number, demands in enumerate(by_gateway):
        for demand in demands if isinstance(demands, list) else [demands]:
            for name, value in to_stats({"m": demand}).items():
                series = metrics.setdefault(name, {}).setdefault(f"g{number}", [])
                series.append(SimpleNamespace(timestamp=at, value=value))
    return Context(raw_metrics=metrics)


def decide(target: int = 1, app: str = "fleet", now: float = NOW) -> int:
    policy = BlockDeficitPolicy("m")
    return policy(Context(app, target_num_replicas=target, current_time=now))[0]


def test_the_size_follows_what_the_gateways_say() -> None:
    assert watch_gateways(told([IDLE, replace(FULL, sequence=2.0)]))[0] == 1, "as many gateways"
    assert decide() == 3


def test_nothing_moves_while_nothing_is_known() -> None:
    assert decide(target=4) == 4
    watch_gateways(told(FULL, at=NOW - 60.0))
    assert decide(target=4) == 4, "a minute ago is not now"


def test_applications_and_models_do_not_mix() -> None:
    watch_gateways(told(FULL))
    assert decide(target=1, app="other") == 1
    assert BlockDeficitPolicy("n")(Context())[0] == 1


def test_c29_of_two_planners_the_later_one_decides() -> None:
    """Gateways that still listen to a frozen controller's last words, or to it again, in between
    those that listen to its successor: the size does not flap.
    """
    old, new = replace(FULL, epoch=1.0), replace(IDLE, epoch=2.0, num_requests=1.0)
    sizes: list[int] = []
    for sequence in range(1, 20):
        first = replace(old, sequence=100.0 + sequence)
        second = replace(new, sequence=float(sequence))
        watch_gateways(told(first, second) if sequence % 2 else told(second, first))
        sizes.append(decide())
        watch_gateways(told(first))
        sizes.append(decide())
    assert set(sizes) == {1}


def test_c29_a_late_count_of_the_same_planner_changes_nothing() -> None:
    watch_gateways(told(replace(IDLE, sequence=9.0)))
    watch_gateways(told(replace(FULL, sequence=8.0)))
    assert decide() == 0
