"""What the official `openai` client makes of answers, errors, deadlines and refusals."""

import asyncio
import itertools
from types import SimpleNamespace

import httpx
import openai
import pytest
from gateway_fakes import until
from http_front import HttpFront
from pydantic import BaseModel

from pagefleet.protos.messages import Refused

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}<assistant>"
)
HELLO = [{"role": "user", "content": "hello"}]
LONG = {"extra_body": {"ignore_eos": True}}
LATE = {"extra_headers": {"x-request-timeout-ms": "500"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(client, **options: object):
    return client.chat.completions.create(model="tiny", messages=HELLO, **options)


def complete(client, **options: object):
    return client.completions.create(model="tiny", prompt="hello", max_tokens=400, **options)


def respond(client, **options: object):
    return client.responses.create(model="tiny", input="hello", **options)


@pytest.fixture
async def front():
    async with HttpFront(TEMPLATE) as made:
        yield made


@pytest.fixture
def sync_client(front):
    with httpx.Client(verify=False) as http:
        yield openai.OpenAI(
            base_url=f"{front.url}/v1", api_key="none", max_retries=0, http_client=http
        )


async def all_free(front: HttpFront, num_requests: int = 1) -> None:
    """The engine has dropped what it had, and the controller has the leases back."""
    controller, engine = front.controller, front.engine
    await until(lambda: len(controller.released) == num_requests, controller.changed)
    await until(lambda: len(engine.cancelled) == num_requests, engine.changed)
    assert (engine.num_live, front.gateway.num_running) == (0, 0)


# -- deadlines, and clients that go away -----------------------------------------------------


async def test_a_passed_deadline_is_one_error_and_not_tried_again(front):
    front.engine.gate.clear()
    client = front.openai.with_options(max_retries=2)
    asks = [ask(client, **LATE) for ask in (chat, complete, respond)]
    for error in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code) == (504, "deadline_exceeded")
    assert len(front.controller.reserved) == 3
    await all_free(front, 3)


async def test_a_deadline_in_the_middle_of_a_stream_is_an_error(front):
    front.engine.token_budget = 5
    with pytest.raises(openai.APIError) as caught:
        async for _ in await chat(front.openai, stream=True, **LATE, **LONG):
            pass
    assert caught.value.code == "deadline_exceeded"
    await all_free(front)


async def test_a_response_that_fails_says_so_last(front):
    front.engine.token_budget = 5
    stream = await respond(front.openai, stream=True, **LONG)
    events = [await anext(stream)]
    for leader in front.leaders:
        leader.kill()
    events += [event async for event in stream]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "unavailable"
    response = events[-1].response
    assert (response.status, response.error.code) == ("failed", "server_error")
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert response.output_text == "".join(said) != ""
    assert response.output[0].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_client_that_waits_no_longer_frees_its_place(front, sync_client):
    front.engine.gate.clear()
    patience = httpx.Timeout(10, read=1)
    asks = [
        chat(front.openai.with_options(timeout=patience)),
        asyncio.to_thread(chat, sync_client.with_options(timeout=patience)),
    ]
    errors = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(error) for error in errors] == [openai.APITimeoutError] * 2
    await all_free(front, 2)


async def test_leaving_a_stream_ends_its_generation(front, sync_client):
    def begin() -> None:
        front.engine.token_budget = front.engine.tokens_done + 5  # it stands still there
        front.engine.gate.set()

    for count, ask in enumerate((chat, complete, respond), start=1):
        begin()
        async with await ask(front.openai, stream=True, **LONG) as stream:
            async for _ in stream:
                break
        await all_free(front, count)
    begin()
    await asyncio.to_thread(lambda: break_out_of(chat(sync_client, stream=True, **LONG)))
    await all_free(front, 4)


def break_out_of(stream: openai.Stream) -> None:
    with stream:  # without, it is closed when garbage is next collected
        for _ in stream:
            break


