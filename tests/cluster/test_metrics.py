"""What Prometheus reads at a gateway, after real requests through both fronts."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
from gateway_fakes import FakeCluster, collect
from prometheus_client.parser import text_string_to_metric_families

from pagefleet.cluster import metrics
from pagefleet.cluster.generation import GenerateCall, TextPrompt
from pagefleet.cluster.metrics import GatewayMetrics
from pagefleet.protos.errors import InvalidArgument, Overloaded, Unavailable
from pagefleet.protos.messages import SamplingParams
from pagefleet.workers.json_log import JsonFormatter


def parse(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value_of(found, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def documented_labels() -> dict[str, set[str]]:
    """Of each metric in METRICS.md; the replicas' all have a place beside those named."""
    page = (Path(metrics.__file__).parent / "METRICS.md").read_text()
    rest, replicas = page.split("## Replicas")
    found: dict[str, set[str]] = {}
    for text, place in ((rest, set()), (replicas, {"model_name", "replica"})):
        for line in text.splitlines():
            if line.startswith("| `pagefleet_"):
                name, _, labels, _ = line.strip("| ").split(" | ")
                found[name.strip("`")] = place | set(re.findall(r"`(\w+)`", labels))
    return found


@pytest.fixture
async def cluster():
    async with FakeCluster() as made:
        yield made


def call(text: str = "hello", **sampling: object) -> GenerateCall:
    sampling = {"max_tokens": 5, "ignore_eos": True} | sampling
    return GenerateCall(TextPrompt(text), sampling=SamplingParams(**sampling))


async def test_counts_requests_tokens_and_latencies(cluster):
    await cluster.run(call(n=2))
    found = parse(await cluster.gateway.render_metrics())
    assert value_of(found, "pagefleet_generation_tokens_total", model_name="tiny") == 10
    success = {"model_name": "tiny", "finished_reason": "length"}
    assert value_of(found, "pagefleet_request_success_total", **success) == 2
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 8),
        ("e2e_request_latency_seconds", 2),
        ("request_queue_time_seconds", 2),
    ):
        assert value_of(found, f"pagefleet_{name}_count", model_name="tiny") == count
    assert value_of(found, "pagefleet_gateway_requests_running", model_name="tiny") == 0


async def test_shows_the_clusters_blocks_by_tier_and_state(cluster):
    found = parse(await cluster.gateway.render_metrics())
    place = {"model_name": "tiny", "replica": "r0"}
    counts = {"clean": 1, "cached_idle": 2, "referenced": 3, "fenced": 4}
    for state, count in counts.items():
        labels = place | {"tier": "device", "state": state}
        assert value_of(found, "pagefleet_kv_blocks", **labels) == count
    assert value_of(found, "pagefleet_prefix_cache_hits_total", **place) == 16
    assert value_of(found, "pagefleet_leased_blocks", **place) == 6
    assert value_of(found, "pagefleet_kv_cache_usage_perc", **place) == 0.7
    assert value_of(found, "pagefleet_num_preemptions_total", **place, policy="swap") == 0
    assert value_of(found, "pagefleet_queued_requests") == 1
    assert value_of(found, "pagefleet_controller_up") == 1


async def test_answers_without_the_controller(cluster, monkeypatch):
    async def fail():
        raise Unavailable("restarting")

    monkeypatch.setattr(cluster.controller, "cluster_state", fail)
    found = parse(await cluster.gateway.render_metrics())
    assert value_of(found, "pagefleet_controller_up") == 0
    assert not any(name == "pagefleet_kv_blocks" for name, _ in found)


async def test_a_cancelled_request_does_not_stay_counted(cluster):
    cluster.engine.gate.clear()
    generation = await cluster.gateway.generate(call())
    await generation.aclose()  # before its task took a step
    found = parse(await cluster.gateway.render_metrics())
    assert value_of(found, "pagefleet_gateway_requests_running", model_name="tiny") == 0
    cluster.engine.gate.set()


async def test_every_metric_is_documented_and_every_documented_one_exists(cluster):
    await cluster.run(call())
    cluster.gateway.metrics.count_error("grpc", Overloaded("full"))
    found = parse(await cluster.gateway.render_metrics())
    exposed: dict[str, set[str]] = {}
    for name, labels in found:
        if not name.endswith("_created"):
            name = re.sub("_(bucket|sum|count)$", "", name)
            exposed.setdefault(name, set()).update(dict(labels).keys() - {"le"})
    assert exposed == documented_labels()


async def test_controller_calls_are_cumulative_buckets(cluster):
    found = parse(await cluster.gateway.render_metrics())
    name = "pagefleet_controller_call_duration_seconds"
    buckets = {
        dict(labels)["le"]: value
        for (key, labels), value in found.items()
        if key == f"{name}_bucket"
    }
    assert (buckets["1e-05"], buckets["0.001"], buckets["+Inf"]) == (1, 3, 4)
    assert value_of(found, f"{name}_sum", call="reserve") == 0.01


def test_errors_by_front_and_code():
    counts = GatewayMetrics()
    counts.count_error("http", InvalidArgument("text", "empty"))
    counts.count_error("grpc", Overloaded("full"))
    found = parse(counts.render(None))
    name = "pagefleet_request_errors_total"
    assert value_of(found, name, front="http", code="INVALID_ARGUMENT") == 1
    assert value_of(found, name, front="grpc", code="RESOURCE_EXHAUSTED") == 1


async def test_one_json_line_per_request_without_its_text(cluster):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("pagefleet.requests")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        generation = await cluster.gateway.generate(call("a secret prompt"))
        await collect(generation)
    finally:
        logger.removeHandler(handler)
    line = json.loads(stream.getvalue())
    assert line["request_id"] == generation.request_id
    assert (line["outcome"], line["output_tokens"]) == ("ok", 5)
    assert line["finish_reasons"] == ["length"]
    assert "secret" not in stream.getvalue()
