"""The CPU demo's Serve config, run by Ray Serve itself on a Ray node like one of its workers."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes_checks import Manifest, of_kind, ray_cluster, rendered
from tiny_model import make_tiny_model

from pagefleet.cluster.client import Client, SamplingParams
from pagefleet.protos.errors import PagefleetError

BIN = Path(sys.executable).parent
START_S = 200.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def heartbeats(tmp_path: Path) -> Path:
    return tmp_path / "beats"


@pytest.fixture
def config(tmp_path: Path) -> Manifest:
    """As the manifest has it, but for the model, its size and the ports."""
    (service,) = of_kind(rendered("kustomize/cpu-demo"), "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    model = make_tiny_model(tmp_path / "tiny")
    config["applications"][0]["args"] |= {
        "model": str(model),
        "host": "127.0.0.1",
        "http_port": free_port(),
        "grpc_port": free_port(),
        "num_cpus": 1,
        "kv_memory": "64MiB",
    }
    return config


@pytest.fixture
def environment(heartbeats: Path) -> dict[str, str]:
    """What the operator and the manifest give each pod: Ray's token is asked for."""
    cluster = ray_cluster(rendered("kustomize/cpu-demo"))
    (group,) = cluster["workerGroupSpecs"]
    given = {v["name"]: v["value"] for v in group["template"]["spec"]["containers"][0]["env"]}
    given |= {
        "RAY_AUTH_MODE": cluster["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # nothing is worth waiting for
        "PAGEFLEET_HEARTBEATS": str(heartbeats),
    }
    return os.environ | given


@pytest.fixture
def ray_address(environment: dict[str, str]) -> Iterator[str]:
    """A node with the worker group's own resources."""
    (group,) = ray_cluster(rendered("kustomize/cpu-demo"))["workerGroupSpecs"]
    resources = group["rayStartParams"]["resources"]
    folder = tempfile.mkdtemp(prefix="pf-", dir="/tmp")  # its sockets need a short path
    port = free_port()
    flags = f"--head --block --port={port} --num-cpus=2 --resources={resources}"
    flags += f" --temp-dir={folder} --include-dashboard=false --object-store-memory=100000000"
    flags += f" --dashboard-agent-listen-port={free_port()} --ray-client-server-port={free_port()}"
    command = ["bash", "-c", f"exec {BIN}/ray start {flags}"]  # as the operator does
    node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_demo_answers(
    config: Manifest,
    ray_address: str,
    environment: dict[str, str],
    heartbeats: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [str(BIN / "serve"), "run", str(file), "--address", ray_address]
    with subprocess.Popen(command, env=environment) as run:
        try:
            args = config["applications"][0]["args"]
            assert answer(f"127.0.0.1:{args['grpc_port']}", run) == 5
            until = time.monotonic() + START_S
            while not is_fine(heartbeats, "--ready"):  # the last beat may be a second old
                assert time.monotonic() < until
            assert is_fine(heartbeats)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(timeout=60)


def answer(address: str, run: "subprocess.Popen[bytes]") -> int:
    """Tokens of the first answer, once there is one."""
    until = time.monotonic() + START_S
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with Client(address) as client:
        while True:
            try:
                return len(client.generate("hello", sampling, timeout_s=60).outputs[0].token_ids)
            except PagefleetError:
                assert time.monotonic() < until and run.poll() is None
                time.sleep(0.5)


def is_fine(heartbeats: Path, *flags: str) -> bool:
    command = [str(BIN / "pagefleet"), "probe", "--heartbeats", str(heartbeats), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode == 0 and "gateway-" in result.stdout