# -- refusals --------------------------------------------------------------------------------


async def test_the_client_comes_back_when_it_was_told_to(front, caplog):
    front.say("Yes.")
    names = ("Overloaded", "Unavailable")
    front.controller.answers += [Refused("k", 1, name, "full", 0.02) for name in names]
    with caplog.at_level("INFO", "openai"):
        reply = await chat(front.openai.with_options(max_retries=2))
    assert reply.choices[0].message.content == "Yes."
    assert len(front.controller.reserved) == 3
    waits = [line for line in caplog.messages if line.startswith("Retrying")]
    assert len(waits) == 2
    assert all("0.02" in line for line in waits), waits


async def test_a_bug_of_ours_is_not_asked_for_again(front):
    front.controller.answers.append(KeyError("x"))
    with pytest.raises(openai.InternalServerError):
        await chat(front.openai.with_options(max_retries=2))
    assert len(front.controller.reserved) == 1


async def test_answers_and_errors_have_the_requests_id(front):
    front.say("Yes.")
    for ask, prefix in ((chat, "chatcmpl-"), (complete, "cmpl-"), (respond, "resp-")):
        reply = await ask(front.openai)
        assert reply.id.startswith(prefix)
        assert reply._request_id == reply.id
    stream = await chat(front.openai, stream=True)
    async with stream:
        assert stream.response.headers["x-request-id"].startswith("chatcmpl-")
        async for _ in stream:
            pass
    front.controller.answers.append(Refused("k", 1, "Overloaded", "full", 1.0))
    with pytest.raises(openai.RateLimitError) as caught:
        await chat(front.openai, extra_body={"request_id": "mine"})
    assert caught.value.request_id == "mine"
    reply = await chat(front.openai, extra_body={"request_id": "with\r\nbreak"})
    assert (reply.id, reply._request_id) == ("with\r\nbreak", None)


async def test_prompts_of_one_body_are_one_request(front):
    """So that its id, which all choices have, cancels all of them."""
    front.engine.token_budget = 4
    stream = await front.openai.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=400, stream=True, **LONG
    )
    chunk = await anext(stream)
    assert front.gateway.cancel("", chunk.id) == 2
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "cancelled"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "file-1"}}
TEXT = {"type": "text", "text": "What is it?"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}


def said(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [TEXT, *parts]}]}


