"""Both fronts of a gateway come and go together."""

import asyncio
import socket

import grpc.aio
import httpx
import pytest
from gateway_fakes import FakeController, FakeLeader, load_fake_tokenizer, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagefleet.cluster.client import AsyncClient
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.gateway_servers import GatewayServers
from pagefleet.protos.messages import SamplingParams
from pagefleet.workers.heartbeat import read_beats


@pytest.fixture
async def leader():
    made = FakeLeader("r0")
    await made.start()
    yield made
    await made.stop()


def make_servers(*leaders: FakeLeader) -> GatewayServers:
    controller = FakeController(list(leaders))
    return GatewayServers(Gateway("gw", controller, load_tokenizer=load_fake_tokenizer))


async def test_both_fronts_answer_and_health_follows(leader):
    servers = make_servers(leader)
    addresses = await servers.start("127.0.0.1", 0, 0)
    async with AsyncClient(addresses.grpc) as client:
        completion = await client.generate("hi", SamplingParams(max_tokens=3))
        assert len(completion.text) == 3
    async with grpc.aio.insecure_channel(addresses.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()
    async with httpx.AsyncClient(base_url=f"http://{addresses.http}", verify=False) as client:
        assert (await client.get("/ready")).status_code == 200
    await servers.stop(1)
    with pytest.raises(OSError):
        socket.create_connection(addresses.http.split(":"), timeout=1).close()


@pytest.mark.parametrize("which", ["grpc", "http"])
async def test_a_taken_port_leaves_nothing_open(which):
    servers = make_servers()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (port, 0) if which == "grpc" else (0, port)
        with pytest.raises(OSError):
            await servers.start("127.0.0.1", *ports)


async def test_what_has_not_ended_when_the_servers_stop_is_told_to_go_elsewhere(leader):
    servers = make_servers(leader)
    addresses = await servers.start("127.0.0.1", 0, 0)
    leader.engine.gate.clear()
    async with httpx.AsyncClient(base_url=f"http://{addresses.http}", verify=False) as client:
        body = {"prompt": "hi", "max_tokens": 3}
        post = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(20):
            await until(lambda: leader.engine.submitted, leader.engine.changed)
        await servers.stop(0.5)
        answer = await post
    leader.engine.gate.set()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server is stopping"


async def test_it_gives_signs_of_life_where_somebody_wants_them(leader, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEFLEET_HEARTBEATS", str(tmp_path))
    servers = make_servers(leader)
    await servers.start("127.0.0.1", 0, 0)
    async with asyncio.timeout(30):
        while not any(beat.pulse.is_ready for beat in read_beats(tmp_path)):
            await asyncio.sleep(0.02)
    await servers.stop(1)
    assert list(tmp_path.iterdir()) == []
