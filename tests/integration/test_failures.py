"""A worker that dies mid-stream: its clients see exactly the tokens of an undisturbed run."""

import psutil
import pytest
import ray

from pagefleet.cluster.client import Client
from pagefleet.protos.messages import SamplingParams

pytestmark = pytest.mark.ray

NUM_TOKENS = 300


def kill_process_behind(address: str) -> None:
    """SIGKILL to whoever listens at host:port."""
    port = int(address.rpartition(":")[2])
    owners = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    (pid,) = owners
    psutil.Process(pid).kill()


def running_replica(client: Client) -> str:
    """The replica that has reported a running request; only one is running."""
    while True:
        for replica in client.cluster_state().replicas:
            if replica.num_running:
                return replica.replica_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_worker_costs_its_clients_nothing(
    cluster, client: Client, settled_state, temperature: float
):
    sampling = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=temperature, seed=11, ignore_eos=True
    )
    prompt = f"An undisturbed run at temperature {temperature}"
    expected = client.generate(prompt, sampling).outputs[0]
    settled_state()
    infos = ray.get(cluster.supervisor.infos.remote())
    addresses = {info.replica_id: info.address for info in infos}
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
            killed = running_replica(client)
            kill_process_behind(addresses[killed])
    assert tokens == list(expected.token_ids)
    assert text == expected.text
    assert usage is not None
    assert usage.resumes >= 1
    assert usage.replica != killed
    settled_state()  # the supervisor has put another in its place
