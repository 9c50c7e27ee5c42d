"""What an operator sees of a cluster that runs: its dashboard's stream, and its metrics in Ray."""

import base64
import json
import time
import urllib.request
from collections.abc import Iterator

import pytest

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.block_map import BlockState

pytestmark = pytest.mark.ray

PROMPT = "a prompt of a few blocks that two requests have in common, word for word"


def dashboard_events(address: str) -> Iterator[dict]:
    with urllib.request.urlopen(
        f"http://{address}/dashboard/stream?period=0.3", timeout=30
    ) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def test_the_dashboard_shows_the_pools_as_they_are(cluster, client, settled_state):
    for _ in range(2):
        client.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
        settled_state()
    maps: dict[str, bytes] = {}
    for event in dashboard_events(cluster.addresses.http):
        for pool in event["pools"]:
            assert pool["tier"] == "device", "these replicas have no host tier"
            maps[pool["replica_id"]] = base64.b64decode(pool["map"]["cells"])
        counts = {
            replica["replica_id"]: replica["device"] for replica in event["state"]["replicas"]
        }
        states = {name: [cell & 7 for cell in cells] for name, cells in maps.items()}
        if len(maps) == 2 and all(
            states[name].count(BlockState.CACHED) == counts[name]["cached_idle"]
            and states[name].count(BlockState.CLEAN) == counts[name]["clean"]
            for name in maps
        ):
            break
    assert {len(cells) for cells in maps.values()} == {256}, "a cell for each block"
    assert any(BlockState.CACHED in found for found in states.values())
    decisions = next(iter(dashboard_events(cluster.addresses.http)))["decisions"]
    assert [decision["decision"] for decision in decisions[-2:]] == ["grant", "grant"]
    assert decisions[-1]["hit_tokens"] > 0, "the second found what the first had left"
    roots = next(iter(dashboard_events(cluster.addresses.http)))["prefixes"]
    # others' prompts, from before their replica was killed, may be asked for more often
    assert any(root["num_requests"] >= 2 and root["num_device_replicas"] >= 1 for root in roots)


@pytest.mark.slow
def test_the_metrics_are_rays_too(cluster):
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = (
        *("ray_pagefleet_kv_blocks{", "ray_pagefleet_leases_granted_total{"),
        "ray_pagefleet_generation_tokens_total{",
    )
    deadline = time.monotonic() + 120.0
    while True:
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
        if all(name in text for name in wanted):
            return
        assert time.monotonic() < deadline, [name for name in wanted if name not in text]
        time.sleep(1.0)  # Ray's agent tells every few seconds
