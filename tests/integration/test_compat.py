"""LangChain's and LiteLLM's OpenAI classes at a real cluster; skipped without the extra `compat`.

Each of them is asked plainly, as a stream, for a tool call and for JSON of a schema, and with
mistakes: what matters is that their own readers and checks accept what is answered.
"""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from pagefleet.cluster.client import Client
from pagefleet.protos.messages import SamplingParams

# their own deprecations are theirs
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

MESSAGES = [{"role": "user", "content": "Which one is it?"}]
PROMPT = "<|start|><|user|>Which one is it?\n<|assistant|>"
NUM_TOKENS = 12
# Random weights like white space, greedy ones without end: these get through a grammar.
ROOMY = {"max_tokens": 300, "temperature": 1.0, "seed": 4}


class Verdict(BaseModel):
    """What the model thinks of a block."""

    is_free: bool
    kind: Literal["block", "lease"]


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": Verdict.model_json_schema()},
}


@pytest.fixture
def expected(client: Client) -> str:
    """The greedy answer, by our own client."""
    return client.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)).text


@pytest.fixture
def url(cluster) -> str:
    return f"http://{cluster.addresses.http}/v1"


class TestLangChain:
    @pytest.fixture
    def chat(self, url: str):
        chat_models = pytest.importorskip("langchain_openai")
        return chat_models.ChatOpenAI(
            base_url=url,
            api_key="none",
            model="tiny",
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            max_retries=0,
            stream_usage=True,
        )

    def test_plain_and_streaming(self, chat, expected, settled_state):
        reply = chat.invoke(MESSAGES)
        assert reply.content == expected
        assert reply.usage_metadata["output_tokens"] <= NUM_TOKENS
        whole = None
        for chunk in chat.stream(MESSAGES):
            whole = chunk if whole is None else whole + chunk
        assert whole.content == expected
        assert whole.usage_metadata["total_tokens"] == reply.usage_metadata["total_tokens"]
        settled_state()

    def test_tools_and_schemas(self, chat):
        chat = chat.model_copy(update=ROOMY)
        caller = chat.bind_tools([TOOL], tool_choice="look")
        (call,) = caller.invoke(MESSAGES).tool_calls
        assert call["name"] == "look"
        assert Verdict.model_validate(call["args"])
        parsed = chat.with_structured_output(Verdict, method="json_schema").invoke(MESSAGES)
        assert isinstance(parsed, Verdict)

    def test_mistakes(self, chat):
        with pytest.raises(openai.BadRequestError):
            chat.invoke(MESSAGES, top_p=7.0)
        with pytest.raises(openai.NotFoundError):
            chat.invoke(MESSAGES, model="nobody")


class TestLiteLLM:
    @pytest.fixture
    def complete(self, url: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
        litellm = pytest.importorskip("litellm")

        def call(model: str = "tiny", **options: object):
            given = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "num_retries": 0} | options
            return litellm.completion(
                f"openai/{model}", messages=MESSAGES, base_url=url, api_key="none", **given
            )

        return call

    def test_plain_and_streaming(self, complete, expected, settled_state):
        reply = complete()
        assert reply.choices[0].message.content == expected
        chunks = list(complete(stream=True, stream_options={"include_usage": True}))
        parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(parts) == expected
        (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert usage.total_tokens == reply.usage.total_tokens
        settled_state()

    def test_tools_and_schemas(self, complete):
        reply = complete(tools=[TOOL], tool_choice="required", **ROOMY)
        call = reply.choices[0].message.tool_calls[0]
        assert call.function.name == "look"
        assert Verdict.model_validate_json(call.function.arguments)
        schema = {"name": "verdict", "schema": Verdict.model_json_schema(), "strict": True}
        response_format = {"type": "json_schema", "json_schema": schema}
        reply = complete(response_format=response_format, **ROOMY)
        assert Verdict.model_validate(json.loads(reply.choices[0].message.content))

    def test_mistakes(self, complete):
        with pytest.raises(openai.BadRequestError):
            complete(top_p=7.0)
        with pytest.raises(openai.NotFoundError):
            complete("nobody")
