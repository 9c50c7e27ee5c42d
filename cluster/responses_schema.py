"""The body of `POST /v1/responses`, and what it means for the gateway.

Nothing is stored here: a conversation comes whole with each request. What would need a store, or
tools that are not functions, is refused by name.
"""

import json
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ..protos.errors import InvalidArgument
from ..protos.messages import SamplingParams
from . import grammar
from .generation import ChatMessage, ChatPrompt
from .openai_schema import Entries, Items, ReasoningEffort, RequestBody, template_kwargs
from .tool_calls import ForcedCall, Tool

_MAX_TOOLS = 128
_ROLES = {"developer": "system"}
_LOGPROBS = "message.output_text.logprobs"


class InputText(BaseModel):
    """A part of a message; only text is understood."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[InputText]

    @property
    def message(self) -> ChatMessage:
        """As templates read it."""
        return {"role": _ROLES.get(self.role, self.role), "content": _text(self.content)}


class InputCall(BaseModel):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @property
    def message(self) -> ChatMessage:
        """As templates read it."""
        try:
            arguments: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        function = {"name": self.name, "arguments": arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class InputResult(BaseModel):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]

    @property
    def message(self) -> ChatMessage:
        """As templates read it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


def _text(given: str | list[InputText]) -> str:
    return given if isinstance(given, str) else "".join(part.text for part in given)


class InputReasoning(BaseModel):
    """Thoughts of an earlier answer; templates do without."""

    type: Literal["reasoning"]

    @property
    def message(self) -> ChatMessage | None:
        """Nothing."""
        return None


def _kind(item: object) -> str:
    kind: object = None
    if isinstance(item, dict):
        kind = cast("dict[str, object]", item).get("type")
    elif isinstance(item, BaseModel):  # when it is written out again
        kind = getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


_Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="must be a message, function_call, function_call_output or reasoning",
    ),
]


def _input_kind(value: object) -> str:
    return "items" if isinstance(value, list) else "text"


# Told apart before it is read, so that an error names the item and not the other shape.
_Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items[_Item], Tag("items")], Discriminator(_input_kind)
]


class FlatTool(BaseModel):
    """A function that the model may call; flat, as this endpoint has it."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, object] | None = None


class FlatChoice(BaseModel):
    """A `tool_choice` that names one function."""

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")

    @property
    def grammar(self) -> str:
        """Empty for text."""
        if self.type == "text":
            return ""
        if self.type == "json_object" or self.schema_ is None:
            return grammar.json_object()
        return grammar.json_schema(self.schema_)


class TextOptions(BaseModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`. Thoughts are shown whole, whatever summary is asked for."""

    effort: ReasoningEffort | None = None


class ResponsesBody(RequestBody):
    """`POST /v1/responses`."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported = (
        *RequestBody.unsupported,
        "previous_response_id",
        "conversation",
        "background",
        "prompt",
        "context_management",
    )

    input: _Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[FlatTool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: int | None = None
    include: Items[str] | None = None
    metadata: Entries[str] | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def refuse_unsupported(self) -> None:
        """Also what contradicts itself."""
        super().refuse_unsupported()
        if self.num_samples != 1:
            raise InvalidArgument("n", "must be 1 here")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidArgument("top_logprobs", f"needs include to have {_LOGPROBS}")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidArgument("tool_choice", "needs tools")
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidArgument("tools", "two have the same name")

    @property
    def names(self) -> dict[str, str]:
        """As this endpoint has them."""
        own = {
            "chat": "input",
            "chat.messages": "input",
            "sampling.logprobs": "top_logprobs",
            "reasoning_effort": "reasoning.effort",
        }
        if self.max_output_tokens is not None:
            own["sampling.max_tokens"] = "max_output_tokens"
        if self.text and self.text.format and self.text.format.type != "text":
            own[grammar.FIELD] = "text.format"
        return super().names | own

    @property
    def grammar(self) -> str:
        """What the answer has to match."""
        wanted = self.text.format.grammar if self.text and self.text.format else ""
        return wanted or super().grammar

    @property
    def offered(self) -> tuple[Tool, ...]:
        """What the model is told of."""
        if self.tool_choice == "none":
            return ()
        empty: dict[str, object] = {"type": "object", "properties": {}}
        return tuple(
            Tool(tool.name, tool.description or "", tool.parameters or empty)
            for tool in self.tools or ()
        )

    @property
    def wants_logprobs(self) -> bool:
        """Asked for by `include`."""
        return _LOGPROBS in (self.include or ())

    @property
    def prompt(self) -> ChatPrompt:
        """Instructions and conversation."""
        messages: list[ChatMessage] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            found = (item.message for item in self.input)
            messages += [message for message in found if message is not None]
        effort = None if self.reasoning is None else self.reasoning.effort
        kwargs = template_kwargs(self.chat_template_kwargs, effort)
        return ChatPrompt(messages, self.offered, self._forced, kwargs)

    @property
    def _forced(self) -> ForcedCall | None:
        if isinstance(self.tool_choice, FlatChoice):
            return ForcedCall(self.tool_choice.name, several=False)
        several = self.parallel_tool_calls is not False
        return ForcedCall(several=several) if self.tool_choice == "required" else None

    @property
    def sampling_params(self) -> SamplingParams:
        """Up to the model's context where no limit is given, also by the other endpoints' name."""
        limit = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return self.sampling(max_tokens=limit, logprobs=logprobs)
