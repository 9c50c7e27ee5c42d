"""A replica on a real Ray cluster: it serves a stream, and dies and comes back."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from engine_fakes import make_request
from tiny_model import make_tiny_model

from pagefleet.cluster.controller_actor import start_controller
from pagefleet.cluster.engine_client import EngineClient, ReplicaLost
from pagefleet.cluster.replica import ReplicaFailed, ReplicaSpec
from pagefleet.cluster.supervisor_actor import create_supervisor
from pagefleet.protos.messages import ClusterState, Lease, ReplicaInfo, ReplicaState
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.process_identity import ProcessIdentity, is_alive

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

WAIT_S = 120.0


@dataclass
class Cluster:
    """A controller, a supervisor and what it keeps; the test asks them directly."""

    controller: ray.actor.ActorHandle
    supervisor: ray.actor.ActorHandle

    def infos(self) -> tuple[ReplicaInfo, ...]:
        return ray.get(self.supervisor.infos.remote(), timeout=WAIT_S)

    def state(self) -> ClusterState:
        return ray.get(self.controller.cluster_state.remote(), timeout=WAIT_S)

    def process(self) -> ProcessIdentity:
        return ray.get(self.supervisor.processes.remote(), timeout=WAIT_S)["r0"]

    async def wait_ready(self, other_than: str = "") -> ReplicaInfo:
        """Wait until an incarnation serves, another one if asked, and the controller knows."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(ray.exceptions.RayActorError):  # it restarts
                    for status in self.state().replicas:
                        if status.incarnation != other_than and status.state is ReplicaState.READY:
                            infos = self.infos()
                            if infos and infos[0].incarnation == status.incarnation:
                                return infos[0]
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """One replica for all tests of this file; each leaves it serving."""
    controller = start_controller()
    config = WorkerConfig(str(model), num_blocks=128, num_threads=1, deterministic=True)
    supervisor = create_supervisor([ReplicaSpec("r0", "tiny", config)], controller)
    (info,) = ray.get(supervisor.start.remote(), timeout=WAIT_S)
    assert info.replica_id == "r0"
    cluster = Cluster(controller, supervisor)
    yield cluster
    process = cluster.process()
    ray.get(supervisor.stop.remote(1.0), timeout=WAIT_S)
    assert not is_alive(process)
    ray.kill(supervisor)
    ray.kill(controller)


def make_lease(info: ReplicaInfo) -> Lease:
    return Lease(
        1, "k", 0, info.replica_id, info.incarnation, info.address, info.stream_secret, 8, 0, 10.0
    )


async def read_all(client: EngineClient, info: ReplicaInfo, key: str) -> list[int]:
    request = make_request(key, num_prompt=20, max_tokens=30, ignore_eos=True, prompt=range(9, 29))
    stream = client.submit(make_lease(info), request)
    tokens: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            for delta in await stream.next_deltas():
                assert not delta.error, delta
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    stream.close(cancel=False)
                    return tokens


async def test_a_registered_replica_serves_streams(cluster: Cluster) -> None:
    (info,) = cluster.infos()
    (status,) = cluster.state().replicas
    assert (status.incarnation, status.address) == (info.incarnation, info.address)
    assert status.device.total == 128
    assert not info.address.startswith("0.0.0.0")
    assert info.prefill_tokens_per_s > 0
    client = EngineClient("gw")
    tokens = await read_all(client, info, "a")
    assert len(tokens) == 30
    assert await read_all(client, info, "b") == tokens
    await client.close()


async def test_a_controller_that_restarts_knows_the_replica_again(cluster: Cluster) -> None:
    """The same incarnation goes on; its streams do not notice."""
    (info,) = cluster.infos()
    client = EngineClient("gw")
    before = await read_all(client, info, "before")
    ray.kill(cluster.controller, no_restart=False)
    assert await read_all(client, info, "meanwhile") == before
    again = await cluster.wait_ready()
    assert again == info
    (status,) = cluster.state().replicas
    assert status.device.cached_idle > 0
    assert status.indexed_device > 0
    await client.close()


@pytest.mark.slow
async def test_a_frozen_controller_is_replaced(cluster: Cluster) -> None:
    """The supervisor ends it, and Ray starts another; the replica stays as it is."""
    (info,) = cluster.infos()
    (process,) = (
        child
        for child in psutil.Process().children(recursive=True)
        if " ".join(child.cmdline()).startswith("ray::ControllerActor")
    )
    process.suspend()
    assert not (await asyncio.to_thread(psutil.wait_procs, [process], WAIT_S))[1]
    assert await cluster.wait_ready() == info


async def test_a_killed_replica_comes_back_as_another_incarnation(cluster: Cluster) -> None:
    (info,) = cluster.infos()
    client = EngineClient("gw")
    expected = await read_all(client, info, "before")
    process = cluster.process()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ReplicaLost):
        await read_all(client, info, "lost")
    replacement = await cluster.wait_ready(other_than=info.incarnation)
    assert replacement.incarnation != info.incarnation
    assert replacement.stream_secret != info.stream_secret
    assert cluster.process() != process
    assert await read_all(client, replacement, "after") == expected
    await client.close()


@pytest.mark.slow
async def test_a_frozen_replica_declared_dead_is_killed_for_certain(cluster: Cluster) -> None:
    """A stopped process raises nothing in Ray and obeys no request to exit."""
    (info,) = cluster.infos()
    process = cluster.process()
    os.kill(process.pid, signal.SIGSTOP)
    replacement = await cluster.wait_ready(other_than=info.incarnation)
    assert not is_alive(process)
    client = EngineClient("gw")
    assert len(await read_all(client, replacement, "after")) == 30
    await client.close()


def test_a_model_that_cannot_be_loaded_is_told(cluster: Cluster, tmp_path: Path) -> None:
    config = WorkerConfig(str(tmp_path / "nothing"), num_blocks=8)
    supervisor = create_supervisor([ReplicaSpec("bad", "bad", config)], cluster.controller)
    with pytest.raises(ray.exceptions.RayTaskError) as failure:
        ray.get(supervisor.start.remote(), timeout=WAIT_S)
    assert isinstance(failure.value.cause, ReplicaFailed)
    assert "nothing" in str(failure.value.cause)
    ray.get(supervisor.stop.remote(), timeout=WAIT_S)
    ray.kill(supervisor)
