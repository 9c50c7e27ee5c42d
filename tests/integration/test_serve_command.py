"""`pagefleet serve` as a user runs it: its own process, its own Ray, and a clean end."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagefleet.cluster.client import Client
from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import SamplingParams

pytestmark = pytest.mark.ray

PAGEFLEET = str(Path(sys.executable).parent / "pagefleet")
SERVE = (PAGEFLEET, "serve", "--grpc-port", "0", "--http-port", "0", "--json")


@pytest.fixture
def serving(tiny_model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [*SERVE, "--model", str(tiny_model), "--replicas", "1", "--num-blocks", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        if process.poll() is None:
            process.kill()


def run(*arguments: str) -> str:
    command = [PAGEFLEET, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def watch_until_interrupted(server: tuple[str, ...]) -> None:
    command = [PAGEFLEET, "top", *server, "--period", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        try:
            assert top.stdout.readline().startswith("replica")
            top.send_signal(signal.SIGINT)
            top.communicate(timeout=20)
            assert top.returncode == 0
        finally:
            top.kill()


def test_serve_answers_and_ends_with_zero(serving: subprocess.Popen[str]):
    assert serving.stdout is not None
    facts = json.loads(serving.stdout.readline())
    (replica,) = facts["replicas"]
    assert (replica["replica_id"], replica["num_blocks"]) == ("replica-0", 64)
    assert "KV pool" in replica["memory"]
    server = ("--server", facts["grpc"])
    state = json.loads(run("status", *server, "--json"))
    assert state["replicas"][0]["state"] == "ready"
    assert "replica-0" in run("status", *server)
    answer = json.loads(run("generate", "Hello", *server, "--max-tokens", "5", "--json"))
    assert answer["outputs"][0]["usage"]["completion_tokens"] <= 5
    load = ("--num-requests", "8", "--input-len", "20", "--output-len", "8")
    report = json.loads(run("bench", *server, *load, "--json"))
    assert (report["num_ok"], report["num_failed"]) == (8, 0)
    explained = json.loads(run("explain", "Hello", *server, "--json"))
    assert explained["decision"] == "grant"
    assert "replica-0" in run("explain", "Hello", *server)
    watch_until_interrupted(server)
    children = psutil.Process(serving.pid).children(recursive=True)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(timeout=60) == 0
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert gone


def test_serve_that_cannot_start_says_why_and_leaves_nothing(tiny_model: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    command = [*SERVE, "--model", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1
    assert "could not be started" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_faults_change_no_answer(tiny_model: Path):
    faults = ("preempt-every=3", "late-copies", "hash-bits=8", "nan-fill", "guard-block")
    command = [*SERVE, "--model", str(tiny_model), "--num-blocks", "64", "--host-memory", "1MiB"]
    command += ["--deterministic", *(f"--fault={fault}" for fault in faults)]
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny_model), num_blocks=64, deterministic=True, num_threads=1) as llm:
        (expected,) = llm.generate(["Hello there"], greedy)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            with Client(facts["grpc"]) as client:
                for _ in range(3):
                    (output,) = client.generate("Hello there", greedy).outputs
                    assert output.token_ids == expected.token_ids
                    assert output.usage is not None and output.usage.preemptions > 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_serve_can_be_stopped_while_it_starts(serving: subprocess.Popen[str]):
    with pytest.raises(subprocess.TimeoutExpired):
        serving.wait(timeout=7)  # somewhere between Ray's start and the first report
    children = psutil.Process(serving.pid).children(recursive=True)
    serving.send_signal(signal.SIGINT)
    assert serving.wait(timeout=60) == 0
    assert not psutil.wait_procs(children, timeout=20)[1]
