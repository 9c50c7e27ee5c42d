"""The HTTP front over a live uvicorn, with the official `openai` client and with plain httpx."""

import asyncio

import httpx
import openai
import pytest
from gateway_fakes import ids_of, make_card, until
from http_front import HttpFront

from pagefleet.protos.messages import FinishReason, Refused

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def front():
    async with HttpFront() as made:
        yield made


# -- with the openai client ------------------------------------------------------------------


async def test_chat(front):
    front.say("Grüße 🙂")
    front.engine.cached_tokens = 4
    reply = await front.openai.chat.completions.create(model="tiny", messages=HELLO, seed=7)
    (choice,) = reply.choices
    assert choice.message.content == "Grüße 🙂"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert reply.usage.prompt_tokens == len("<user>hello\n<assistant>")
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.model == "tiny"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model_extra["pagefleet"]["seeds"] == [7]


async def test_chat_stream_with_usage(front):
    front.say("one two")
    stream = await front.openai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "one two", 1: "one two"}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == 2 * (len("one two") + 1)
    assert usage.prompt_tokens == len("<user>hello\n<assistant>")


async def test_completion_with_everything(front):
    reply = await front.openai.completions.create(
        model="tiny",
        prompt=["ab", "cd"],
        n=2,
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        stop=["zz"],
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={"65": 5},
        logprobs=2,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True},
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == 6
    assert reply.usage.completion_tokens == 16
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert all(len(best) == 2 for best in logprobs.top_logprobs)
    sampling = front.engine.submitted[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p) == (2**64 - 1, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.logit_bias, sampling.ignore_eos) == (((65, 5.0),), True)


async def test_chat_logprobs(front):
    reply = await front.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert "".join(token.token for token in content) == reply.choices[0].message.content
    assert [token.token for token in content] == [bytes(t.bytes).decode() for t in content]
    assert all(len(token.top_logprobs) == 2 for token in content)


async def test_prompts_as_tokens(front):
    for prompt, expected in (([5, 6], [(5, 6)]), ([[5], [6, 7]], [(5,), (6, 7)])):
        front.engine.submitted.clear()
        await front.openai.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert [r.prompt_token_ids for r in front.engine.submitted] == expected


async def test_models(front):
    front.controller.cards = (make_card("tiny"), make_card("org/other"))
    assert [model.id async for model in front.openai.models.list()] == ["tiny", "org/other"]
    assert (await front.openai.models.retrieve("org/other")).id == "org/other"
    with pytest.raises(openai.NotFoundError):
        await front.openai.models.retrieve("missing")


async def test_content_parts_are_joined(front):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await front.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1
    )
    assert front.engine.submitted[0].prompt_token_ids == tuple(ids_of("<user>ab\n<assistant>"))


async def test_the_clients_errors(front):
    with pytest.raises(openai.NotFoundError) as not_found:
        await front.openai.chat.completions.create(model="other", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await front.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    front.controller.answers.append(Refused("k", 1, "Overloaded", "full", 1.5, "tok"))
    with pytest.raises(openai.RateLimitError) as limited:
        await front.openai.chat.completions.create(model="tiny", messages=HELLO)
    headers = limited.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
    assert headers["retry-token"] == "tok"


async def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(front):
    front.engine.token_budget = 5
    stream = await front.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=50, stream=True
    )
    assert (await anext(aiter(stream))).choices
    for leader in front.leaders:
        leader.kill()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "unavailable"


# -- plain HTTP ------------------------------------------------------------------------------


async def test_events_end_with_done_and_hide_usage_unless_asked(front):
    front.say("abc")
    events = await front.events(CHAT, {"messages": HELLO})
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_no_event_shows_a_stop_string_or_its_logprobs(front):
    front.say("abcDEFGHIJ")
    body = {"prompt": "x", "stop": "DEFGHIJ", "logprobs": 0, "max_tokens": 50}
    events = await front.events(COMPLETIONS, body)
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == "abc"
    whole = (await front.post(COMPLETIONS, body)).json()["choices"][0]
    assert (whole["text"], whole["logprobs"]["tokens"]) == ("abc", ["a", "b", "c"])


async def test_two_prompts_stream_side_by_side(front):
    events = await front.events(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert {index: len(text) for index, text in texts.items()} == {0: 3, 1: 3, 2: 3, 3: 3}


async def test_kv_exhausted_is_length_with_an_extension(front, monkeypatch):
    real = front.engine._step

    def outgrow(live, index):
        delta = real(live, index)
        if delta.first_position < 3:
            return delta
        return delta._replace(
            token_ids=(),
            finish_reason=FinishReason.KV_EXHAUSTED,
            usage=front.engine._usage(live.request, delta.first_position),
        )

    monkeypatch.setattr(front.engine, "_step", outgrow)
    reply = (await front.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9})).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["pagefleet"] == {"finish_reason": "kv_exhausted"}
    assert len(choice["text"]) == 3


