"""`/v1/responses` with the official `openai` client."""

import json

import openai
import pytest
from http_front import HttpFront
from pydantic import BaseModel

from pagefleet.protos.messages import Refused

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}<assistant>{# </think> #}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


async def respond(front: HttpFront, **options: object):
    return await front.openai.responses.create(**({"model": "tiny", "input": "hi"} | options))


@pytest.fixture
async def front():
    async with HttpFront(TEMPLATE) as made:
        yield made


async def test_text(front):
    front.say("Grüße 🙂")
    reply = await respond(front, instructions="Be kind.", metadata={"a": "b"})
    assert (reply.status, reply.output_text) == ("completed", "Grüße 🙂")
    assert reply.usage.output_tokens == 13
    assert reply.usage.total_tokens == reply.usage.input_tokens + 13
    assert (reply.instructions, reply.metadata, reply.store) == ("Be kind.", {"a": "b"}, False)
    assert front.sent()[0] == "<system>Be kind.<user>hi<assistant>"


async def test_a_limit_makes_it_incomplete(front):
    reply = await respond(front, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert len(reply.output_text) == 3


async def test_thoughts_are_an_item(front):
    front.say("<think>hm</think>Yes.")
    reply = await respond(front)
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "hm"
    assert reply.usage.output_tokens_details.reasoning_tokens == 2
    assert reply.output_text == "Yes."


async def test_calls_and_their_results(front):
    front.say(CALL)
    reply = await respond(front, tools=[WEATHER])
    (call,) = reply.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Ulm"}
    assert reply.tools[0].name == "weather"
    front.say("Sunny.")
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump() for item in reply.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    reply = await respond(front, input=conversation, tools=[WEATHER])
    assert reply.output_text == "Sunny."
    assert "<tool>sun" in front.sent()[0]
    again = [*conversation, *[item.model_dump() for item in reply.output]]
    assert (await respond(front, input=again)).status == "completed"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Hello you", ["message"]),
        (f"<think>hm</think>Wait.{CALL}", ["reasoning", "message", "function_call"]),
    ],
)
async def test_events_build_what_is_answered(front, text, kinds):
    front.say(text)
    events = [event async for event in await respond(front, stream=True, tools=[WEATHER])]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert (final.type, final.response.status) == ("response.completed", "completed")
    assert [item.type for item in final.response.output] == kinds
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.response.output
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.response.output_text


async def test_the_openai_stream_helper_agrees(front):
    front.say(f"Wait.{CALL}")
    async with front.openai.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        reply = await stream.get_final_response()
    assert reply.output_text == "Wait."
    assert reply.output[1].name == "weather"


class Person(BaseModel):
    name: str


async def test_formats_and_logprobs(front):
    front.say('{"name": "Ada"}')
    reply = await front.openai.responses.parse(model="tiny", input="hi", text_format=Person)
    assert reply.output_parsed == Person(name="Ada")
    assert '"name"' in front.engine.submitted[-1].sampling.grammar
    reply = await respond(front, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = reply.output[0].content[0].logprobs
    assert len(entries) == 16  # with the token that ends it
    assert len(entries[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input.0"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
async def test_bad_requests(front, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await respond(front, **options)
    assert caught.value.param == param


async def test_an_error_before_the_first_token_has_its_status(front):
    front.controller.answers.append(Refused("", 0, "Overloaded", "full", 2.0))
    with pytest.raises(openai.RateLimitError):
        await respond(front, stream=True)
