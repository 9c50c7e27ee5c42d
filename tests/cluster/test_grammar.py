"""Grammars out of what clients send, and what of it is refused."""

import json

import pytest
from llguidance import LLMatcher

from pagefleet.cluster import grammar
from pagefleet.cluster.grammar import check_grammar
from pagefleet.protos.errors import InvalidArgument


@pytest.mark.parametrize(
    "text",
    [
        grammar.json_object(),
        grammar.json_schema({"type": "array", "items": {"type": "integer"}}),
        grammar.json_schema('{"$ref": "#/$defs/a", "$defs": {"a": {"enum": ["x"]}}}'),
        grammar.json_schema(True),
        grammar.regex("[a-z]+[0-9]{2}"),
        grammar.choice(["yes", 'no "really"', "\n"]),
        "",
    ],
)
async def test_good_ones(text):
    await check_grammar(text)


@pytest.mark.parametrize(
    "text",
    [
        grammar.json_schema({"type": "nope"}),
        grammar.json_schema({"$ref": "https://example.com/schema.json"}),
        grammar.json_schema({"pad": "x" * 300_000}),
        grammar.json_schema({"enum": []}),
        grammar.json_schema({"type": ["nope"] * 2000}),
        grammar.regex("("),
        "start: (",
        "start: nothing",
        "{",
        '{"grammars": 3}',
        "\x00",
    ],
)
async def test_bad_ones_are_the_clients(text):
    with pytest.raises(InvalidArgument) as caught:
        await check_grammar(text)
    assert caught.value.field == "response_format"
    assert "\n" not in caught.value.problem


@pytest.mark.parametrize("schema", ["{", "3", '"x"', "\ud800"])
def test_what_is_no_schema(schema):
    with pytest.raises(InvalidArgument):
        grammar.json_schema(schema)
    with pytest.raises(InvalidArgument):
        grammar.choice(["a", ""])


def test_json_is_kept_as_it_is():
    schema = {"type": "object", "properties": {"ü": {"const": 'a"b'}}}
    assert not LLMatcher.validate_grammar(grammar.json_schema(json.dumps(schema)))
