"""The whole path over real Ray, gRPC and HTTP: what clients get, and what is left afterwards."""

import asyncio
import math
import random
from contextlib import aclosing

import grpc
import httpx
import openai
import pytest

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.cluster.client_messages import Chat, RequestOptions
from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.errors import InvalidArgument, ModelNotFound
from pagefleet.protos.messages import AdmissionClass, FinishReason, SamplingParams

pytestmark = pytest.mark.ray

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def test_a_stream_says_what_a_unary_call_says(client: Client, settled_state):
    whole = client.generate("The unit of everything is the block", GREEDY)
    parts = list(client.stream("The unit of everything is the block", GREEDY))
    outputs = [output for part in parts for output in part.outputs]
    assert len(parts) > 1
    assert "".join(output.text for output in outputs) == whole.text
    tokens = [token for output in outputs for token in output.token_ids]
    assert tuple(tokens) == whole.outputs[0].token_ids
    assert len(tokens) == 40
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    settled_state()


def test_the_second_of_two_equal_prompts_finds_its_blocks(client: Client, settled_state):
    prompt = "Requests with the same beginning share the blocks of it. " * 4
    cold = client.generate(prompt, GREEDY).outputs[0]
    settled_state()  # the controller has heard where the blocks are
    warm = client.generate(prompt, GREEDY).outputs[0]
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens >= 16 * (len(prompt) // 16 - 1)
    assert warm.usage.replica == cold.usage.replica
    assert warm.token_ids == cold.token_ids
    settled_state()


def test_four_samples_differ_and_repeat_with_their_seed(client: Client, settled_state):
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=2**64 - 1, n=4, ignore_eos=True)
    first, second = (client.generate("Four of one", sampling) for _ in range(2))
    assert sorted(output.index for output in first.outputs) == [0, 1, 2, 3]
    assert len({output.token_ids for output in first.outputs}) > 1
    by_index = {output.index: output.token_ids for output in first.outputs}
    assert {output.index: output.token_ids for output in second.outputs} == by_index
    settled_state()


def test_a_chat_goes_through_the_template(client: Client):
    chat = Chat([{"role": "user", "content": "Hi"}])
    prompt = client.tokenize(chat)
    text = client.detokenize(prompt, skip_special_tokens=False)
    assert text == "<|start|><|user|>Hi\n<|assistant|>"
    assert client.generate(chat, GREEDY).outputs[0].usage.prompt_tokens == len(prompt)


def test_a_stop_string_is_never_shown(client: Client, settled_state):
    # 200 random bytes: their text surely has some character twice, not at the start
    text = client.generate("Stop there", SamplingParams(max_tokens=200, seed=3)).text
    stop = text[len(text) // 2 :][:3]
    sampling = SamplingParams(max_tokens=200, seed=3, stop=(stop,))
    stopped = "".join(part.text for part in client.stream("Stop there", sampling))
    assert stopped == text[: text.index(stop)]
    settled_state()


def test_a_client_that_goes_away_frees_its_blocks(client: Client, settled_state):
    stream = client.stream("To be cancelled", SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    stream.close()
    settled_state()


async def test_1000_random_cancels_leave_nothing(cluster, settled_state):
    rng = random.Random(0)
    places = asyncio.Semaphore(40)
    ends = {"cancelled": 0, "complete": 0}

    async def maybe_cancelled(client: AsyncClient, number: int) -> None:
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 60), seed=number, n=rng.choice((1, 1, 2, 4))
        )
        prompt = f"{'shared ' * rng.randint(0, 9)}{number}"
        async with places, aclosing(client.stream(prompt, sampling)) as stream:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                    async for _ in stream:
                        pass
                ends["complete"] += 1
            except TimeoutError:
                ends["cancelled"] += 1

    async with AsyncClient(cluster.addresses.grpc) as client:
        await asyncio.gather(*(maybe_cancelled(client, number) for number in range(1000)))
    assert ends["cancelled"] > 200, ends
    state = await asyncio.to_thread(settled_state)
    assert state.queued_requests == 0
    for replica in state.replicas:
        assert replica.device.clean + replica.device.cached_idle == replica.device.total