BAD_BODIES = [
    (CHAT, b"{", "body"),
    (CHAT, b"[]", "body"),
    (CHAT, b'{"messages": "hi"}', "messages"),
    (CHAT, b"{}", "messages"),
    (CHAT, b'{"messages": []}', "messages"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "body"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "body"),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', None),
    (COMPLETIONS, b'{"prompt": ""}', None),
    (COMPLETIONS, b'{"prompt": []}', "prompt"),
    (COMPLETIONS, b'{"prompt": [[]]}', "prompt"),
    (COMPLETIONS, b'{"prompt": [1, 999]}', "prompt"),
    (COMPLETIONS, b'{"prompt": [1, "x"]}', None),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": "hot"}', "temperature"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": 2147483648}', "max_tokens"),
    (COMPLETIONS, b'{"prompt": "x", "n": 4096}', "n"),
    (COMPLETIONS, b'{"prompt": "x", "seed": 99999999999999999999999}', "seed"),
    (COMPLETIONS, b'{"prompt": "x", "stop": [""]}', "stop"),
    (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
    (COMPLETIONS, b'{"prompt": "x", "echo": true}', "echo"),
    (COMPLETIONS, b'{"prompt": "x", "admission_class": "gold"}', "admission_class"),
    (CHAT, b'{"messages": [{"role": "u", "content": "x"}], "tools": [{}]}', "tools.0.type"),
    (CHAT, b'{"messages": [{"role": "u", "content": "x"}], "top_logprobs": 2}', "top_logprobs"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
async def test_a_bad_body_is_400_with_its_param(front, path, body, param):
    if body == b'{"prompt": ""}':
        front.controller.cards = (make_card(tokenizer_dir="/no-bos"),)
        await front.gateway.models()
    response = await front.http.post(path, content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert "retry-after" not in response.headers
    assert not front.engine.submitted


async def test_max_tokens_zero_and_null(front):
    reply = (await front.post(COMPLETIONS, {"prompt": "x", "max_tokens": 0})).json()
    assert reply["choices"][0]["text"] == ""
    assert reply["choices"][0]["finish_reason"] == "length"
    front.say("abc")
    reply = (await front.post(COMPLETIONS, {"prompt": "x", "max_tokens": None})).json()
    assert reply["choices"][0]["text"] == "abc"


async def test_an_oversized_body_is_refused(front):
    response = await front.http.post(CHAT, content=b" " * (17 * 2**20))
    assert response.status_code == 400
    assert "bytes" in response.json()["error"]["message"]


STATUSES = [
    (Refused("k", 1, "InvalidArgument", "can never fit"), 400, None),
    (Refused("k", 1, "Unauthenticated", "who?"), 401, None),
    (Refused("k", 1, "PermissionDenied", "no"), 403, None),
    (Refused("k", 1, "ModelNotFound", "no"), 404, None),
    (Refused("k", 1, "Overloaded", "full", 0.25), 429, ("1", "250")),
    (Refused("k", 1, "Unavailable", "none", 2.0), 503, ("2", "2000")),
    (Refused("k", 1, "DeadlineExceeded", "late"), 504, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refused", "status", "hint"), STATUSES)
async def test_every_refusal_has_its_status_and_a_hint_only_where_it_helps(
    front, refused, status, hint, stream
):
    front.controller.answers.append(refused)
    response = await front.post(CHAT, {"messages": HELLO, "stream": stream})
    assert response.status_code == status
    headers = response.headers
    found = headers.get("retry-after"), headers.get("retry-after-ms")
    assert found == (hint or (None, None))
    assert response.json()["error"]["message"]


async def test_our_own_bug_is_500_and_tells_nothing(front, caplog):
    front.controller.answers.append(KeyError("/secret/path"))
    response = await front.post(CHAT, {"messages": HELLO})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_by_header(front, stream):
    front.controller.is_full = True
    headers = {"x-request-timeout-ms": "200"}
    response = await front.post(CHAT, {"messages": HELLO, "stream": stream}, **headers)
    assert response.status_code == 504
    await until(lambda: front.controller.released, front.controller.changed)
    bad = await front.post(CHAT, {"messages": HELLO}, **{"x-request-timeout-ms": "soon"})
    assert bad.status_code == 400


async def test_unknown_paths_and_methods_have_openais_shape(front):
    response = await front.http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert (await front.http.get(CHAT)).status_code == 405


async def test_health_and_readiness(front):
    assert (await front.http.get("/health")).status_code == 200
    await front.gateway.models()
    assert (await front.http.get("/ready")).status_code == 200
    front.controller.cards = ()
    await front.gateway.models()
    assert (await front.http.get("/ready")).status_code == 503
    response = await front.post(CHAT, {"messages": HELLO})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


# -- clients that go away --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_client_that_goes_away_frees_its_place(front, where, stream):
    front.controller.is_full = where == "queue"
    front.engine.token_budget = 5
    if where == "prefill":
        front.engine.gate.clear()
    body = {"messages": HELLO, "stream": stream, "max_tokens": 50}
    async with httpx.AsyncClient(base_url=front.url, verify=False) as client:
        post = asyncio.create_task(client.post(CHAT, json=body))
        if where == "queue":
            await until(lambda: front.controller.queue, front.controller.changed)
        else:
            await until(lambda: front.engine.submitted, front.engine.changed)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    await until(lambda: front.controller.released, front.controller.changed)
    if where != "queue":
        await until(lambda: front.engine.cancelled, front.engine.changed)
    assert front.gateway.num_running == 0


async def test_many_streams_with_disconnects_leave_nothing(front):
    async def one(i: int) -> None:
        body = {"prompt": f"p{i}", "max_tokens": 40, "stream": True}
        async with front.http.stream("POST", COMPLETIONS, json=body) as response:
            async for _ in response.aiter_lines():
                if i % 5 == 0:
                    return

    await asyncio.gather(*(one(i) for i in range(60)))
    await until(lambda: not front.engine.num_live, front.engine.changed)
    assert front.gateway._running == {}