UNSUPPORTED = [
    (said(IMAGE), "messages.0.content.1.type"),
    (said(AUDIO), "messages.0.content.1.type"),
    (said(FILE), "messages.0.content.1.type"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages.0.function_call",
    ),
    ({"modalities": ["text", "audio"]}, "modalities.1"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json"),
    ({"extra_body": {"prompt_logprobs": 0}}, "prompt_logprobs"),
    ({"extra_body": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ({"extra_body": {"chat_template": "x"}}, "chat_template"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
]
UNSUPPORTED_RESPONSES = [
    ({"text": "json"}, "text"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input.0.content.0.type",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ({"input": []}, "input"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": SCHEMA}}, "text.format"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 100, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
]


async def test_what_is_not_supported_is_refused_by_its_name(front):
    chats = [(front.openai.chat.completions.create, {"messages": HELLO}, *c) for c in UNSUPPORTED]
    responses = [(front.openai.responses.create, {"input": "x"}, *c) for c in UNSUPPORTED_RESPONSES]
    for create, body, options, param in [*chats, *responses]:
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**({"model": "tiny"} | body | options))
        error = caught.value
        assert (error.param, error.type) == (param, "invalid_request_error"), options
        assert error.body["message"].startswith(f"{param}: "), error.body
    assert not front.engine.submitted


async def test_what_only_concerns_openais_own_books_is_let_through(front):
    front.say("Yes.")
    common = {
        "metadata": {"a": "b"},
        "store": True,
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
    }
    reply = await chat(
        front.openai, **common, reasoning_effort="none", modalities=["text"], verbosity="medium"
    )
    assert reply.choices
    unset = ("top_k", "min_p", "repetition_penalty", "cache_salt")
    assert (await chat(front.openai, extra_body=dict.fromkeys(unset))).choices
    reply = await respond(
        front.openai,
        **common,
        reasoning={"effort": "none", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        text={"verbosity": "medium"},
        truncation="disabled",
    )
    assert (reply.status, reply.reasoning.effort) == ("completed", "none")


async def test_what_is_not_here_is_not_found(front):
    for ask in (
        front.openai.models.retrieve("missing"),
        front.openai.responses.retrieve("resp_1"),
        front.openai.responses.cancel("resp_1"),
        front.openai.files.list(),
        front.openai.moderations.create(input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask
        assert caught.value.type == "not_found_error"
    assert "POST /v1/moderations" in caught.value.body["message"]


# -- shapes ----------------------------------------------------------------------------------


async def test_answers_are_what_the_clients_own_types_say(front):
    """Its validation, which is off by default, is on. It has no type for completions in chunks."""
    strict = openai.AsyncOpenAI(
        base_url=f"{front.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=front.http,
        _strict_response_validation=True,
    )
    assert [model.id async for model in strict.models.list()] == ["tiny"]
    front.say(f"I look.{CALL}")
    usage = {"stream_options": {"include_usage": True}}
    every = {"tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 2}
    assert (await chat(strict, **every)).choices[1].message.tool_calls
    assert [chunk async for chunk in await chat(strict, stream=True, **usage, **every)]
    assert (await complete(strict, n=2, logprobs=2)).choices
    flat = {"type": "function", "strict": True, **TOOL["function"]}
    every = {"tools": [flat], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    assert len((await respond(strict, **every)).output) == 2
    assert [event async for event in await respond(strict, stream=True, **every)]


class Person(BaseModel):
    name: str


async def test_a_stream_gives_what_the_whole_answer_gives(front):
    """Two samples, with everything there is, put together by the client's own helper."""
    front.say('{"name": "Ada"}STOP and no more')
    options = {
        "model": "tiny",
        "messages": HELLO,
        "n": 2,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["STOP", "zzz"],
        "logit_bias": {"65": -5},
        "max_completion_tokens": 60,
        "response_format": Person,
    }
    whole = await front.openai.chat.completions.parse(**options)
    async with front.openai.chat.completions.stream(
        **options, stream_options={"include_usage": True}
    ) as stream:
        streamed = await stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.message.parsed == other.message.parsed == Person(name="Ada")
        assert one.finish_reason == other.finish_reason == "stop"
        assert one.logprobs.content == other.logprobs.content
        assert "".join(token.token for token in one.logprobs.content) == '{"name": "Ada"}'
    assert whole.usage == streamed.usage
    sampling = front.engine.submitted[-1].sampling
    assert (sampling.seed, sampling.max_tokens) == (3, 60)
    assert sampling.logit_bias == ((65, -5.0),)


async def test_all_chunks_have_one_time(front, monkeypatch):
    front.say("Yes.")
    passing = SimpleNamespace(time=itertools.count(1000).__next__)
    monkeypatch.setattr("pagefleet.cluster.openai_api.time", passing)
    times = {chunk.created async for chunk in await chat(front.openai, stream=True)}
    assert times == {1000}


async def test_a_response_comes_in_its_order_and_is_parsed(front):
    front.say('{"name": "Ada"}')
    async with front.openai.responses.stream(
        model="tiny", input="Who?", text_format=Person
    ) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert response.output_parsed == Person(name="Ada")
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_response_that_is_cut_says_so_of_its_item(front):
    for limit in ("max_output_tokens", "max_tokens"):
        reply = await respond(front.openai, extra_body={limit: 3})
        assert (reply.status, reply.output[0].status) == ("incomplete", "incomplete")
        assert len(reply.output_text) == 3
