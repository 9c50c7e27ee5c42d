"""Processes that die or freeze under load: every client gets exactly the tokens it would have got.

Each test leaves the cluster as it found it: two ready replicas, every block clean or cached-idle,
no lease, no request.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from failure_load import (
    NUM_STREAMS,
    NUM_TOKENS,
    Load,
    StreamResult,
    make_questions,
    run_through,
)
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.protos.errors import InvalidArgument, ModelNotFound, Unavailable
from pagefleet.protos.messages import FinishReason, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

WAIT_S = 120.0
MODELS = ("tiny", "other")
# A silence that a client may see: the watchdog's 5 s, 10 s more, and what a loaded machine takes.
MAX_SILENCE_S = 30.0


def address(cluster) -> str:
    """Of its gateway."""
    return cluster.addresses.grpc


def signal_worker(cluster, replica_id: str, number: int) -> None:
    """To the process of a replica's leader."""
    deadline = time.monotonic() + WAIT_S
    while True:  # the controller knows a replica a little earlier than the supervisor
        processes = ray.get(cluster.supervisor.processes.remote(), timeout=WAIT_S)
        if replica_id in processes:
            break
        assert time.monotonic() < deadline, f"{replica_id} is not among {processes}"
    os.kill(processes[replica_id].pid, number)


def kill_actor_process(class_name: str) -> int:
    """SIGKILL to the one process of this test's cluster that runs such an actor."""
    (process,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if " ".join(child.cmdline()).startswith(f"ray::{class_name}")
    ]
    process.kill()
    return process.pid


def busiest_replica(client: Client) -> str:
    """The replica that has reported the most running requests, once any has."""
    while True:
        replicas = client.cluster_state().replicas
        busiest = max(replicas, key=lambda replica: replica.num_running)
        if busiest.num_running:
            return busiest.replica_id


def wait_gone(client: Client, replica_id: str) -> None:
    """Until the controller knows the replica no more."""
    deadline = time.monotonic() + WAIT_S
    while replica_id in {replica.replica_id for replica in client.cluster_state().replicas}:
        assert time.monotonic() < deadline, client.cluster_state()
        time.sleep(0.05)  # between two looks at another process


@pytest.fixture(scope="module")
def undisturbed(cluster) -> list[StreamResult]:
    """What the 64 clients get when nothing happens."""

    results = asyncio.run(Load(make_questions()).run_on(address(cluster)))
    assert all(len(result.token_ids) == NUM_TOKENS for result in results)
    assert all(result.resumes == 0 for result in results)
    return results


@pytest.fixture
def check_nothing_left(cluster, settled_state) -> Callable[[], None]:
    """Every block free, every map empty, in the controller's books and in the gateway."""

    def check() -> None:
        state = settled_state()
        assert state.queued_requests == 0
        ray.get(cluster.controller.check_integrity.remote(), timeout=WAIT_S)
        assert ray.get(cluster.gateway.num_running.remote(), timeout=WAIT_S) == 0

    return check


def assert_same(results: list[StreamResult], undisturbed: list[StreamResult]) -> None:
    """Token by token, and nobody waited without end."""
    assert [result.answer for result in results] == [result.answer for result in undisturbed]
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    assert max(result.longest_gap_s for result in results) < MAX_SILENCE_S


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_c17_a_worker_killed_after_token_37_costs_its_client_nothing(
    cluster, client: Client, settled_state, temperature: float
):
    sampling = SamplingParams(max_tokens=300, temperature=temperature, seed=11, ignore_eos=True)
    prompt = f"An undisturbed run at temperature {temperature}"
    expected = client.generate(prompt, sampling).outputs[0]
    settled_state()
    tokens: list[int] = []
    text = ""
    usage = None
    killed = None
    for part in client.stream(prompt, sampling):
        for output in part.outputs:
            tokens += output.token_ids
            text += output.text
            usage = output.usage or usage
        if killed is None and len(tokens) >= 37:
            killed = busiest_replica(client)
            signal_worker(cluster, killed, signal.SIGKILL)
    assert tokens == list(expected.token_ids)
    assert text == expected.text
    assert usage is not None
    assert usage.resumes >= 1
    assert usage.replica != killed
    settled_state()  # the supervisor has put another in its place


