"""Tools, formats and thoughts over HTTP, with the official `openai` client."""

import json

import openai
import pytest
from http_front import HttpFront
from llguidance import LLMatcher
from pydantic import BaseModel

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
HERMES = PLAIN + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
THINKING = PLAIN + "{% if think %}<think>\n{% endif %}{# </think> #}"
HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def chat(front: HttpFront, **options: object):
    body = {"model": "tiny", "messages": HELLO} | options
    return await front.openai.chat.completions.create(**body)


@pytest.fixture
async def front():
    async with HttpFront(HERMES) as made:
        yield made


async def test_tools_are_offered_and_calls_read(front):
    front.say(f"I look.\n{CALL}")
    reply = await chat(front, tools=[WEATHER])
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    assert call.id.startswith("call_")
    assert '"Tells it."' in front.sent()[0]


async def test_calls_in_a_stream(front):
    front.say(f"{CALL}\n{CALL}")
    stream = await chat(front, tools=[WEATHER], stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].id != calls[1].id
    assert not "".join(choice.delta.content or "" for choice in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


async def test_the_openai_stream_helper_agrees(front):
    front.say(CALL)
    async with front.openai.chat.completions.stream(
        model="tiny", messages=HELLO, tools=[WEATHER]
    ) as stream:
        reply = await stream.get_final_completion()
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "Ulm"}'


async def test_without_tools_it_is_text(front):
    front.say(CALL)
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        reply = await chat(front, **options)
        assert reply.choices[0].message.content == CALL
        assert reply.choices[0].finish_reason == "stop"
        assert "weather" not in front.sent()[0]


async def test_a_forced_call_is_a_grammar(front):
    front.say(CALL)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        await chat(front, tools=[WEATHER], tool_choice=choice)
        grammar = front.sent()[1]
        assert "<tool_call>" in grammar
        assert not LLMatcher.validate_grammar(grammar)


async def test_a_conversation_with_results(front):
    front.say("Sunny.")
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    reply = await chat(front, messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "Sunny."
    assert "<tool>sun" in front.sent()[0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "no"}},
            },
            "tool_choice",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nope"}},
                }
            },
            "response_format",
        ),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
async def test_bad_requests(front, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(front, **options)
    assert caught.value.param == param


class Person(BaseModel):
    name: str
    age: int


async def test_response_formats_reach_the_engine(front):
    front.say('{"name": "Ada", "age": 36}')
    reply = await front.openai.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Person
    )
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
    assert '"age"' in front.sent()[1]
    for extra in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"structured_outputs": {"grammar": 'start: "x"'}},
    ):
        await chat(front, extra_body=extra)
        assert front.sent()[1]
    await chat(front, response_format={"type": "text"})
    assert not front.sent()[1]
    await front.openai.completions.create(
        model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "[0-9]+"}}
    )
    assert "[0-9]+" in front.sent()[1]


@pytest.mark.parametrize("opens", [True, False])
async def test_thoughts_are_told_apart(opens):
    async with HttpFront(THINKING) as front:
        front.say(("" if opens else "<think>\n") + "hm\n</think>\n\nYes.")
        options = {"extra_body": {"chat_template_kwargs": {"think": opens}}}
        reply = await chat(front, **options)
        assert reply.choices[0].message.content == "Yes."
        assert reply.choices[0].message.reasoning_content == "hm"
        stream = await chat(front, stream=True, **options)
        parts = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(part.content or "" for part in parts) == "Yes."
        thoughts = [getattr(part, "reasoning_content", "") for part in parts]
        assert "".join(thoughts) == "hm"


async def test_embeddings_are_refused_by_name(front):
    with pytest.raises(openai.BadRequestError, match="generate text"):
        await front.openai.embeddings.create(model="tiny", input="x")
