"""The Python client, sync and async, against a live server."""

import asyncio
from contextlib import aclosing

import pytest
from gateway_fakes import FakeCluster, ids_of, until

from pagefleet.cluster.client import (
    AsyncClient,
    Chat,
    Client,
    RequestOptions,
    SamplingParams,
)
from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.protos import errors
from pagefleet.protos.messages import FinishReason, Refused


@pytest.fixture
async def front():
    async with FakeCluster() as cluster:
        server = GrpcServer(cluster.gateway)
        cluster.target = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        yield cluster
        await server.stop(0)


@pytest.fixture
async def client(front):
    async with AsyncClient(front.target) as made:
        yield made


def in_thread(front, work):
    """Run `work(client)` with a blocking client beside the servers' loop."""

    def run():
        with Client(front.target) as client:
            return work(client)

    return asyncio.to_thread(run)


SHORT = SamplingParams(max_tokens=12, seed=3)


async def test_blocking_calls(front):
    def work(client: Client) -> None:
        whole = client.generate("hello", SHORT)
        parts = list(client.stream("hello", SHORT))
        assert "".join(part.text for part in parts) == whole.text
        assert len(whole.text) == 12
        assert parts[-1].outputs[0].finish_reason is FinishReason.LENGTH
        assert whole.outputs[0].usage.completion_tokens == 12
        assert client.chat([{"role": "user", "content": "hi"}], SHORT).text
        assert client.tokenize("a", add_special_tokens=False) == ids_of("a")
        assert client.tokenize(Chat([{"role": "u", "content": "x"}])) == ids_of("<u>x\n<assistant>")
        assert client.detokenize(ids_of("abc")) == "abc"
        (model,) = client.models()
        assert (model.id, model.bos_token_id) == ("tiny", 256)
        assert [replica.replica_id for replica in client.cluster_state().replicas] == ["r0", "r1"]
        assert client.explain("hello", SHORT).replica_id == "r0"
        assert client.cancel("nothing") == 0
        watch = client.watch_cluster(period_s=0.2)
        assert [len(next(watch).pools) for _ in range(2)] == [4, 0]
        watch.close()

    await in_thread(front, work)


async def test_closing_a_blocking_stream_cancels(front):
    front.engine.token_budget = 4

    def work(client: Client) -> None:
        stream = client.stream("hello", SHORT)
        assert next(stream).outputs
        stream.close()

    await in_thread(front, work)
    await until(lambda: front.engine.cancelled, front.engine.changed)


async def test_async_calls_are_the_same(front, client):
    whole = await client.generate("hello", SHORT)
    parts = [part async for part in client.stream("hello", SHORT)]
    assert "".join(part.text for part in parts) == whole.text
    assert (await client.chat([{"role": "user", "content": "hi"}], SHORT)).text
    assert await client.tokenize("a", add_special_tokens=False) == ids_of("a")
    assert await client.detokenize(ids_of("abc")) == "abc"
    assert (await client.models())[0].has_chat_template
    assert len((await client.cluster_state()).replicas) == 2
    assert (await client.explain("hello", SHORT)).decision == "grant"
    async with aclosing(client.watch_cluster(period_s=0.2)) as watch:
        assert [len((await anext(watch)).pools) for _ in range(2)] == [4, 0]


async def test_leaving_an_async_stream_cancels(front, client):
    front.engine.token_budget = 4
    async with aclosing(client.stream("hello", SHORT)) as stream:
        assert (await anext(stream)).outputs
    await until(lambda: front.engine.cancelled, front.engine.changed)


async def test_every_field_arrives(front, client):
    sampling = SamplingParams(
        max_tokens=5,
        min_tokens=1,
        temperature=0.1,
        top_k=3,
        top_p=0.2,
        min_p=0.3,
        seed=2**64 - 1,
        n=2,
        stop_token_ids=(9,),
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        logit_bias=((4, -1.0),),
        logprobs=1,
        prompt_logprobs=1,
    )
    options = RequestOptions(
        cache_salt="s", priority=2, request_id="mine", add_special_tokens=False, retry_token="t"
    )
    reply = await client.generate("hello", sampling, options=options)
    (request,) = front.engine.submitted
    assert request.sampling == sampling
    assert request.prompt_token_ids == tuple(ids_of("hello"))
    assert (request.cache_salt, request.priority) == ("s", 2)
    assert front.controller.reserved[0].retry_token == "t"
    assert (reply.request_id, reply.seed) == ("mine", 2**64 - 1)
    assert [entry.rank for entry in reply.prompt_logprobs] == [0, 1, 1, 1, 1]
    assert reply.outputs[1].logprobs[0].top[0][0] == reply.outputs[1].token_ids[0]


async def test_a_broken_stream_is_resumed_by_its_client(front, client):
    whole = await client.generate("hello", SHORT)
    known = whole.outputs[0].token_ids[:5]
    rest = await client.generate("hello", SHORT, options=RequestOptions(resume_token_ids=known))
    assert known + rest.outputs[0].token_ids == whole.outputs[0].token_ids


async def test_errors_are_those_of_the_tree(front, client):
    with pytest.raises(errors.InvalidArgument) as invalid:
        await client.generate("x", SamplingParams(top_p=2.0))
    assert invalid.value.field == "sampling.top_p"
    with pytest.raises(errors.ModelNotFound):
        await client.generate("x", model="other")
    front.controller.answers.append(Refused("k", 1, "Overloaded", "full", 1.5, "tok"))
    with pytest.raises(errors.Overloaded) as overloaded:
        await client.generate("x")
    assert (overloaded.value.retry_after_s, overloaded.value.retry_token) == (1.5, "tok")
    front.engine.gate.clear()
    with pytest.raises(errors.DeadlineExceeded):
        await client.generate("x", timeout_s=0.2)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ("lone \ud83d", None),
        ([-1], None),
        ("x", SamplingParams(max_tokens=-1)),
        ("x", SamplingParams(stop="abc")),
    ],
)
async def test_what_no_message_can_hold_is_invalid(client, prompt, sampling):
    with pytest.raises(errors.InvalidArgument):
        await client.generate(prompt, sampling)


async def test_a_lone_surrogate_cannot_be_tokenized(client):
    with pytest.raises(errors.InvalidArgument):
        await client.tokenize("lone \ud83d")


async def test_nobody_there_is_unavailable_and_says_where_it_looked():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable, match=r"no server answers at 127\.0\.0\.1:1 "):
            await client.models()
