"""`pagefleet.v1.Admin` through the gateway: what reaches the controller, and what is refused."""

import math

import pytest
from gateway_fakes import FakeCluster

from pagefleet.cluster.client import AsyncClient
from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.protos.errors import InvalidArgument


@pytest.fixture
async def orders():
    """What the controller was told to drain."""
    told: list[tuple[str, float]] = []

    async def drain(replica_id: str, draining: bool, drain_s: float) -> bool:
        assert draining
        told.append((replica_id, drain_s))
        return replica_id == "r0"

    async with FakeCluster() as cluster:
        cluster.controller.drain = drain
        server = GrpcServer(cluster.gateway)
        port = await server.start("127.0.0.1", 0)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield client, told
        await server.stop(0)


async def test_an_order_to_drain_reaches_the_controller(orders):
    client, told = orders
    await client.drain("r0")
    await client.drain("r0", 0.0)
    assert told == [("r0", 30.0), ("r0", 0.0)]


async def test_an_unknown_replica_is_named(orders):
    client, _ = orders
    with pytest.raises(InvalidArgument, match="nobody") as caught:
        await client.drain("nobody")
    assert caught.value.field == "replica_id"


@pytest.mark.parametrize("drain_s", [-1.0, math.nan, math.inf])
async def test_an_absurd_time_is_refused(orders, drain_s: float):
    client, told = orders
    with pytest.raises(InvalidArgument) as caught:
        await client.drain("r0", drain_s)
    assert caught.value.field == "drain_s"
    assert told == []
