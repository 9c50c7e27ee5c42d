"""`/dashboard` as a client without a screen sees it: files, headers, keys, the stream."""

import base64
import json
import re
from importlib.resources import files

import pytest
from dashboard_fakes import ACME, ADMIN, KEYS, Dashboard

from pagefleet.protos.errors import Unavailable


@pytest.fixture
async def dashboard():
    async with Dashboard() as made:
        yield made


async def test_the_page_brings_all_that_it_needs_itself(dashboard):
    page = await dashboard.http.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = {
        entry.name for entry in files("pagefleet.cluster.dashboard").joinpath("static").iterdir()
    }
    wanted = set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', page.text))
    for name in sorted(names):
        reply = await dashboard.http.get(f"/dashboard/{name}")
        assert reply.status_code == 200
        wanted |= set(re.findall(r'from "\./([^"]+)"', reply.text if name.endswith("js") else ""))
        assert "//" not in re.sub(
            r"(?m)^\s*//.*| // .*", "", reply.text.replace("http://www.w3.org", "")
        )
    assert wanted | {"index.html"} == names


async def test_nothing_else_of_the_disk_is_served(dashboard):
    for path in ("pages.py", "..%2fpages.py", "%2e%2e/pages.py", "static/app.js", "app.js%00"):
        reply = await dashboard.http.get(f"/dashboard/{path}")
        assert reply.status_code == 404, path


async def test_the_policy_lets_only_our_own_files_run(dashboard):
    for path in ("/dashboard", "/dashboard/app.js"):
        headers = (await dashboard.http.get(path)).headers
        policy = headers["content-security-policy"]
        for rule in ("default-src 'none'", "script-src 'self'", "connect-src 'self'"):
            assert rule in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


async def test_the_stream_is_whole_at_first_and_then_what_changed(dashboard):
    async with dashboard.events() as events:
        first, second = await anext(events), await anext(events)
    maps = {(pool["replica_id"], pool["tier"]): pool["map"] for pool in first["pools"]}
    assert len(maps) == 8 and maps["replica-0", "device"]["num_blocks"] == 256
    assert len(base64.b64decode(maps["replica-0", "device"]["cells"])) == 256
    assert 0 < len(second["pools"]) < 8
    assert {decision["number"] for decision in second["decisions"]} == {44, 45, 46}
    assert first["state"]["replicas"][0]["device"].keys() >= {"clean", "cached_idle", "fenced"}
    assert first["rates"].keys() >= {"tokens_per_s", "ttft_p50_s", "query_tokens"}


async def test_no_address_and_no_secret_leaves_the_cluster(dashboard):
    async with dashboard.events() as events:
        text = json.dumps(await anext(events))
    assert "10.0.0.1" not in text and "address" not in text and "secret" not in text


async def test_an_update_of_64_pools_of_100_000_blocks_stays_small():
    async with Dashboard(64, 100_000, 20_000) as dashboard, dashboard.events() as events:
        first, second = [len(json.dumps(await anext(events))) for _ in range(2)]
    assert first < 350_000, "the maps and the tables once"
    assert second < 250_000, "of these, what changed"


async def test_with_keys_only_an_admin_sees_the_cluster():
    async with Dashboard(keys=KEYS) as dashboard:
        assert (await dashboard.http.get("/dashboard")).status_code == 200, "it holds no data"
        for key, status in (("", 401), ("pf-wrong-0123456789abcdef", 401), (ACME, 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = await dashboard.http.get("/dashboard/stream", headers=headers)
            assert (reply.status_code, "replica" in reply.text) == (status, False)
        reply = await dashboard.http.get(f"/dashboard/stream?key={ADMIN}")
        assert reply.status_code == 401, "a key in an address would stand in logs"
        async with dashboard.events(key=ADMIN) as events:
            assert len((await anext(events))["state"]["replicas"]) == 4


async def test_odd_periods_and_a_controller_that_is_away_have_a_status(dashboard):
    for query in ("?period=x", "?period=0", "?period=nan", "?period=1e9"):
        assert (await dashboard.http.get(f"/dashboard/stream{query}")).status_code == 400, query

    async def fail():
        raise Unavailable("the controller is restarting", retry_after_s=1.0)

    async with dashboard.events() as events:
        await anext(events)
        dashboard.controller.watch = fail
        told = [event async for event in events][-1]
        assert "restarting" in told["error"]["message"], "then the stream ends"
    assert (await dashboard.http.get("/dashboard/stream")).status_code == 503


async def test_leaving_ends_the_watch(dashboard):
    async with dashboard.events() as events:
        await anext(events)
        assert dashboard.gateway._watch.num_watchers == 1
    for _ in range(100):
        if dashboard.gateway._watch.num_watchers == 0:
            break
        await dashboard.http.get("/health")  # the server's loop turns
    assert dashboard.gateway._watch.num_watchers == 0
