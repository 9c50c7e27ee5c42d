"""`pagefleet probe`: what fails it, and what must not."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from pagefleet.cluster.config import CommandError
from pagefleet.cluster.main import app
from pagefleet.cluster.probe_command import probe_alive, probe_raylet, probe_ready, wait_idle
from pagefleet.workers.heartbeat import Heartbeat, Pulse


def beat(folder: Path, name: str, pulse: Pulse, at: float = 0.0) -> None:
    Heartbeat(folder, name, lambda: at).beat(pulse)


def test_nothing_that_runs_is_alive(tmp_path: Path):
    assert "nothing" in probe_alive(tmp_path / "missing", 60.0)


def test_busy_parts_are_alive(tmp_path: Path):
    beat(tmp_path, "gateway-1", Pulse(5, 100))
    beat(tmp_path, "replica-0", Pulse(9, 64))
    assert probe_alive(tmp_path, 60.0, now=30.0) == (
        "gateway-1 is busy with 100, replica-0 is busy with 64"
    )


def test_one_stuck_part_fails_the_probe(tmp_path: Path):
    beat(tmp_path, "gateway-1", Pulse(5, 0), at=90.0)
    beat(tmp_path, "replica-0", Pulse(9, 64), at=0.0)
    with pytest.raises(CommandError, match="replica-0"):
        probe_alive(tmp_path, 60.0, now=100.0)


@pytest.mark.parametrize("is_ready", [True, False])
def test_readiness_is_the_gateways(tmp_path: Path, is_ready: bool):
    beat(tmp_path, "replica-0", Pulse(0, 0))
    beat(tmp_path, "gateway-1", Pulse(0, 0, is_ready=is_ready))
    if is_ready:
        assert "gateway-1" in probe_ready(tmp_path)
    else:
        with pytest.raises(CommandError, match="no gateway here is ready"):
            probe_ready(tmp_path)


def test_a_pod_goes_once_its_gateway_carries_nothing(tmp_path: Path):
    beat(tmp_path, "replica-0", Pulse(0, 8))  # its streams go on elsewhere
    beat(tmp_path, "gateway-1", Pulse(0, 1))
    assert "no gateway" in wait_idle(
        tmp_path, 900.0, sleep=lambda _: beat(tmp_path, "gateway-1", Pulse(1, 0))
    )


def test_a_pod_does_not_stay_for_ever(tmp_path: Path):
    beat(tmp_path, "gateway-1", Pulse(0, 3))
    now = iter(range(1000))
    with pytest.raises(CommandError, match="3 requests still run after 10 s"):
        wait_idle(tmp_path, 10.0, clock=lambda: float(next(now)), sleep=lambda _: None)


class Agent(BaseHTTPRequestHandler):
    """Ray's agent, as far as the probe asks it."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/api/local_raylet_healthz" else 404)
        self.end_headers()
        self.wfile.write(b"told")

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.mark.parametrize("status", [200, 503])
def test_rays_agent_is_asked(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Agent, "status", status)
    with HTTPServer(("127.0.0.1", 0), Agent) as server:
        Thread(target=server.handle_request, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        if status == 200:
            assert "healthy" in probe_raylet(address)
        else:
            with pytest.raises(CommandError, match="503: told"):
                probe_raylet(address)
    with pytest.raises(CommandError, match="does not answer"):
        probe_raylet(address)


def test_the_command_needs_to_know_where_to_look():
    result = CliRunner().invoke(app, ["probe"], env={"PAGEFLEET_HEARTBEATS": None})
    assert isinstance(result.exception, CommandError)


def test_the_command_looks_where_the_parts_write(tmp_path: Path):
    beat(tmp_path, "gateway-1", Pulse(0, 0))
    environment = {"PAGEFLEET_HEARTBEATS": str(tmp_path)}
    assert CliRunner().invoke(app, ["probe", "--ready"], env=environment).exit_code == 0
    assert CliRunner().invoke(app, ["probe", "--until-idle", "1"], env=environment).exit_code == 0
