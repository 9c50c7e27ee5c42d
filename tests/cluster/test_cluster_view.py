"""What a dashboard is shown of the controller."""

from cluster_factories import join, make_controller, make_hashes, make_info, make_request, tell

from pagefleet.cluster.cluster_view import cells_per_pool
from pagefleet.cluster.prefix_forest import grow_forest
from pagefleet.protos.messages import AdmissionClass, Lease, PoolMap, PoolView

BIG = {"num_tokens": 1500, "max_tokens": 100}
DEVICE, HOST = PoolMap(100, b"\xf8" * 100), PoolMap(8, b"\xfd" * 8)


def test_asks_for_maps_only_while_someone_watches() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    assert controller.report(replica.report(), 1.0).map_cells == 0
    controller.watch(1.0)
    assert controller.report(replica.report(), 2.0).map_cells == 4096
    assert controller.report(replica.report(), 7.0).map_cells == 0


def test_keeps_the_last_map_of_each_tier() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    assert controller.watch(0.0).pools == ()
    tell(controller, replica, 0.1, device_map=DEVICE, host_map=HOST)
    tell(controller, replica, 0.2)
    assert controller.watch(0.3).pools == (
        PoolView("r0", "device", DEVICE),
        PoolView("r0", "host", HOST),
    )
    tell(controller, replica, 0.4, device_map=DEVICE, host_map=PoolMap(0, b""))
    assert controller.watch(0.5).pools == (PoolView("r0", "device", DEVICE),)


def test_all_maps_together_are_bounded() -> None:
    assert cells_per_pool(1) == 4096
    assert cells_per_pool(64) == 512
    for num_replicas in (1, 7, 64, 500):
        assert num_replicas * cells_per_pool(num_replicas) <= 2**15
    assert cells_per_pool(100_000) == 64, "less shows nothing"


def test_shows_who_waits_oldest_first_and_how_many_more_there_are() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    lease = controller.reserve(make_request(**BIG), 0.0)
    assert isinstance(lease, Lease) and replica.accept(lease)
    tell(controller, replica, 0.1)
    for number in range(70):
        controller.reserve(make_request(tenant=f"t{number}", **BIG), 1.0 + number / 100)
    view = controller.watch(11.0)
    assert view.state.queued_requests == 70
    assert [waiting.tenant for waiting in view.waiting] == [f"t{number}" for number in range(64)]
    first = view.waiting[0]
    assert (first.waited_s, first.num_tokens, first.num_blocks) == (10.0, 1500, 100)
    assert first.admission_class is AdmissionClass.GUARANTEED


def test_shows_leases_newest_first_with_what_they_may_take() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    older = controller.reserve(make_request(request_id="older", tenant="t"), 0.0)
    newer = controller.reserve(make_request(request_id="newer"), 1.0)
    assert isinstance(older, Lease) and isinstance(newer, Lease) and replica.accept(older)
    replica.take(older.lease_id, 2)
    tell(controller, replica, 2.0)
    view = controller.watch(3.0)
    assert view.num_leases == 2
    assert [lease.request_id for lease in view.leases] == ["newer", "older"]
    shown = view.leases[1]
    assert (shown.replica_id, shown.tenant, shown.age_s) == ("r0", "t", 3.0)
    assert (shown.num_blocks, shown.remaining_blocks, shown.accepted) == (5, 3, True)
    assert not view.leases[0].accepted


def test_prefixes_have_their_tokens_and_where_they_are() -> None:
    controller = make_controller()
    common, other = make_hashes(3), make_hashes(2, chain=1)
    for name in ("r0", "r1"):
        replica = join(controller, make_info(name))
        replica.store(*common)
        tell(controller, replica, 0.1)
    controller.reserve(make_request(route_hashes=common), 1.0)
    controller.reserve(make_request(route_hashes=(*common, *other)), 1.0)
    runs = grow_forest(controller.recent_prompts())
    root, child = controller.with_prefixes(controller.watch(1.0), runs).prefixes
    assert (root.parent, root.num_tokens, root.num_requests) == (None, 48, 2)
    assert (root.num_device_replicas, root.num_host_replicas) == (2, 0)
    assert (child.parent, child.num_tokens, child.num_device_replicas) == (0, 80, 0)
    assert root.label == common[-1][:4].hex()
