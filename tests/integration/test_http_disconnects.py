"""Clients of the HTTP front that hang up: what they held comes back, and nobody else notices."""

import asyncio
import json
import random

import httpx
import pytest

pytestmark = pytest.mark.ray

NUM_STREAMS = 200
NUM_TOKENS = 40


def body_of(number: int) -> dict[str, object]:
    """Some share a beginning; every other one is greedy."""
    return {
        "model": "tiny",
        "prompt": f"{'A shared beginning of some blocks. ' if number % 4 == 0 else ''}{number}",
        "max_tokens": NUM_TOKENS,
        "temperature": number % 2,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }


async def read(http: httpx.AsyncClient, number: int, events: int | None = None) -> str:
    """The text of a stream; hangs up after so many events, if a number is given."""
    text, seen = "", 0
    async with http.stream("POST", "/v1/completions", json=body_of(number)) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            if seen == events:
                return text
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            seen += 1
    return text


@pytest.mark.slow
async def test_200_sse_streams_a_fifth_of_which_hang_up_leave_no_block(cluster, settled_state):
    rng = random.Random(7)
    leaving = {number: rng.randrange(15) for number in rng.sample(range(NUM_STREAMS), 40)}
    async with httpx.AsyncClient(
        base_url=f"http://{cluster.addresses.http}",
        limits=httpx.Limits(max_connections=None),
        timeout=120,
        verify=False,
    ) as http:
        streams = (read(http, number, leaving.get(number)) for number in range(NUM_STREAMS))
        texts = await asyncio.gather(*streams)
        state = await asyncio.to_thread(settled_state)
        for replica in state.replicas:
            assert replica.device.clean + replica.device.cached_idle == replica.device.total
        assert await cluster.gateway.num_running.remote() == 0
        alone = [await read(http, number) for number in range(0, NUM_STREAMS, 10)]
    for number, text in zip(range(0, NUM_STREAMS, 10), alone, strict=True):
        is_whole = number not in leaving
        assert texts[number] == text if is_whole else text.startswith(texts[number])
