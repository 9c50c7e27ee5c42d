"""`pagefleet serve` as a user runs it: its own process, its own Ray, and a clean end."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pagefleet.cluster.client import Client
from pagefleet.cluster.llm import LLM
from pagefleet.protos.messages import SamplingParams

pytestmark = pytest.mark.ray

PAGEFLEET = str(Path(sys.executable).parent / "pagefleet")
SERVE = (PAGEFLEET, "serve", "--grpc-port", "0", "--http-port", "0", "--json")


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: list[tuple[str, Span]] = []  # each with its service's name
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {entry.key: entry.value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                service = names["service.name"].string_value
                self.spans += [(service, span) for span in scope.spans]


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.take(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def serving(tiny_model: Path, collector: Collector) -> Iterator[subprocess.Popen[str]]:
    command = [*SERVE, "--model", str(tiny_model), "--replicas", "1", "--num-blocks", "64"]
    command += ["--otlp-endpoint", collector.endpoint]
    environment = os.environ | {"OTEL_BSP_SCHEDULE_DELAY": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
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


def check_one_trace_for_each_request(collector: Collector) -> None:
    """From three processes; who is whose child says that they belong together."""
    by_id = {span.span_id: (service, span) for service, span in collector.spans}
    roots = {span.trace_id for service, span in collector.spans if not span.parent_span_id}
    assert len(roots) >= 9, "one for generate, eight for bench"
    for child, parent in (
        (("controller", "controller.decide"), ("gateway", "controller.reserve")),
        (("engine", "engine.request"), ("gateway", "engine.generate")),
    ):
        found = [
            span
            for service, span in collector.spans
            if (service, span.name) == (f"pagefleet-{child[0]}", child[1])
        ]
        assert len({span.trace_id for span in found}) >= 9
        for span in found:
            service, above = by_id[span.parent_span_id]
            assert (service, above.name) == (f"pagefleet-{parent[0]}", parent[1])
            assert above.trace_id == span.trace_id in roots


@pytest.mark.slow
def test_serve_answers_and_ends_with_zero(serving: subprocess.Popen[str], collector: Collector):
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
    check_one_trace_for_each_request(collector)


@pytest.mark.slow
def test_serve_that_cannot_start_says_why_and_leaves_nothing(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"no weights")  # which only a replica finds out
    command = [*SERVE, "--model", str(folder)]
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
