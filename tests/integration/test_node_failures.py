"""A node that is lost, and Ray's own head process: a cluster of several nodes on this machine.

`pagefleet serve --address` joins a Ray cluster that the test owns, as it would a real one.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from failure_load import NUM_TOKENS, Load, make_questions, run_through

from pagefleet.cluster.client import Client
from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.errors import Unavailable
from pagefleet.protos.messages import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(540)]

PAGEFLEET = str(Path(sys.executable).parent / "pagefleet")
WAIT_S = 180.0
# Ray's own default finds a lost node after 15 s; with less than this a busy machine loses nodes.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


@pytest.fixture
def make_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., object]]:
    """Starts a head without CPUs, so that replicas are on the other nodes only."""
    from ray.cluster_utils import Cluster

    started: list[Cluster] = []

    def make(**environment: str) -> Cluster:
        for name, value in (HEALTH_CHECKS | environment).items():
            monkeypatch.setenv(name, value)
        head = {"num_cpus": 0, "object_store_memory": 80 * 2**20}
        started.append(Cluster(initialize_head=True, head_node_args=head))
        return started[-1]

    yield make
    for cluster in started:
        cluster.shutdown()


def add_node(cluster, num_cpus: int = 1):
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=80 * 2**20)


@contextlib.contextmanager
def serving(cluster, model: Path) -> Iterator[dict]:
    """`pagefleet serve` on the cluster; its facts. Ended as a user ends it."""
    command = [
        *(PAGEFLEET, "serve", "--json", "--address", cluster.address, "--model", str(model)),
        *("--replicas", "2", "--num-blocks", "256", "--max-model-len", "1024", "--deterministic"),
        *("--grpc-port", "0", "--http-port", "0"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_state(
    client: Client, is_reached: Callable[[pb.GetClusterStateResponse], bool]
) -> pb.GetClusterStateResponse:
    """Wait for it, also while the controller restarts."""
    deadline = time.monotonic() + WAIT_S
    state = None
    while state is None or not is_reached(state):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)  # between two looks at another process
        with contextlib.suppress(Unavailable):
            state = client.cluster_state()
    return state


def is_idle(state: pb.GetClusterStateResponse) -> bool:
    return not state.queued_requests and all(
        not (r.num_running or r.num_waiting or r.leased_blocks or r.device.referenced)
        for r in state.replicas
    )


def ready_replicas(state: pb.GetClusterStateResponse) -> list[str]:
    return sorted(r.replica_id for r in state.replicas if r.state == "ready")


async def test_c3_a_node_that_is_removed_takes_no_stream_with_it(make_nodes, tiny_model: Path):
    nodes = make_nodes()
    workers = [add_node(nodes), add_node(nodes)]
    with serving(nodes, tiny_model) as facts, Client(facts["grpc"]) as client:
        node_of = {r.replica_id: r.node_id for r in client.cluster_state().replicas}
        assert set(node_of.values()) == {node.node_id for node in workers}
        prompt = "The prefix that the lost node had in its cache, long enough for some blocks. " * 2
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        lost = client.generate(prompt, sampling).outputs[0].usage.replica
        lost_node = next(node for node in workers if node.node_id == node_of[lost])
        # A replica outlives its node's raylet by a moment: answers must be longer than that.
        questions = make_questions(32, 2 * NUM_TOKENS)
        expected = await Load(questions).run_on(facts["grpc"])

        async def remove() -> None:
            await asyncio.to_thread(nodes.remove_node, lost_node, allow_graceful=False)

        results = await run_through(facts["grpc"], questions, remove, after_tokens=400)
        assert [result.answer for result in results] == [result.answer for result in expected]
        assert sum(result.resumes for result in results) >= 1
        (other,) = set(node_of) - {lost}
        wait_state(client, lambda state: ready_replicas(state) == [other] and is_idle(state))
        for _ in range(50):
            usage = client.generate(prompt, sampling).outputs[0].usage
            assert (usage.replica, usage.resumes) == (other, 0)
        wait_state(client, lambda state: [r.replica_id for r in state.replicas] == [other])
        add_node(nodes)  # here: Ray takes signals meanwhile, which only the main thread may
        wait_state(client, lambda state: ready_replicas(state) == sorted(node_of))
        assert [r.answer for r in await Load(questions[:8]).run_on(facts["grpc"])] == [
            result.answer for result in expected[:8]
        ]
        wait_state(client, is_idle)


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int | None]:
    """A Redis for Ray's head to keep its tables in; None where there is no such program."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield port
        process.terminate()


async def test_c23_streams_do_not_notice_that_rays_head_process_dies(
    make_nodes, tiny_model: Path, redis_port: int | None
):
    nodes = make_nodes(**({"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}"} if redis_port else {}))
    add_node(nodes, num_cpus=2)
    with serving(nodes, tiny_model) as facts, Client(facts["grpc"]) as client:
        expected = await Load(make_questions(32)).run_on(facts["grpc"])

        async def kill() -> None:
            await asyncio.to_thread(nodes.head_node.kill_gcs_server)

        results = await run_through(facts["grpc"], make_questions(32), kill, after_tokens=400)
        assert [result.answer for result in results] == [result.answer for result in expected]
        assert sum(result.resumes for result in results) == 0
        # Known workers and the controller are reached without the head process.
        again = await Load(make_questions(8)).run_on(facts["grpc"])
        assert [result.answer for result in again] == [result.answer for result in expected[:8]]
        wait_state(client, is_idle)
        if redis_port is not None:
            await check_recovery(nodes, facts, client, expected)


async def check_recovery(nodes, facts: dict, client: Client, expected: list) -> None:
    """With the head process back, controller and replicas can be restarted as before."""
    nodes.head_node.start_gcs_server()
    (controller,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or ()).startswith("ray::ControllerActor")
        and process.environ().get("RAY_REDIS_ADDRESS") == os.environ["RAY_REDIS_ADDRESS"]
    )

    async def kill() -> None:
        controller.kill()

    results = await run_through(facts["grpc"], make_questions(32), kill, after_tokens=400)
    assert [result.answer for result in results] == [result.answer for result in expected]
    wait_state(client, lambda state: len(ready_replicas(state)) == 2 and is_idle(state))
    explained = client.explain(make_questions()[0].prompt, SamplingParams(max_tokens=1))
    assert any(replica.hit_tokens for replica in explained.replicas), "it has learnt it all again"
