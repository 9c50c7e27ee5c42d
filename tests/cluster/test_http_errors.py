"""What an OpenAI-style client is told of its mistakes."""

import pytest
from pydantic import ValidationError

from pagefleet.cluster.chat_schema import ChatBody
from pagefleet.cluster.http_errors import error_body, error_headers, problem_of
from pagefleet.cluster.openai_schema import CompletionBody
from pagefleet.cluster.responses_schema import ResponsesBody
from pagefleet.protos.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    Overloaded,
    Unavailable,
)

USER = b'"messages": [{"role": "user", "content": "x"}]'
PROBLEMS = [
    (ChatBody, b"{", "body", "Invalid JSON"),
    (ChatBody, b"{}", "messages", "required"),
    (ChatBody, b'{"messages": [{"role": "user", "content": 5}]}', "messages.0.content", "string"),
    (
        ChatBody,
        b'{"messages": [{"role": "user", "content": ["x", {"type": "text"}]}]}',
        "messages.0.content.0",
        "object",
    ),
    (
        ChatBody,
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        "messages.0.content.0.type",
        "'text', is 'image_url'",
    ),
    (ChatBody, b"{%s, " % USER + b'"tool_choice": "any"}', "tool_choice", "is 'any'"),
    (
        ChatBody,
        b"{%s, " % USER + b'"tool_choice": {"type": "custom"}}',
        "tool_choice.type",
        "custom",
    ),
    (
        ChatBody,
        b"{%s, " % USER + b'"tool_choice": {"type": "function"}}',
        "tool_choice.function",
        "required",
    ),
    (
        ChatBody,
        b"{%s, " % USER
        + b'"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}',
        "response_format.json_schema.schema",
        "object",
    ),
    (CompletionBody, b'{"prompt": null}', "prompt", "string"),
    (CompletionBody, b'{"prompt": ["x", 5]}', "prompt.1", "string"),
    (CompletionBody, b'{"prompt": "x", "stop": ["a", 5]}', "stop.1", "string"),
    (CompletionBody, b'{"prompt": "x", "logit_bias": {"5": "much"}}', "logit_bias.5", "number"),
    (ResponsesBody, b'{"input": 5}', "input", "string"),
    (
        ResponsesBody,
        b'{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}',
        "input.0.content.0.type",
        "input_image",
    ),
    (ResponsesBody, b'{"input": [{"type": "item_reference"}]}', "input.0", "must be a message"),
    (
        ResponsesBody,
        b'{"input": "x", "tool_choice": {"type": "web_search"}}',
        "tool_choice.type",
        "web_search",
    ),
]


@pytest.mark.parametrize(("kind", "body", "field", "said"), PROBLEMS)
def test_the_wrong_field_is_named_as_the_client_wrote_it(kind, body, field, said):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body)
    problem = problem_of(caught.value, body)
    assert problem.field == field
    assert said in problem.problem


MANY = 5000
FLOODS = [
    (ChatBody, b'{"messages": [%s]}'),
    (ChatBody, b'{"messages": [{"role": "user", "content": [%s]}]}'),
    (ChatBody, b"{%s, " % USER + b'"tools": [%s]}'),
    (ChatBody, b"{%s, " % USER + b'"modalities": [%s]}'),
    (CompletionBody, b'{"prompt": [[%s]]}'),
    (CompletionBody, b'{"prompt": [1, %s]}'),
    (CompletionBody, b'{"prompt": ["x", %s]}'),
    (CompletionBody, b'{"prompt": "x", "stop": [%s]}'),
    (CompletionBody, b'{"prompt": "x", "stop_token_ids": [%s]}'),
    (CompletionBody, b'{"prompt": "x", "structured_outputs": {"choice": [%s]}}'),
    (ResponsesBody, b'{"input": [%s]}'),
    (ResponsesBody, b'{"input": "x", "include": [%s]}'),
    (ResponsesBody, b'{"input": "x", "tools": [%s]}'),
]


@pytest.mark.parametrize(("kind", "body"), FLOODS)
def test_a_flood_of_mistakes_is_not_told_in_full(kind, body):
    """Else a body of 16 MiB would be answered with gigabytes of reports."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body % b", ".join([b"null"] * MANY))
    assert caught.value.error_count() < 10


def test_a_flood_of_entries_is_one_mistake():
    entries = ", ".join(f'"{number}": "x"' for number in range(MANY))
    for kind, text in (
        (CompletionBody, '{"prompt": "x", "logit_bias": {%s}}'),
        (ResponsesBody, '{"input": "x", "metadata": {%s}}'),
        (CompletionBody, '{"prompt": "x", "structured_outputs": {%s}}'),
    ):
        body = (text % entries).replace('"x"}', "null}").encode()
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(body)
        assert caught.value.error_count() == 1
        assert "1024" in problem_of(caught.value, body).problem


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (Overloaded("full", retry_after_s=0.25), {"retry-after": "1", "retry-after-ms": "250"}),
        (Unavailable("none", retry_after_s=2.0), {"retry-after": "2", "retry-after-ms": "2000"}),
        (DeadlineExceeded("late"), {"x-should-retry": "false"}),
        (InternalError("bug"), {"x-should-retry": "false"}),
        (InvalidArgument("n", "is wrong"), {}),
    ],
)
def test_a_client_is_told_whether_and_when_to_try_again(error, headers):
    assert error_headers(error) == headers


def test_a_field_has_the_name_that_the_body_had_for_it():
    error = InvalidArgument("sampling.max_tokens", "is too large")
    for names, name in (({}, "max_tokens"), ({"sampling.max_tokens": "limit"}, "limit")):
        told = error_body(error, names)["error"]
        assert (told["param"], told["message"]) == (name, f"{name}: is too large")
