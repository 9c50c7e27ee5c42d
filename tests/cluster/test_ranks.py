"""A replica of two ranks on a real Ray cluster: it serves, loses a rank, and comes back whole."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from engine_fakes import make_request
from model_driver import load_runner, serve
from tiny_model import make_tiny_model

from pagefleet.cluster.controller_actor import start_controller
from pagefleet.cluster.engine_client import EngineClient
from pagefleet.cluster.replica import ReplicaSpec
from pagefleet.cluster.supervisor_actor import create_supervisor
from pagefleet.protos.messages import Lease, ReplicaInfo
from pagefleet.workers import shared_memory_group
from pagefleet.workers.config import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

WAIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def supervisor(model: Path) -> Iterator[ray.actor.ActorHandle]:
    """One replica of two ranks; each test leaves it serving."""
    controller = start_controller()
    config = WorkerConfig(str(model), num_blocks=128, num_threads=1, deterministic=True)
    handle = create_supervisor([ReplicaSpec("r0", "tiny", config, num_ranks=2)], controller)
    ray.get(handle.start.remote(), timeout=WAIT_S)
    yield handle
    ray.get(handle.stop.remote(1.0), timeout=WAIT_S)
    assert not pids_of("RankWorker")
    assert not list(shared_memory_group.DIRECTORY.glob("pagefleet-ranks-*"))
    ray.kill(handle)
    ray.kill(controller)


def pids_of(actor: str) -> set[int]:
    """Processes of this session's own cluster in which an actor of this class runs."""
    found: set[int] = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(f"ray::{actor}"):
                found.add(process.pid)
    return found


async def wait_replaced(supervisor: ray.actor.ActorHandle, old: ReplicaInfo) -> ReplicaInfo:
    async with asyncio.timeout(WAIT_S):
        while True:
            for info in await supervisor.infos.remote():
                if info.incarnation != old.incarnation:
                    return info
            await asyncio.sleep(0.05)


async def read_all(info: ReplicaInfo, key: str) -> list[int]:
    request = make_request(key, num_prompt=20, max_tokens=30, ignore_eos=True, prompt=range(9, 29))
    lease = Lease(
        1, "k", 0, info.replica_id, info.incarnation, info.address, info.stream_secret, 8, 0, 10.0
    )
    client = EngineClient("gw")
    stream = client.submit(lease, request)
    tokens: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            for delta in await stream.next_deltas():
                assert not delta.error, delta
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    stream.close(cancel=False)
                    await client.close()
                    return tokens


async def test_two_ranks_serve_what_one_does(
    supervisor: ray.actor.ActorHandle, model: Path
) -> None:
    (info,) = await supervisor.infos.remote()
    assert len(pids_of("RankWorker")) == 1
    assert info.num_blocks == 128
    request = make_request("a", num_prompt=20, max_tokens=30, ignore_eos=True, prompt=range(9, 29))
    (expected,) = serve(load_runner(model), [request]).values()
    assert await read_all(info, "a") == expected.token_ids


@pytest.mark.parametrize("victim", [pytest.param("RankWorker", marks=pytest.mark.slow), "Worker"])
async def test_a_killed_rank_brings_a_new_incarnation_and_leaves_no_process(
    supervisor: ray.actor.ActorHandle, victim: str
) -> None:
    """Also while nothing runs, so that no collective could notice."""
    (info,) = await supervisor.infos.remote()
    expected = await read_all(info, "before")
    processes = pids_of("RankWorker") | pids_of("Worker")
    assert len(processes) == 2
    for pid in pids_of(victim):
        os.kill(pid, signal.SIGKILL)
    replacement = await wait_replaced(supervisor, info)
    assert not processes & (pids_of("RankWorker") | pids_of("Worker"))
    assert await read_all(replacement, "after") == expected
