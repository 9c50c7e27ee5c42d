"""Drains that nothing prolongs, and resets that know who has obeyed."""

from cluster_factories import FakeReplica, make_card, make_columns, make_info

from pagefleet.cluster.replica_orders import ReplicaOrders
from pagefleet.cluster.replica_view import ReplicaView
from pagefleet.protos.messages import CacheReset


def make_view(name: str) -> ReplicaView:
    info = make_info(name)
    return ReplicaView(info, make_card(info), 0, make_columns(1), 0.0)


def report(view: ReplicaView, **fields: object) -> None:
    view.take_report(FakeReplica(view.info).report(**fields), 0, 1.0)  # pyright: ignore


def test_a_later_drain_gives_streams_no_more_time() -> None:
    orders = ReplicaOrders()
    assert orders.drain_until("r0") is None
    orders.drain("r0", 30.0)
    orders.drain("r0", 50.0)
    assert orders.drain_until("r0") == 30.0
    orders.drain("r0", 20.0)
    assert orders.drain_until("r0") == 20.0
    orders.end_drain("r0")
    assert orders.drain_until("r0") is None


def test_a_reset_is_done_by_those_that_say_so() -> None:
    orders, first, second, other = ReplicaOrders(), *map(make_view, ("r0", "r1", "r2"))
    number = orders.reset([first, second])
    report(other)
    views = [first, second, other]
    assert orders.resets(number, views) == ((), ("r0", "r1"))
    report(first, reset_order=number, reset_blocks=7, epoch=3)
    report(second, reset_order=number - 1)
    assert orders.resets(number, views) == ((CacheReset("r0", 7, 3),), ("r1",))


def test_a_later_reset_obeys_an_earlier_one() -> None:
    orders, view = ReplicaOrders(), make_view("r0")
    earlier, later = orders.reset([view]), orders.reset([view])
    report(view, reset_order=later, reset_blocks=2, epoch=1)
    for number in (earlier, later):
        assert orders.resets(number, [view]) == ((CacheReset("r0", 2, 1),), ())
