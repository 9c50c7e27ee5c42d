"""A fuzzer over both fronts: nothing that a client can send is our fault, hangs, or stays behind.

A bounded slice by default; FUZZ_STEPS and FUZZ_SEED make it long or repeat it.
"""

import asyncio
import json
import os
import random

import grpc
import grpc.aio
import httpx
from gateway_fakes import FakeCluster

from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.cluster.http_server import HttpServer
from pagefleet.cluster.openai_api import make_app
from pagefleet.protos import inference_pb2 as pb

STEPS = int(os.environ.get("FUZZ_STEPS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
METHODS = (
    "Generate",
    "GenerateStream",
    "Tokenize",
    "Detokenize",
    "Explain",
    "Cancel",
    "ListModels",
)
OUR_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, object] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "max_tokens": 3,
    "max_output_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "n": 1,
    "seed": 1,
    "stop": ["x"],
    "stream": False,
    "logprobs": None,
    "logit_bias": {"5": 1.0},
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "structured_outputs": None,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
    "cache_salt": "s",
    "priority": 0,
    "admission_class": "standard",
    "stop_token_ids": [3],
    "min_tokens": 0,
    "text": {"format": {"type": "text"}},
    "include": [],
    "reasoning_effort": "none",
    "reasoning": {"effort": "none"},
    "modalities": ["text"],
    "verbosity": "medium",
    "truncation": "disabled",
    "max_completion_tokens": 3,
    "metadata": {"a": "b"},
}
ODD: list[object] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.1, -0.0, 1e308),
    *("", "x", "\x00", "\ud800", "é" * 50, "x" * 5000, "tiny", "required", "none"),
    *([], [[]], [None], [""], [1, "a"], {}, {"a": {}}, [{}], {"type": "text"}, {"type": []}),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, [TOOL, TOOL]),
    *({"regex": "(a+)+$"}, {"grammar": "start: start"}, {"json": {"enum": []}}, {"choice": []}),
    *([{"role": "tool", "content": None}], [{"role": "user", "content": [{"type": "image"}]}]),
    {"type": "function", "function": {"name": "f"}},
]


def mutate(rng: random.Random, value: object, depth: int = 0) -> object:
    if rng.random() < 0.15 or depth > 4:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {k: mutate(rng, v, depth + 1) for k, v in value.items() if rng.random() < 0.95}
    if isinstance(value, list):
        return [mutate(rng, item, depth + 1) for item in value] * rng.choice((1, 1, 1, 2))
    return value


def http_body(rng: random.Random) -> bytes:
    names = rng.sample(sorted(GOOD), rng.randrange(1, 8))
    body = {name: GOOD[name] for name in ("model", "messages", "prompt", "input", "max_tokens")}
    body |= {name: mutate(rng, GOOD[name]) for name in names}
    data = json.dumps(body).encode()
    if rng.random() < 0.2:
        data = damage(rng, data)
    return data


def damage(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        match rng.randrange(3):
            case 0 if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            case 1:
                changed.insert(rng.randrange(len(changed) + 1), rng.randrange(256))
            case _:
                del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def grpc_message(rng: random.Random) -> bytes:
    sampling = pb.Sampling(max_tokens=3)
    for name, kind in (("temperature", float), ("top_p", float), ("n", int), ("seed", int)):
        if rng.random() < 0.3:
            odd = [0, 1, 3, 129, 2**31] if kind is int else [-1.0, 0.0, float("nan"), 1e300]
            setattr(sampling, name, rng.choice(odd))
    if rng.random() < 0.3:
        sampling.response_format.grammar = rng.choice(["start: (", "{", 'start: "a"', "x" * 9])
    if rng.random() < 0.3:
        sampling.stop.extend(["x"] * rng.choice((1, 65)))
    request = pb.GenerateRequest(model=rng.choice(("", "tiny", "no")), sampling=sampling)
    match rng.randrange(3):
        case 0:
            request.text = rng.choice(("hi", "", "x" * 5000))
        case 1:
            request.token_ids.ids.extend(rng.choice(([], [1], [257], [258], [2**32 - 1])))
        case _:
            request.chat.messages.add(role=rng.choice(("user", "bad", "")), content="x")
    data = request.SerializeToString()
    return damage(rng, data) if rng.random() < 0.6 else data


async def fuzz_http(rng: random.Random, http: httpx.AsyncClient) -> None:
    body, path = http_body(rng), rng.choice(PATHS)
    headers = {"x-request-timeout-ms": rng.choice(("5000", "1", "x", "-1"))}
    reply = await http.post(path, content=body, headers=headers)
    ours = reply.status_code >= 500 and reply.status_code not in (503, 504)
    assert not ours, (path, body, reply.status_code, reply.text)
    if reply.status_code != 200:
        assert reply.json()["error"]["message"], (path, body)


async def fuzz_grpc(rng: random.Random, channel: grpc.aio.Channel) -> None:
    method, data = rng.choice(METHODS), grpc_message(rng)
    name = f"/pagefleet.v1.Inference/{method}"
    try:
        if method == "GenerateStream":
            async for _ in channel.unary_stream(name)(data, timeout=5):
                pass
        else:
            await channel.unary_unary(name)(data, timeout=5)
    except grpc.aio.AioRpcError as error:
        assert error.code() not in OUR_FAULTS, (method, data, error.code(), error.details())


async def test_nothing_a_client_sends_is_our_fault():
    rng = random.Random(SEED)
    async with FakeCluster() as cluster:
        http_server, grpc_server = (
            HttpServer(make_app(cluster.gateway)),
            GrpcServer(cluster.gateway),
        )
        http_port = await http_server.start("127.0.0.1", 0)
        grpc_port = await grpc_server.start("127.0.0.1", 0)
        url = f"http://127.0.0.1:{http_port}"
        async with (
            httpx.AsyncClient(base_url=url, verify=False, timeout=20) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        ):
            for step in range(STEPS):
                seeded = random.Random(rng.randrange(2**32))
                async with asyncio.timeout(30):
                    await (fuzz_http(seeded, http) if step % 2 else fuzz_grpc(seeded, channel))
        await grpc_server.stop(0)
        await http_server.stop(1)
        assert cluster.gateway.num_running == 0
        assert [leader.engine.num_live for leader in cluster.leaders] == [0, 0]
