"""HTTP in front of real engines, without Ray: formats, calls, tenants, and a lost replica."""

import asyncio
import json
import random
import statistics

import httpx
import openai
import pytest
from tiny_model import make_tiny_model

from pagefleet.cluster.api_keys import ApiKey, digest_of
from pagefleet.cluster.controller import ControllerConfig
from pagefleet.cluster.controller_actor import ControllerService
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.gateway_servers import GatewayServers
from pagefleet.cluster.security import GatewaySecurity
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.leader import Leader
from pagefleet.workers.loaded_engine import load_engine

KEYS = {name: f"pf-{name}-0123456789abcdef" for name in ("acme", "other", "admin")}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "word": {"type": "string", "minLength": 40, "maxLength": 60},
        "kind": {"enum": ["block", "lease"]},
    },
    "required": ["ok", "word", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
QUESTION = [{"role": "user", "content": "Which one is it, of all that there are? " * 2}]


class Whole:
    """A controller, two leaders and a gateway whose clients need keys."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.controller = ControllerService(ControllerConfig(), rng=random.Random(1))
        keys = tuple(ApiKey(n, digest_of(k), is_admin=n == "admin") for n, k in KEYS.items())
        gateway = Gateway("gw", self.controller)
        self.servers = GatewayServers(gateway, GatewaySecurity(keys))
        self.leaders: list[Leader] = []

    async def __aenter__(self) -> "Whole":
        self.ticking = asyncio.create_task(self.controller.run())
        for number in range(2):
            self.leaders.append(await asyncio.to_thread(self.start_leader, number))
        addresses = await self.servers.start("127.0.0.1", 0, 0)
        self.url = f"http://{addresses.http}"
        self.http = httpx.AsyncClient(base_url=self.url, verify=False, timeout=60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.servers.stop(0)
        for leader in self.leaders:
            await asyncio.to_thread(leader.close)
        self.ticking.cancel()

    def start_leader(self, number: int) -> Leader:
        config = WorkerConfig(
            model=str(self.folder),
            device="cpu",
            num_blocks=160,
            max_context=1536,
            deterministic=True,
            num_threads=1,
        )
        loaded = load_engine(config)
        return Leader(f"r{number}", "tiny", loaded, self.controller, host="127.0.0.1")

    def client(self, tenant: str = "acme") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=KEYS[tenant],
            max_retries=0,
            http_client=self.http,
        )

    async def ask(self, tenant: str = "acme", **options: object):
        """An answer, if it is no stream once the controller knows what is left of it."""
        body = {"model": "tiny", "messages": QUESTION, "seed": 1, "max_tokens": 300} | options
        reply = await self.client(tenant).chat.completions.create(**body)
        async with asyncio.timeout(20):
            while not body.get("stream") and await self.num_leases() > 0:
                await asyncio.sleep(0.001)  # the report is on its way
        return reply

    async def num_leases(self) -> int:
        state = await self.controller.cluster_state()
        return sum(replica.num_leases for replica in state.replicas)


@pytest.fixture
async def whole(tmp_path):
    async with Whole(make_tiny_model(tmp_path / "tiny")) as made:
        yield made


async def test_formats_calls_tenants_and_metrics(whole):
    reply = await whole.ask(response_format=FORMAT, n=2)
    for choice in reply.choices:
        assert set(json.loads(choice.message.content)) == {"ok", "word", "kind"}

    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    reply = await whole.ask(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"ok", "word", "kind"}

    # the same question again: found by its own tenant, by no other
    cached = [
        (await whole.ask(tenant, max_tokens=1)).usage.prompt_tokens_details.cached_tokens
        for tenant in ("acme", "other", "other")
    ]
    assert cached[0] > 0
    assert cached[1] == 0
    assert cached[2] > 0

    headers = {"authorization": f"Bearer {KEYS['admin']}"}
    text = (await whole.http.get("/metrics", headers=headers)).text
    assert 'pagefleet_kv_blocks{model_name="tiny",replica="r1",state="clean",tier="device"}' in text
    assert 'pagefleet_request_success_total{finished_reason="stop",model_name="tiny"}' in text


async def test_no_timing_tells_of_anothers_prompts(whole):
    """Medians of one run: a stranger to a cached prompt waits as for one that nobody has sent."""

    async def first_token_s(tenant: str, text: str) -> float:
        messages = [{"role": "user", "content": text}]
        reply = await whole.ask(tenant, messages=messages, max_tokens=1)
        return reply.model_extra["pagefleet"]["samples"][0]["first_token_s"]

    await first_token_s("other", "a first request also warms the kernels " * 30)
    waits: dict[str, list[float]] = {"warm": [], "stranger": [], "new": []}
    for number in range(7):
        known = f"{number} what acme has asked " * 50
        await first_token_s("acme", known)
        waits["warm"].append(await first_token_s("acme", known))
        waits["stranger"].append(await first_token_s("other", known))
        waits["new"].append(await first_token_s("other", f"{number} is asked by nobody " * 45))
    warm, stranger, new = (statistics.median(waits[kind]) for kind in ("warm", "stranger", "new"))
    print("TIMES", warm, stranger, new)
    assert new > 1.5 * warm, "a hit is quicker, or this shows nothing"
    assert stranger > 0.67 * new


async def test_a_grammar_survives_the_loss_of_its_replica(whole):
    undisturbed = (await whole.ask(response_format=FORMAT)).choices[0].message.content
    stream = await whole.ask(
        response_format=FORMAT, stream=True, stream_options={"include_usage": True}
    )
    text, details = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        details = getattr(chunk, "pagefleet", None) or details
        if len(text) > 10 and len(whole.leaders) == 2:  # one is lost, the other goes on
            busy = [leader for leader in whole.leaders if leader.stats().num_running]
            for leader in busy:
                whole.leaders.remove(leader)
                await asyncio.to_thread(leader.close, "killed by the test")
    assert details["samples"][0]["resumes"] >= 1
    assert text == undisturbed
