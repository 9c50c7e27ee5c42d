"""What `pagefleet serve` prints, with a cluster that is none."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from tiny_model import make_tiny_model

from pagefleet.cluster import serve_command
from pagefleet.cluster.config import ClusterConfig, NamedModel
from pagefleet.cluster.gateway_addresses import GatewayAddresses
from pagefleet.cluster.serve import OnProgress


class FakeCluster:
    addresses = GatewayAddresses("127.0.0.1:1", "127.0.0.1:2")
    replicas = ()

    def check(self) -> None:
        raise KeyboardInterrupt  # as a signal does


@contextmanager
def noisy_cluster(config: ClusterConfig, on_progress: OnProgress) -> Iterator[FakeCluster]:
    print("(raylet) A worker died")
    yield FakeCluster()
    print("(raylet) Another one")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whose signals these are, after the test as before it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_only_the_announcement_comes_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(serve_command, "running_cluster", noisy_cluster)
    monkeypatch.setattr(serve_command, "_CHECK_PERIOD_S", 0.0)
    config = ClusterConfig((NamedModel(str(make_tiny_model(tmp_path / "tiny")), "tiny"),))
    serve_command.serve(config, Console(), as_json=True)
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout)["grpc"] == "127.0.0.1:1"
    assert "A worker died" in stderr