@pytest.mark.slow
async def test_c17_64_streams_survive_a_killed_worker(
    cluster, client: Client, undisturbed, check_nothing_left
):
    async def kill() -> None:
        replica_id = await asyncio.to_thread(busiest_replica, client)
        await asyncio.to_thread(signal_worker, cluster, replica_id, signal.SIGKILL)

    results = await run_through(address(cluster), make_questions(), kill, after_tokens=800)
    assert_same(results, undisturbed)
    assert sum(result.resumes for result in results) >= 1
    await asyncio.to_thread(check_nothing_left)


@pytest.mark.slow
async def test_c20_64_streams_survive_a_frozen_worker(
    cluster, client: Client, undisturbed, check_nothing_left
):
    async def freeze() -> None:
        replica_id = await asyncio.to_thread(busiest_replica, client)
        await asyncio.to_thread(signal_worker, cluster, replica_id, signal.SIGSTOP)

    results = await run_through(address(cluster), make_questions(), freeze, after_tokens=800)
    assert_same(results, undisturbed)
    assert sum(result.resumes for result in results) >= 1
    await asyncio.to_thread(check_nothing_left)


@pytest.mark.slow
async def test_c19_requests_that_a_frozen_worker_was_given_end(
    cluster, client: Client, undisturbed, check_nothing_left
):
    """Granted and sent, never begun: both workers freeze before a request comes."""
    for replica in client.cluster_state().replicas:
        signal_worker(cluster, replica.replica_id, signal.SIGSTOP)
    load = Load(make_questions(8))
    async with AsyncClient(address(cluster)) as asking:
        ends = await asyncio.gather(
            *(load.run_one(asking, index) for index in range(8)), return_exceptions=True
        )
    for end, result, expected in zip(ends, load.results, undisturbed, strict=False):
        assert isinstance(end, Unavailable) or (end, result.answer) == (None, expected.answer)
        assert result.longest_gap_s < MAX_SILENCE_S
    await asyncio.to_thread(check_nothing_left)


@pytest.mark.slow
async def test_64_streams_do_not_notice_that_the_controller_dies(
    cluster, client: Client, undisturbed, check_nothing_left
):
    """Those that run go on; those that wait in its queue ask the next one, if it comes in time."""
    load = Load(make_questions())
    async with AsyncClient(address(cluster)) as asking:
        streams = [load.run_one(asking, index) for index in range(NUM_STREAMS)]
        running = asyncio.gather(*streams, return_exceptions=True)
        await load.wait_tokens(800)
        killed_at = time.monotonic()
        await asyncio.to_thread(kill_actor_process, "ControllerActor")
        begun = [index for index, result in enumerate(load.results) if result.token_ids]
        ends = await running
    for index, (end, result) in enumerate(zip(ends, load.results, strict=True)):
        if end is None:
            assert result.answer == undisturbed[index].answer
            assert result.resumes == 0
        else:
            assert index not in begun
            assert isinstance(end, Unavailable), end
            assert end.retry_after_s is not None
    await asyncio.to_thread(check_nothing_left)
    uptime_s = client.cluster_state().uptime_s
    assert uptime_s < time.monotonic() - killed_at, "it is another one"
    for status in cluster.state().replicas:
        assert status.indexed_device > 0, "it knows again what is cached where"


@pytest.mark.slow
async def test_64_streams_move_when_their_replica_is_drained(
    cluster, client: Client, undisturbed, check_nothing_left
):
    """Given no time to finish; the replica then goes for good."""
    spec = replace(cluster.specs[0], replica_id="another")
    await cluster.supervisor.add.remote(spec)
    num_restarts = await cluster.supervisor.num_restarts.remote()
    drained = ""

    async def drain() -> None:
        nonlocal drained
        drained = await asyncio.to_thread(busiest_replica, client)
        assert await cluster.supervisor.drain.remote(drained, 0.0)

    results = await run_through(address(cluster), make_questions(), drain, after_tokens=800)
    assert_same(results, undisturbed)
    assert sum(result.resumes for result in results) >= 1
    await asyncio.to_thread(check_nothing_left)
    await asyncio.to_thread(wait_gone, client, drained)
    assert await cluster.supervisor.num_restarts.remote() == num_restarts


