"""What a client may ask an answer to look like, as the grammars that workers follow.

JSON, JSON schemas, regular expressions and choices become llguidance's text, checked here, so
that no engine meets a grammar that it cannot read. Knows no tokenizer and no request.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import cast

from llguidance import LLMatcher

from ..protos.errors import InvalidArgument

FIELD = "response_format"
_MAX_CHARACTERS = 256 * 1024
_INLINE_CHARACTERS = 2000
_MAX_CHOICES = 1024

Schema = Mapping[str, object]


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Schema | bool | str) -> str:
    """JSON that fits a schema. Raises InvalidArgument for text that is none."""
    if isinstance(schema, str):
        schema = _parse(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _parse(text: str) -> Schema | bool:
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"is no JSON: {error}") from None
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidArgument(FIELD, "a JSON schema is an object")
    return cast(Schema, schema)


def regex(pattern: str) -> str:
    """The whole answer matches."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of these, and nothing else."""
    if not texts or len(texts) > _MAX_CHOICES or not all(texts):
        raise InvalidArgument(FIELD, f"needs 1 to {_MAX_CHOICES} choices, none of them empty")
    return "start: " + " | ".join(map(json.dumps, texts))


async def check_grammar(grammar: str) -> None:
    """Raises InvalidArgument for what no engine could follow."""
    if not grammar:
        return
    if len(grammar) > _MAX_CHARACTERS:
        raise InvalidArgument(FIELD, f"longer than {_MAX_CHARACTERS} characters")
    try:
        if len(grammar) <= _INLINE_CHARACTERS:
            problem = LLMatcher.validate_grammar(grammar)
        else:
            problem = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
    except ValueError as error:
        problem = str(error)
    if problem and not problem.startswith("WARNING"):
        raise InvalidArgument(FIELD, problem.partition("\n")[0])
