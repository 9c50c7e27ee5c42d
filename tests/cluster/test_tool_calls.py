"""Calls in each family's format, whole and cut into any pieces."""

import json
import random

import pytest
from llguidance import LLMatcher

from pagefleet.cluster.chat_template import ChatTemplate
from pagefleet.cluster.tool_calls import (
    ForcedCall,
    Tool,
    ToolCallReader,
    ToolFormat,
    forced_grammar,
    format_of,
)
from pagefleet.protos.errors import InvalidArgument

WEATHER = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {}}})
TIME = Tool("time")
NAMES = ["weather", "time"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    reader = ToolCallReader(form, NAMES)
    found = [reader.push(piece) for piece in pieces] + [reader.flush()]
    calls = [call for _, calls in found for call in calls]
    assert len({call.id for call in calls}) == len(calls)
    content = "".join(content for content, _ in found)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    borders = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


K = ("weather", {"city": "Köln"})
CASES = [
    (ToolFormat.TAGGED, CALL, ("", [K])),
    (ToolFormat.TAGGED, f"Let me see.\n{CALL}\n{OTHER}", ("Let me see.\n", [K, ("time", {})])),
    (ToolFormat.TAGGED, "a < b <tool_ and <tool_call", ("a < b <tool_ and <tool_call", [])),
    (
        ToolFormat.TAGGED,
        "<tool_call>\n{oops}\n</tool_call>!",
        ("<tool_call>\n{oops}\n</tool_call>!", []),
    ),
    (ToolFormat.TAGGED, CALL[:30], (CALL[:30], [])),
    (ToolFormat.TAGGED, CALL.replace("weather", "nobody"), (CALL.replace("weather", "nobody"), [])),
    (ToolFormat.OBJECT, '{"name": "weather", "parameters": {"city": "Köln"}}', ("", [K])),
    (ToolFormat.OBJECT, '{"name": "none"}', ('{"name": "none"}', [])),
    (ToolFormat.OBJECT, " Sure: {}", (" Sure: {}", [])),
    (ToolFormat.LIST, '[{"name": "weather", "arguments": {"city": "Köln"}}]', ("", [K])),
    (ToolFormat.LIST, "[1, 2]", ("[1, 2]", [])),
    (ToolFormat.LIST, "[" * 5000, ("[" * 5000, [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_reads_calls_however_they_come(form, text, expected):
    for seed in range(20):
        assert read(form, cut(text, seed)) == expected
    assert read(form, list(text)) == expected


def test_formats_by_template():
    assert format_of("{% for t in tools %}<tool_call>", knows_tools=True) is ToolFormat.TAGGED
    assert format_of("{{ tools }}[TOOL_CALLS]", knows_tools=True) is ToolFormat.LIST
    assert format_of('{{ tools }}{"name": , "parameters": }', knows_tools=True) is ToolFormat.OBJECT
    assert format_of("{{ messages }}", knows_tools=False) is ToolFormat.TAGGED


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("form", ToolFormat)
def test_forced_calls_are_such_calls(form, several):
    grammar = forced_grammar(form, [WEATHER, TIME], ForcedCall(several=several))
    assert LLMatcher.validate_grammar(grammar) == ""
    named = forced_grammar(form, [WEATHER, TIME], ForcedCall("time"))
    assert "weather" not in named
    with pytest.raises(InvalidArgument):
        forced_grammar(form, [TIME], ForcedCall("weather"))


def test_templates_that_know_tools_get_them():
    template = ChatTemplate("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}", {})
    assert template.render([{"role": "user", "content": "x"}], [WEATHER, TIME]) == "weather;time;"
    assert template.render([{"role": "user", "content": "x"}]) == ""


def test_templates_that_know_none_get_instructions():
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {})
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "time", "arguments": {"zone": 1}}}],
        },
        {"role": "tool", "content": "noon"},
    ]
    text = template.render(messages, [WEATHER])
    assert text.startswith("[system]Be kind.\n\nYou may call")
    assert '"name": "weather"' in text
    assert '[assistant]<tool_call>\n{"name": "time", "arguments": {"zone": 1}}' in text
    assert text.endswith("[user]<tool_response>\nnoon\n</tool_response>")


def test_template_variables():
    template = ChatTemplate("{{ messages[0].content }}{{ thinking }}", {"bos_token": "<s>"})
    message = [{"role": "user", "content": "x"}]
    assert template.render(message, variables={"thinking": True}) == "xTrue"
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidArgument, match="cannot be set"):
            template.render(message, variables={name: 1})