@pytest.mark.slow
async def test_c1_c5_a_session_goes_on_and_nothing_of_a_dead_cache_is_believed(
    cluster, client: Client, settled_state
):
    prompt = "A session with a long beginning that fills some blocks of a worker's cache. " * 3
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    first = client.generate(prompt, sampling).outputs[0]
    settled_state()
    before = {status.replica_id: status for status in cluster.state().replicas}
    again = client.generate(prompt, sampling).outputs[0]
    assert again.usage.replica == first.usage.replica, "the session sticks to its cache"
    assert again.usage.cached_tokens > 0
    home = first.usage.replica
    signal_worker(cluster, home, signal.SIGKILL)
    (turn,) = client.generate(prompt, sampling).outputs
    assert turn.token_ids == first.token_ids
    assert turn.usage.replica != home, "re-bound at once"
    settled_state()
    after = {status.replica_id: status for status in cluster.state().replicas}
    assert after[home].incarnation != before[home].incarnation
    assert (after[home].indexed_device, after[home].device.cached_idle) == (0, 0)
    other = client.generate(prompt, sampling).outputs[0]
    assert other.token_ids == first.token_ids
    assert (other.usage.cached_tokens > 0) == (other.usage.replica != home)


async def run_again(load: Load, address: str, indices: list[int]) -> None:
    """What a client does: it asks again, with what it has, until somebody listens again."""
    deadline = time.monotonic() + WAIT_S
    async with AsyncClient(address) as through:
        while indices:
            ends = await asyncio.gather(
                *(load.run_one(through, index) for index in indices), return_exceptions=True
            )
            failed = [(index, end) for index, end in zip(indices, ends, strict=True) if end]
            assert all(isinstance(end, Unavailable) for _, end in failed), failed
            assert time.monotonic() < deadline, failed
            indices = [index for index, _ in failed]


@pytest.mark.slow
async def test_a_killed_gateway_comes_back_on_its_ports_and_its_clients_go_on(
    cluster, client: Client, undisturbed, check_nothing_left
):
    """Its sequences end by themselves, and its leases come back."""
    load = Load(make_questions(16))
    async with AsyncClient(address(cluster)) as through:
        running = asyncio.gather(
            *(load.run_one(through, index) for index in range(16)), return_exceptions=True
        )
        await load.wait_tokens(300)
        await asyncio.to_thread(kill_actor_process, "GatewayActor")
        ends = await running
    broken = [index for index, end in enumerate(ends) if end is not None]
    assert broken
    assert all(isinstance(ends[index], Unavailable) for index in broken), ends
    await run_again(load, address(cluster), broken)
    for result, expected in zip(load.results, undisturbed, strict=False):
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
    await asyncio.to_thread(check_nothing_left)
    assert client.generate("It is the same address", SamplingParams(max_tokens=3)).outputs


@pytest.mark.slow
async def test_c28_two_models_on_one_controller_do_not_mix(
    cluster, client: Client, check_nothing_left, tmp_path: Path
):
    """Another model comes, is asked the same, and goes again, drained as an operator does it."""
    folder = make_tiny_model(tmp_path / "other", scale=1.5)
    spec = cluster.specs[0]
    config = replace(spec.config, model=str(folder))
    info = await cluster.supervisor.add.remote(
        replace(spec, replica_id="other-0", model="other", config=config)
    )
    assert info.model == "other"
    questions = make_questions(16, num_tokens=40)
    alone = {model: await Load(questions).run_on(address(cluster), model) for model in MODELS}
    both = await asyncio.gather(
        *(Load(questions).run_on(address(cluster), model) for model in MODELS)
    )
    for model, results in zip(MODELS, both, strict=True):
        assert [result.answer for result in results] == [r.answer for r in alone[model]]
        assert {result.replica == "other-0" for result in results} == {model == "other"}
    assert [r.answer for r in alone["tiny"]] != [r.answer for r in alone["other"]]
    assert {model.id for model in client.models()} == set(MODELS)
    with pytest.raises(InvalidArgument, match="several are served"):
        client.generate("Whom?", SamplingParams(max_tokens=1))
    client.drain("other-0", 5.0)
    await asyncio.to_thread(wait_gone, client, "other-0")
    with pytest.raises((ModelNotFound, Unavailable)):
        client.generate("Gone?", SamplingParams(max_tokens=1), model="other")
    await asyncio.to_thread(check_nothing_left)
