"""One trace from a client's call through gateway, controller and engine; none where it is off."""

import asyncio
import os
import random
import subprocess
import sys

import grpc.aio
import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tiny_model import make_tiny_model

from pagefleet.cluster.controller import ControllerConfig
from pagefleet.cluster.controller_actor import ControllerService
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.gateway_servers import GatewayServers
from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.inference_pb2_grpc import InferenceStub
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import load_engine
from pagefleet.workers.tracing import (
    Tracing,
    TracingUnavailable,
    is_wanted,
    send_traces_to,
    tracing_from_environment,
)

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER}-01"
TRACESTATE = ("congo=t61rcWkgMzE,rojo=1", "other@vendor=2")  # one header may come as several
HEADERS = (("traceparent", TRACEPARENT), *(("tracestate", part) for part in TRACESTATE))


@pytest.fixture
def loaded(tmp_path):
    folder = str(make_tiny_model(tmp_path / "tiny"))
    config = WorkerConfig(model=folder, device="cpu", num_blocks=64, max_context=256, num_threads=1)
    return load_engine(config)


class Traced:
    """All three parts, each with a provider of its own: only what travels joins their spans."""

    def __init__(self, loaded) -> None:
        self.exporter = InMemorySpanExporter()
        self.controller = ControllerService(
            ControllerConfig(), rng=random.Random(1), tracing=self.tracing()
        )
        self.loaded = loaded

    def tracing(self) -> Tracing:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return Tracing(provider)

    async def __aenter__(self) -> "Traced":
        self.ticking = asyncio.create_task(self.controller.run())
        self.leader = await asyncio.to_thread(
            lambda: Leader(
                *("r0", "tiny", self.loaded, self.controller),
                host="127.0.0.1",
                tracing=self.tracing(),
            )
        )
        gateway = Gateway("gw", self.controller, tracing=self.tracing())
        self.servers = GatewayServers(gateway)
        self.addresses = await self.servers.start("127.0.0.1", 0, 0)
        while not gateway.is_ready:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.servers.stop(0)
        await asyncio.to_thread(self.leader.close)
        self.ticking.cancel()

    async def ended(self, *names: str):
        """The spans by name, once those have ended."""
        async with asyncio.timeout(10):
            while True:
                spans = {span.name: span for span in self.exporter.get_finished_spans()}
                if spans.keys() >= set(names):
                    return spans
                await asyncio.sleep(0.01)


ALL = (
    *("gateway.generate", "controller.reserve", "controller.decide", "engine.generate"),
    *("engine.request", "engine.queue", "engine.prefill", "engine.decode"),
)


def check_one_trace(spans) -> None:
    parents = {
        "controller.reserve": "gateway.generate",
        "controller.decide": "controller.reserve",
        "engine.generate": "gateway.generate",
        "engine.request": "engine.generate",
        "engine.queue": "engine.request",
        "engine.prefill": "engine.request",
        "engine.decode": "engine.request",
    }
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}
    for span in spans.values():
        assert span.context.trace_state.to_header() == ",".join(TRACESTATE), span.name
    assert f"{spans['gateway.generate'].parent.span_id:016x}" == CALLER
    for child, parent in parents.items():
        assert spans[child].parent.span_id == spans[parent].context.span_id, child


@pytest.mark.timeout(60)
async def test_grpc_and_http_calls_are_one_trace_each(loaded):
    async with Traced(loaded) as traced:
        channel = grpc.aio.insecure_channel(traced.addresses.grpc)
        request = pb.GenerateRequest(
            text="hello", sampling=pb.Sampling(max_tokens=4, ignore_eos=True), request_id="mine"
        )
        await InferenceStub(channel).Generate(request, metadata=HEADERS)
        await channel.close()
        spans = await traced.ended(*ALL)
        check_one_trace(spans)
        attributes = dict(spans["engine.request"].attributes)
        assert attributes["pagefleet.request_id"] == "mine"
        assert attributes["gen_ai.usage.output_tokens"] == 4
        assert attributes["pagefleet.finish_reason"] == "length"
        assert spans["controller.decide"].attributes["pagefleet.replica"] == "r0"
        assert spans["gateway.generate"].attributes["gen_ai.usage.output_tokens"] == 4
        prefill, decode = spans["engine.prefill"], spans["engine.decode"]
        assert prefill.start_time <= prefill.end_time == decode.start_time <= decode.end_time
        traced.exporter.clear()
        async with httpx.AsyncClient(base_url=f"http://{traced.addresses.http}") as http:
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body, headers=HEADERS)).is_success
        check_one_trace(await traced.ended(*ALL))


@pytest.mark.timeout(60)
async def test_errors_and_cancels_end_their_spans(loaded):
    async with Traced(loaded) as traced:
        async with httpx.AsyncClient(base_url=f"http://{traced.addresses.http}") as http:
            body = {"model": "none", "prompt": "hi"}
            assert (await http.post("/v1/completions", json=body)).status_code == 404
            (span,) = traced.exporter.get_finished_spans()
            assert (span.name, span.status.is_ok, span.parent) == ("gateway.generate", False, None)
            traced.exporter.clear()
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_lines())
        spans = await traced.ended("gateway.generate", "engine.generate", "engine.request")
        assert spans["engine.request"].attributes["pagefleet.finish_reason"] in (
            *("cancelled", "length", "stop"),
        )


def test_is_off_unless_the_environment_names_an_endpoint():
    assert not is_wanted({})
    assert is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"})
    assert not is_wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"})
    assert not is_wanted(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}
    )


def test_the_flag_names_an_endpoint_and_what_is_missing(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.setenv(name, "")  # and back as it was, afterwards
    with pytest.raises(ValueError, match="http://"):
        send_traces_to("localhost:4318")
    send_traces_to("http://localhost:4318")
    assert is_wanted()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(TracingUnavailable, match=r"pagefleet\[tracing\]"):
        send_traces_to("http://localhost:4318")
    assert tracing_from_environment("engine", "r0") is None, "a warning, not a dead replica"


def test_imports_nothing_of_opentelemetry_while_it_is_off():
    script = (
        "import sys; from pagefleet.workers.tracing import tracing_from_environment as make;"
        "assert make('engine', 'r0') is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
