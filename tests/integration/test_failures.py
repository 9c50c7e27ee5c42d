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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_worker_costs_its_clients_nothing(
    cluster, client: Client, settled_state, temperature: float
):
    sampling = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=temperature, seed=11, ignore_eos=True
    )
    prompt = f"An undisturbed run at temperature {temperature}"
    expected = client.generate(prompt, sampling).outputs[0]
    infos = {info.replica_id: info for info in ray.get(cluster.supervisor.infos.remote())}

    tokens: list[int] = []
    text = ""
    usage = None
    for part in client.stream(prompt, sampling):
        for output in part.outputs:
            was_short = len(tokens) < 37
            tokens += output.token_ids
            text += output.text
            usage = output.usage or usage
            if was_short and len(tokens) >= 37:
                # equal prompts go to the same replica: its blocks are there
                kill_process_behind(infos[expected.usage.replica].address)
    assert tokens == list(expected.token_ids)
    assert text == expected.text
    assert usage is not None
    assert usage.resumes >= 1
    assert usage.replica != expected.usage.replica
    settled_state()  # the supervisor has put another in its place
