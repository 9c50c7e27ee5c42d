"""Two real replicas over Ray that copy a prefix from one to the other, rank by rank."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import ray
from factories import make_llama
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.protos.messages import ClusterState, ReplicaStatus, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 60.0
NUM_RUNNING = 1  # as many fit into a replica: one that is full takes no more
# of a thousand, in whole strides of the route chain
NUM_MOVED = 768
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=700, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with more in it: computing a thousand tokens takes longer than copying."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "slow")
    make_llama(
        folder,
        vocab_size=260,
        eos_token_id=0,
        max_position=2048,
        hidden_size=256,
        num_layers=8,
    )
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)])
def cluster(
    request: pytest.FixtureRequest, ray_cluster: None, slow_model: Path
) -> Iterator[object]:
    """Two replicas of one rank or of two, each rank with its own half of every block."""
    from pagefleet.cluster.config import ClusterConfig, NamedModel
    from pagefleet.cluster.serve import started_cluster

    config = ClusterConfig(
        models=(NamedModel(str(slow_model), "slow"),),
        replicas=2,
        tp=request.param,
        grpc_port=0,
        http_port=0,
        num_blocks=400,
        host_memory=256 << 20,
        max_model_len=2048,
        max_num_seqs=NUM_RUNNING,
        deterministic=True,
    )
    with started_cluster(config, on_progress=print) as running:
        yield running


def wait_for(
    cluster, condition: Callable[[dict[str, ReplicaStatus]], object]
) -> dict[str, ReplicaStatus]:
    """The replicas, once they are as they should be."""
    deadline = time.monotonic() + WAIT_S
    while True:
        state: ClusterState = ray.get(cluster.controller.cluster_state.remote(), timeout=WAIT_S)
        replicas = {status.replica_id: status for status in state.replicas}
        if condition(replicas):
            return replicas
        assert time.monotonic() < deadline, replicas
        time.sleep(0.05)  # between two looks at another process


def are_settled(replicas: dict[str, ReplicaStatus]) -> bool:
    return len(replicas) == 2 and all(
        status.state == "ready"
        and not status.num_running + status.num_waiting + status.leased_blocks
        and status.device.referenced == status.device.fenced == 0
        and status.host.referenced == status.host.fenced == 0
        for status in replicas.values()
    )


@asynccontextmanager
async def full_replica(cluster, prompt: str) -> AsyncIterator[tuple[str, list[asyncio.Task]]]:
    """The replica that holds the prompt, as full as it can be with requests for more of it."""

    async def read(client: AsyncClient) -> tuple[int, ...]:
        tokens: list[int] = []
        async with aclosing(client.stream(prompt, LONG)) as parts:
            async for part in parts:
                for output in part.outputs:
                    tokens += output.token_ids
        return tuple(tokens)

    async with AsyncClient(cluster.addresses.grpc) as client:
        tasks = [asyncio.create_task(read(client)) for _ in range(NUM_RUNNING)]

        def is_full(replicas: dict[str, ReplicaStatus]) -> bool:
            return any(status.num_running == NUM_RUNNING for status in replicas.values())

        replicas = await asyncio.to_thread(wait_for, cluster, is_full)
        (full,) = [r.replica_id for r in replicas.values() if r.num_running == NUM_RUNNING]
        try:
            yield full, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def make_prompt(subject: str) -> str:
    """A thousand tokens, each a byte."""
    return (f"{subject}: all that is known of them. " * 60)[:1000]


def ask(cluster, prompt: str):
    with Client(cluster.addresses.grpc) as client:
        return client.generate(prompt, GREEDY).outputs[0]


def test_a_hot_prefix_is_served_by_the_other_replica(cluster) -> None:
    async def ask_beside_load(prompt: str) -> tuple[str, object]:
        async with full_replica(cluster, prompt) as (full, _):
            return full, await asyncio.to_thread(ask, cluster, prompt)

    for subject in ("blocks", "pools", "tiers"):  # a busy machine may copy too late, and recompute
        prompt = make_prompt(subject)
        first = ask(cluster, prompt)
        wait_for(cluster, are_settled)
        full, second = asyncio.run(ask_beside_load(prompt))
        assert full == first.usage.replica != second.usage.replica
        assert second.token_ids == first.token_ids
        replicas = wait_for(cluster, are_settled)
        if second.usage.cached_tokens:
            break
    assert second.usage.cached_tokens == NUM_MOVED
    moved = replicas[second.usage.replica]
    assert moved.transfers_offered >= moved.transfers.done == 1
    assert moved.transfers.blocks == NUM_MOVED // 16 and moved.transfers.bytes_per_s > 0.0
    ray.get(cluster.controller.check_integrity.remote(), timeout=WAIT_S)


def test_a_source_that_freezes_and_dies_costs_a_recompute(cluster) -> None:
    prompt = make_prompt("leases")
    first = ask(cluster, prompt)
    wait_for(cluster, are_settled)

    async def ask_a_dying_source() -> tuple[object, list[tuple[int, ...]]]:
        async with full_replica(cluster, prompt) as (full, streams):
            processes = await cluster.supervisor.processes.remote()
            os.kill(processes[full].pid, signal.SIGSTOP)
            asking = asyncio.create_task(asyncio.to_thread(ask, cluster, prompt))
            await asyncio.wait({asking}, timeout=0.1)  # it is being copied, or would be
            os.kill(processes[full].pid, signal.SIGKILL)
            return await asking, await asyncio.gather(*streams)

    second, streams = asyncio.run(ask_a_dying_source())
    assert second.token_ids == first.token_ids
    assert second.usage.replica != first.usage.replica and second.usage.cached_tokens == 0
    assert [tokens[: len(first.token_ids)] for tokens in streams] == [first.token_ids] * NUM_RUNNING
    assert {len(tokens) for tokens in streams} == {LONG.max_tokens}
    wait_for(cluster, are_settled)
    ray.get(cluster.controller.check_integrity.remote(), timeout=WAIT_S)


def test_a_replica_that_drains_leaves_its_hot_prefixes_behind(cluster) -> None:
    wait_for(cluster, are_settled)
    prompt = make_prompt("drains")
    first = ask(cluster, prompt)
    wait_for(cluster, are_settled)
    gone = first.usage.replica
    with Client(cluster.addresses.grpc) as client:
        client.drain(gone, 20.0)
    wait_for(cluster, lambda replicas: gone not in replicas)
    second = ask(cluster, prompt)
    assert second.usage.replica != gone
    assert second.token_ids == first.token_ids
    assert second.usage.cached_tokens >= 16 * (1000 // 16 - 1)
