"""One real cluster for all integration tests: Ray, two replicas of a tiny model, a gateway."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from pagefleet.protos import inference_pb2 as pb

MODEL = "tiny"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def cluster(ray_cluster: None, tiny_model: Path) -> Iterator[object]:
    """Deterministic, so that what two replicas say can be compared token by token."""
    # here, because Ray takes a second to import
    from pagefleet.cluster.config import ClusterConfig, NamedModel
    from pagefleet.cluster.serve import started_cluster

    config = ClusterConfig(
        models=(NamedModel(str(tiny_model), MODEL),),
        replicas=2,
        grpc_port=0,
        http_port=0,
        num_blocks=256,
        max_model_len=1024,
        deterministic=True,
    )
    with started_cluster(config, on_progress=print) as running:
        yield running


@pytest.fixture
def client(cluster) -> Iterator[object]:
    from pagefleet.cluster.client import Client

    with Client(cluster.addresses.grpc) as connected:
        yield connected


@pytest.fixture
def settled_state(client) -> Callable[[], pb.GetClusterStateResponse]:
    """Waits until two replicas are ready and idle, and answers the state; fails after 2 min."""

    def is_settled(state: pb.GetClusterStateResponse) -> bool:
        ready = [replica for replica in state.replicas if replica.state == "ready"]
        return len(ready) == 2 and all(
            not (replica.num_running or replica.num_waiting or replica.leased_blocks)
            and not (replica.device.referenced or replica.device.fenced)
            for replica in ready
        )

    def wait() -> pb.GetClusterStateResponse:
        deadline = time.monotonic() + 120.0
        while not is_settled(state := client.cluster_state()):
            assert time.monotonic() < deadline, f"blocks or leases are left: {state}"
            time.sleep(0.05)  # between two looks at another process
        return state

    return wait