BAD_SAMPLING = [
    ("sampling.temperature", {"temperature": math.nan}),
    ("sampling.temperature", {"temperature": -1.0}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.top_p", {"top_p": math.inf}),
    ("sampling.min_p", {"min_p": 1.5}),
    ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
    ("sampling.presence_penalty", {"presence_penalty": -3.0}),
    ("sampling.frequency_penalty", {"frequency_penalty": math.nan}),
    ("sampling.n", {"n": 4096}),
    ("sampling.logprobs", {"logprobs": 1000}),
    ("sampling.stop_token_ids", {"stop_token_ids": (10**6,)}),
    ("sampling.logit_bias", {"logit_bias": ((10**6, 1.0),)}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_SAMPLING)
def test_absurd_sampling_is_named(client: Client, field: str, changes: dict[str, object]):
    with pytest.raises(InvalidArgument) as caught:
        client.generate("fine", SamplingParams(**({"max_tokens": 4} | changes)))
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("text", ""),
        ("token_ids", []),
        ("token_ids", [1, 2, 10**6]),
        ("text", "long " * 1000),
        ("chat", Chat([])),
    ],
)
def test_a_bad_prompt_is_named(client: Client, field: str, prompt):
    with pytest.raises(InvalidArgument) as caught:
        client.generate(prompt, SamplingParams(max_tokens=4))
    assert caught.value.field.startswith(field)


def test_a_request_that_can_never_fit_is_refused_and_harms_nobody(client: Client):
    # 128 samples of 1,000 tokens want 8,000 blocks; a replica has 256
    huge = SamplingParams(max_tokens=1000, n=128, ignore_eos=True)
    options = RequestOptions(admission_class=AdmissionClass.GUARANTEED)
    with pytest.raises(InvalidArgument):
        client.generate("x", huge, options=options)
    assert client.generate("fine", GREEDY).outputs[0].usage.completion_tokens == 40


def test_invalid_utf8_is_the_clients_mistake(cluster):
    message = pb.GenerateRequest(text="abc").SerializeToString().replace(b"abc", b"a\xff\xfe")
    with grpc.insecure_channel(cluster.addresses.grpc) as channel:
        call = channel.unary_unary("/pagefleet.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_another_model_is_not_found(client: Client):
    with pytest.raises(ModelNotFound):
        client.generate("x", GREEDY, model="nobody")


def test_an_openai_client_leaves_nothing_behind(cluster, settled_state):
    """It hangs up, has no more patience, or is late."""
    question = [{"role": "user", "content": "Which one is it?"}]
    asked = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    chat = asked | {"messages": question, "max_tokens": 900}
    with httpx.Client(verify=False) as http:
        url = f"http://{cluster.addresses.http}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", http_client=http)
        with client.chat.completions.create(**chat, stream=True) as stream:
            next(stream)
        with client.responses.create(
            **asked, input="Which one?", max_output_tokens=900, stream=True
        ) as events:
            next(events)
        impatient = client.with_options(timeout=0.1, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(**chat)
        with pytest.raises(openai.InternalServerError) as late:
            client.chat.completions.create(**chat, extra_headers={"x-request-timeout-ms": "100"})
        assert late.value.code == "deadline_exceeded"
    settled_state()


def test_http_answers_as_grpc_does(cluster, client: Client):
    expected = client.generate("Over HTTP", GREEDY).text
    body = {"model": "tiny", "prompt": "Over HTTP", "max_tokens": 40, "temperature": 0}
    with httpx.Client(base_url=f"http://{cluster.addresses.http}/v1", timeout=60) as http:
        reply = http.post("/completions", json=body | {"ignore_eos": True}).json()
        assert reply["choices"][0]["text"] == expected
        assert http.post("/completions", json=body | {"top_p": 7}).status_code == 400
        assert http.post("/completions", json=body | {"model": "nobody"}).status_code == 404
