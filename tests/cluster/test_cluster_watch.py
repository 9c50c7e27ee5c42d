"""Who watches the cluster is told what changed, and the controller is asked rarely."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from pagefleet.cluster.cluster_watch import ClusterWatch
from pagefleet.cluster.recent_rates import RecentRates
from pagefleet.protos.errors import InvalidArgument, Overloaded, Unavailable
from pagefleet.protos.messages import (
    BlockCounts,
    ClusterState,
    ClusterView,
    DecisionView,
    PoolMap,
    PoolView,
    ReplicaState,
    ReplicaStatus,
)

STATUS = ReplicaStatus(
    *("r0", "a", "m", ReplicaState.READY, "", BlockCounts(), BlockCounts()),
    *(0, 0, 0, 0),
    hit_tokens=0,
    query_tokens=0,
    preemptions=0,
    steps_done=0,
    indexed_device=0,
    indexed_host=0,
    report_age_s=0.0,
)
STATE = ClusterState((STATUS,), 0, 0, 0, 0, 0, "default", 1.0)


def decide(*numbers: int) -> tuple[DecisionView, ...]:
    return tuple(
        DecisionView(number, 0.0, "k", "", "", "m", "grant", "", "r0", 1, 0, 1, 0.0)
        for number in numbers
    )


class FakeController:
    def __init__(self) -> None:
        self.pools = {"r0": b"\xf8", "r1": b"\xf8"}
        self.decisions = decide()
        self.hits = (0, 0)
        self.num_calls = 0
        self.error: Exception | None = None

    async def watch(self) -> ClusterView:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        status = replace(STATUS, query_tokens=self.hits[0], hit_tokens=self.hits[1])
        pools = [PoolView(name, "device", PoolMap(1, cells)) for name, cells in self.pools.items()]
        return ClusterView(
            replace(STATE, replicas=(status,)), tuple(pools), (), (), 0, self.decisions, ()
        )


class Bench:
    """Time passes only here: between two updates, as much as a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.controller = FakeController()
        self.watch = ClusterWatch(self.controller, RecentRates(self), self)

    def __call__(self) -> float:
        return self.now

    async def next(self, updates, after_s: float = 1.0):
        self.now += after_s
        return await anext(updates)


async def test_maps_and_decisions_are_told_once() -> None:
    bench = Bench()
    bench.controller.decisions = decide(1, 2)
    async with aclosing(bench.watch.updates(0.2)) as updates:
        view = (await bench.next(updates)).view
        assert [pool.replica_id for pool in view.pools] == ["r0", "r1"]
        assert [decision.number for decision in view.decisions] == [1, 2]
        view = (await bench.next(updates)).view
        assert (view.pools, view.decisions) == ((), ())
        bench.controller.pools["r1"] = b"\xf9"
        bench.controller.decisions = decide(1, 2, 3)
        view = (await bench.next(updates)).view
        assert [pool.map.cells for pool in view.pools] == [b"\xf9"]
        assert [decision.number for decision in view.decisions] == [3]


async def test_a_replica_that_comes_back_is_told_anew() -> None:
    bench = Bench()
    async with aclosing(bench.watch.updates(0.2)) as updates:
        await bench.next(updates)
        gone = bench.controller.pools.pop("r0")
        assert (await bench.next(updates)).view.pools == ()
        bench.controller.pools["r0"] = gone
        assert [pool.replica_id for pool in (await bench.next(updates)).view.pools] == ["r0"]


async def test_a_controller_that_began_anew_tells_all_its_decisions() -> None:
    bench = Bench()
    bench.controller.decisions = decide(*range(1, 200))
    async with aclosing(bench.watch.updates(0.2)) as updates:
        assert len((await bench.next(updates)).view.decisions) == 64, "not all of the past"
        bench.controller.decisions = decide(1)
        view = (await bench.next(updates)).view
        assert [decision.number for decision in view.decisions] == [1]


async def test_many_watchers_are_one_to_the_controller() -> None:
    bench = Bench()
    streams = [bench.watch.updates(0.2) for _ in range(20)]
    bench.now = 1.0
    await asyncio.gather(*(anext(stream) for stream in streams))
    assert bench.controller.num_calls == 1
    await asyncio.gather(*(anext(stream) for stream in streams))
    assert bench.controller.num_calls == 1, "no time has passed"
    for stream in streams:
        await stream.aclose()
    assert bench.watch.num_watchers == 0


async def test_too_many_watchers_and_odd_periods_are_refused() -> None:
    bench = Bench()
    for period_s in (0.0, 0.1, 61.0, float("nan"), -1.0):
        with pytest.raises(InvalidArgument, match="period_s"):
            await anext(bench.watch.updates(period_s))
    streams = [bench.watch.updates(1.0) for _ in range(64)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Overloaded):
        await anext(bench.watch.updates(1.0))
    await streams[0].aclose()
    streams.append(bench.watch.updates(1.0))
    await anext(streams[-1])
    for stream in streams:
        await stream.aclose()


async def test_tells_what_was_found_in_the_last_seconds() -> None:
    bench = Bench()
    async with aclosing(bench.watch.updates(0.2)) as updates:
        bench.controller.hits = (1000, 100)
        assert (await bench.next(updates)).query_tokens == 0
        bench.controller.hits = (1500, 400)
        update = await bench.next(updates)
        assert (update.query_tokens, update.hit_tokens) == (500, 300)
        bench.controller.hits = (1600, 500)
        update = await bench.next(updates, 9.5)
        assert (update.query_tokens, update.hit_tokens) == (100, 100), "the first is too old"
        bench.controller.hits = (10, 0)
        assert (await bench.next(updates)).query_tokens == 0, "a replica has gone"


async def test_an_outage_ends_the_stream_and_the_next_one_starts_well() -> None:
    bench = Bench()
    bench.controller.error = Unavailable("restarting")
    with pytest.raises(Unavailable):
        await anext(bench.watch.updates(1.0))
    bench.controller.error = None
    async with aclosing(bench.watch.updates(1.0)) as updates:
        assert (await anext(updates)).view.state.policy == "default"


async def test_a_closing_gateway_ends_its_watchers_at_once() -> None:
    bench = Bench()
    updates = bench.watch.updates(60.0)
    await anext(updates)
    waiting = asyncio.ensure_future(anext(updates, None))
    await asyncio.sleep(0)
    bench.watch.close()
    async with asyncio.timeout(5):
        assert await waiting is None
