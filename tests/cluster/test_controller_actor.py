"""The controller behind its lock and its clock; once as a Ray actor."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from cluster_factories import FakeReplica, make_card, make_hashes, make_info, make_request

from pagefleet.cluster.autoscaling import newest
from pagefleet.cluster.binding_costs import LateBindingConfig
from pagefleet.cluster.controller import ControllerConfig
from pagefleet.cluster.controller_actor import (
    CONCURRENCY_GROUPS,
    ControllerService,
    lost_event_loops,
)
from pagefleet.protos.errors import Unavailable
from pagefleet.protos.messages import CacheReset, Lease, PoolMap, PoolView, ReplicaInfo, Ticket

CONFIG = ControllerConfig(late_binding=LateBindingConfig(start_slack_s=1e9), watchdog_s=5.0)
WHOLE_POOL = {"num_tokens": 1500, "max_tokens": 100}


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def join(service: ControllerService, info: ReplicaInfo) -> FakeReplica:
    replica = FakeReplica(info)
    await service.register_replica(info, make_card(info))
    await service.report(replica.report(snapshot=True))
    return replica


async def test_a_waiting_poll_is_woken_by_the_report_that_ends_it() -> None:
    service = ControllerService(CONFIG, clock=Clock())
    replica = await join(service, make_info())
    lease = await service.reserve(make_request(**WHOLE_POOL))
    assert isinstance(lease, Lease) and replica.accept(lease)
    await service.report(replica.report())
    assert isinstance(await service.reserve(make_request(**WHOLE_POOL)), Ticket)
    poll = asyncio.create_task(service.next_grants("g"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not poll.done()
    replica.finish(lease.lease_id)
    await service.report(replica.report())
    async with asyncio.timeout(5):
        (grant,) = await poll
    assert isinstance(grant, Lease)
    await service.check_integrity()


async def test_its_state_tells_what_its_own_work_takes_and_who_waits() -> None:
    clock = Clock()
    service = ControllerService(CONFIG, clock=clock)
    replica = await join(service, make_info())
    lease = await service.reserve(make_request(**WHOLE_POOL))
    assert isinstance(lease, Lease) and replica.accept(lease)
    clock.now += 1.0
    assert isinstance(await service.reserve(make_request(**WHOLE_POOL)), Ticket)
    clock.now += 0.5
    state = await service.cluster_state()
    calls = {times.call: sum(times.counts) for times in state.calls}
    assert calls == {"report": 1, "reserve": 2}
    assert state.oldest_wait_s == 0.5
    assert state.replicas[0].num_leases == 1


async def test_who_watches_sees_decisions_prefixes_and_the_maps_they_made_replicas_send() -> None:
    service = ControllerService(CONFIG, clock=Clock())
    replica = await join(service, make_info())
    hashes = make_hashes(2)
    await service.reserve(make_request(route_hashes=hashes))
    assert (await service.watch()).pools == ()
    reply = await service.report(replica.report())
    assert reply.map_cells > 0
    pool_map = PoolMap(100, b"\xf8" * 100)
    await service.report(replica.report(device_map=pool_map, host_map=PoolMap(0, b"")))
    view = await service.watch()
    assert view.pools == (PoolView("r0", "device", pool_map),)
    assert [decision.decision for decision in view.decisions] == ["grant"]
    assert [node.num_tokens for node in view.prefixes] == [32]
    assert view.state.calls


async def test_a_poll_is_woken_from_another_threads_loop() -> None:
    service = ControllerService(CONFIG, clock=Clock())
    replica = await join(service, make_info())
    lease = await service.reserve(make_request(**WHOLE_POOL))
    assert isinstance(lease, Lease)
    assert isinstance(await service.reserve(make_request(**WHOLE_POOL)), Ticket)
    poll = asyncio.create_task(service.next_grants("g"))
    await asyncio.sleep(0)
    await service.release(lease.request_key, 1)
    report = replica.report()
    thread = threading.Thread(target=lambda: asyncio.run(service.report(report)))
    thread.start()
    async with asyncio.timeout(5):
        assert len(await poll) == 1
    thread.join()


async def test_a_tick_tells_of_the_dead_and_when_to_come_back() -> None:
    clock = Clock()
    told: list[tuple[ReplicaInfo, ...]] = []
    service = ControllerService(CONFIG, clock=clock, on_dead=told.append)
    await join(service, make_info())
    assert 0.0 < service.tick() <= 0.5
    while clock.now < 6.0:
        clock.now += 0.5
        service.tick()
    assert [info.replica_id for info in told[0]] == ["r0"]


async def test_nobody_is_dead_because_the_controller_was_frozen() -> None:
    clock = Clock()
    told: list[tuple[ReplicaInfo, ...]] = []
    service = ControllerService(CONFIG, clock=clock, on_dead=told.append)
    replica = await join(service, make_info())
    clock.now += 60.0
    service.tick()  # before the reports that came meanwhile
    assert not told
    await service.report(replica.report())
    while clock.now < 64.0:
        clock.now += 0.5
        service.tick()
    assert not told
    while clock.now < 67.0:
        clock.now += 0.5
        service.tick()
    assert told
    for _ in range(2):  # each supervisor is told
        assert [info.replica_id for info in await service.dead_replicas()] == ["r0"]
    assert (await service.cluster_state()).replicas == ()


@pytest.mark.ray
def test_the_actor_serves_waits_and_reports_apart(tmp_path_factory: object) -> None:
    import tempfile

    import ray

    from pagefleet.cluster.controller_actor import start_controller

    folder = tempfile.mkdtemp(prefix="pf", dir="/tmp")
    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=str(Path(folder)))
    try:
        controller = start_controller(CONFIG)
        info = make_info()
        replica = FakeReplica(info)
        ray.get(controller.register_replica.remote(info, make_card(info)))
        ray.get(controller.report.remote(replica.report(snapshot=True)))
        lease = ray.get(controller.reserve.remote(make_request(**WHOLE_POOL)))
        assert isinstance(lease, Lease)
        assert isinstance(ray.get(controller.reserve.remote(make_request(**WHOLE_POOL))), Ticket)
        poll = controller.next_grants.remote("g")
        ray.get(controller.release.remote(lease.request_key, 1, 7))
        ray.get(controller.report.remote(replica.report()))
        (grant,) = ray.get(poll, timeout=30)
        assert isinstance(grant, Lease)
        ray.get(controller.check_integrity.remote())
        ray.kill(controller)
    finally:
        if started:
            ray.shutdown()


async def test_a_reset_waits_for_every_replica_and_says_who_does_not_answer() -> None:
    clock = Clock()
    service = ControllerService(CONFIG, clock=clock)
    replica = await join(service, make_info())
    reset = asyncio.create_task(service.reset_prefix_cache(""))
    await asyncio.sleep(0)
    order = (await service.report(replica.report())).reset_order
    replica.epoch += 1
    await service.report(replica.report(reset_order=order, reset_blocks=4))
    assert await reset == (CacheReset("r0", 4, 1),)
    vain = asyncio.create_task(service.reset_prefix_cache("m"))
    await asyncio.sleep(0)
    clock.now += 60.0
    with pytest.raises(Unavailable, match="r0"):
        await vain


async def test_whoever_calls_ends_the_silence_and_time_alone_does_not() -> None:
    clock = Clock()
    service = ControllerService(CONFIG, clock=clock)
    replica = await join(service, make_info())
    clock.now += 3.0
    service.tick()
    assert service.silence_s == 3.0
    await service.report(replica.report())
    assert service.silence_s == 0.0
    clock.now += 4.0
    await service.model_cards()
    assert service.silence_s == 0.0


async def test_demands_are_numbered_so_that_the_newest_is_known() -> None:
    service = ControllerService(CONFIG, clock=Clock())
    await join(service, make_info())
    first = await service.block_demands({"m": 60.0, "unknown": 5.0})
    second = await service.block_demands({"m": 60.0})
    assert newest((second["m"], first["m"])) is second["m"]
    assert (first["m"].num_replicas, first["m"].free_blocks) == (1, 100)
    assert (first["unknown"].num_replicas, first["unknown"].startup_s) == (0, 5.0)


def test_a_group_without_an_event_loop_is_noticed_where_threads_are_named_as_known() -> None:
    known = [f"AsyncIO Thread: {group}" for group in ("default", *CONCURRENCY_GROUPS)]
    assert lost_event_loops(known) == []
    assert lost_event_loops(known[:-1]) == ["waits"]
    assert lost_event_loops(["MainThread"]) == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_controller_that_lost_an_event_loop_begins_anew(tmp_path: Path) -> None:
    import tempfile

    import ray
    from ray.exceptions import RayError
    from starved_controller import MARK_VARIABLE, StarvedController

    mark = tmp_path / "lost"
    tests = str(Path(__file__).parents[1])
    folder = tempfile.mkdtemp(prefix="pf", dir="/tmp")
    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=folder)
    try:
        controller = ray.remote(
            num_cpus=0,
            max_restarts=-1,
            concurrency_groups=CONCURRENCY_GROUPS,
            runtime_env={"env_vars": {MARK_VARIABLE: str(mark), "PYTHONPATH": tests}},
        )(StarvedController).remote(CONFIG)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                answer = ray.get(controller.reserve.remote(make_request()), timeout=10.0)
                break
            except RayError:  # it is away, or would never answer
                assert time.monotonic() < deadline, "reserves hang"
        assert mark.exists()
        assert not isinstance(answer, Lease)  # nobody has joined
        ray.kill(controller)
    finally:
        if started:
            ray.shutdown()
