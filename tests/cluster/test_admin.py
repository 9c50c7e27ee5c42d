"""`pagefleet.v1.Admin` through the gateway: what reaches the controller, and what is refused."""

import math

import pytest
from gateway_fakes import FakeCluster
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient
from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.protos.errors import InvalidArgument, ModelNotFound
from pagefleet.protos.messages import CacheReset


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


@pytest.fixture
async def admin():
    """A client, and the controller's records of what it was told."""
    told: list[tuple[object, ...]] = []

    async def reset_prefix_cache(model: str) -> tuple[CacheReset, ...]:
        told.append((model,))
        return (CacheReset("r0", 7, 3),)

    async def update_weights(model: str, checkpoint: str, drain_s: float) -> int:
        told.append((model, checkpoint, drain_s))
        return 4

    async with FakeCluster() as cluster:
        cluster.controller.reset_prefix_cache = reset_prefix_cache
        cluster.controller.update_weights = update_weights
        server = GrpcServer(cluster.gateway)
        port = await server.start("127.0.0.1", 0)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield client, told
        await server.stop(0)


async def test_a_reset_tells_what_each_replica_did(admin):
    client, told = admin
    (reset,) = (await client.reset_prefix_cache()).replicas
    assert (reset.replica_id, reset.num_blocks, reset.epoch) == ("r0", 7, 3)
    await client.reset_prefix_cache("tiny")
    assert told == [("",), ("tiny",)]


async def test_new_weights_reach_the_controller_under_the_models_own_name(admin, tmp_path):
    client, told = admin
    folder = make_tiny_model(tmp_path / "new")
    assert await client.update_weights(str(folder)) == 4
    await client.update_weights("org/name", "tiny", 5.0)
    assert told == [("tiny", str(folder), 600.0), ("tiny", "org/name", 5.0)]


@pytest.mark.parametrize("checkpoint", ["", "/nothing/here", "relative", "../x/y/z"])
async def test_what_is_no_checkpoint_is_refused_before_a_replica_goes(admin, checkpoint: str):
    client, told = admin
    with pytest.raises(InvalidArgument) as caught:
        await client.update_weights(checkpoint)
    assert caught.value.field == "checkpoint"
    assert told == []


async def test_weights_of_a_model_that_is_not_served_are_refused(admin):
    client, told = admin
    with pytest.raises(ModelNotFound):
        await client.update_weights("org/name", "other")
    assert told == []
