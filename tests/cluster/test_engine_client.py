"""The gateway's end of the data plane against the real engine server."""

import asyncio
import functools

import grpc.aio
import pytest
from gateway_fakes import FakeLeader, engine_request, lease_of, read_tokens, until

from pagefleet.cluster import engine_client
from pagefleet.cluster.engine_client import EngineClient, ReplicaLost


@pytest.fixture
async def leader():
    made = FakeLeader("r0")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client():
    made = EngineClient("gw")
    yield made
    await made.close()


async def test_many_requests_share_one_stream(leader, client):
    streams = [client.submit(lease_of(leader), engine_request(f"k{i}", i)) for i in range(1, 30)]
    lengths = [len(await read_tokens(stream)) for stream in streams]
    assert lengths == list(range(1, 30))
    assert leader.port.num_connections == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stream_secret": "wrong"}, "UNAUTHENTICATED"),
        ({"incarnation": "another life"}, "FAILED_PRECONDITION"),
        ({"address": "127.0.0.1:1"}, "UNAVAILABLE"),
    ],
)
async def test_a_leader_that_is_not_there_loses_the_request(leader, client, changes, reason):
    stream = client.submit(lease_of(leader, **changes), engine_request("k"))
    with pytest.raises(ReplicaLost, match=reason):
        await stream.next_deltas()
    assert not leader.engine.submitted


async def test_after_a_loss_the_next_request_attaches_anew(leader, client):
    lost = client.submit(lease_of(leader, stream_secret="wrong"), engine_request("a"))
    with pytest.raises(ReplicaLost):
        await lost.next_deltas()
    assert len(await read_tokens(client.submit(lease_of(leader), engine_request("b")))) == 5


async def test_cancel_is_sent_once_and_nothing_comes_after(leader, client):
    leader.engine.token_budget = 3
    stream = client.submit(lease_of(leader), engine_request("k", 50))
    assert await stream.next_deltas()
    stream.close(cancel=True)
    await until(lambda: leader.engine.cancelled, leader.engine.changed)
    assert leader.engine.cancelled == ["k"]


async def test_a_cancel_that_was_lost_with_the_stream_is_repeated(leader, client):
    """Another request on the link brings it back; the first one's cancel comes with it."""
    engine = leader.engine
    engine.gate.clear()
    first = client.submit(lease_of(leader), engine_request("first", 50))
    second = client.submit(lease_of(leader), engine_request("second", 5))
    await until(lambda: len(engine.submitted) == 2, engine.changed)
    leader.port.flowing.clear()
    first.close(cancel=True)
    await asyncio.sleep(0)
    leader.port.cut()
    leader.port.flowing.set()
    await until(lambda: engine.cancelled, engine.changed)
    assert engine.cancelled == ["first"]
    engine.gate.set()
    assert len(await read_tokens(second)) == 5
    assert len(engine.submitted) == 2, "the second was sent again and recognised"


async def test_closing_the_client_ends_what_waits(leader):
    client = EngineClient("gw")
    leader.engine.gate.clear()
    stream = client.submit(lease_of(leader), engine_request("k"))
    await until(lambda: leader.engine.submitted, leader.engine.changed)
    await client.close()
    with pytest.raises(ReplicaLost):
        await stream.next_deltas()


async def test_a_frozen_leader_is_noticed_by_its_silence(leader, monkeypatch):
    """Its sockets stay open, as those of a stopped process do; only pings tell."""
    options = {
        name: value // 10 if name.endswith("_ms") else value
        for name, value in engine_client._CHANNEL_OPTIONS
    }
    monkeypatch.setattr(engine_client, "_REATTACH_TIMEOUT_S", 0.5)
    client = EngineClient(
        "gw", functools.partial(grpc.aio.insecure_channel, options=list(options.items()))
    )
    leader.engine.token_budget = 3
    stream = client.submit(lease_of(leader), engine_request("k", 50))
    assert await stream.next_deltas()
    leader.port.flowing.clear()
    with pytest.raises(ReplicaLost):
        async with asyncio.timeout(10):
            while True:
                await stream.next_deltas()
    await client.close()
