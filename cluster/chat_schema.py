"""The body of `POST /v1/chat/completions`: a conversation, tools, and how the answer is to be.

Only text is understood; parts and messages of another kind are refused by name.
"""

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..protos.errors import InvalidArgument
from ..protos.messages import SamplingParams
from .generation import ChatMessage, ChatPrompt
from .openai_schema import Items, ReasoningEffort, RequestBody, template_kwargs
from .tool_calls import ForcedCall, Tool

_MAX_TOOLS = 128
_ROLES = {"developer": "system"}  # OpenAI's newer name; templates know the old one


class TextPart(BaseModel):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """A call that the assistant has made. arguments: JSON text."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str

    @property
    def as_json(self) -> dict[str, object]:
        """As templates read it: arguments as values, where they are some."""
        try:
            arguments: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class MadeCall(BaseModel):
    """An entry of an assistant message's `tool_calls`."""

    model_config = ConfigDict(strict=True)

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: str
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: None = None  # of a time before tool_calls
    audio: None = None

    def as_template_message(self) -> ChatMessage:
        """What a chat template reads; what is not there is left out."""
        message: dict[str, object] = {"role": _ROLES.get(self.role, self.role)}
        if self.content is None or isinstance(self.content, str):
            message["content"] = self.content or self.refusal or ""
        else:
            message["content"] = "".join(part.text for part in self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.as_json}
                for call in self.tool_calls
            ]
        return message


class OfferedFunction(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, object] | None = None

    @property
    def tool(self) -> Tool:
        """As the gateway knows it."""
        if self.parameters is None:
            return Tool(self.name, self.description or "")
        return Tool(self.name, self.description or "", self.parameters)


class OfferedTool(BaseModel):
    """An entry of `tools`."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: OfferedFunction


class ChosenName(BaseModel):
    """The function of a `tool_choice`."""

    model_config = ConfigDict(strict=True)

    name: str


class ChosenTool(BaseModel):
    """A `tool_choice` that names one function."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: ChosenName


class ChatBody(RequestBody):
    """`POST /v1/chat/completions`."""

    unsupported = (
        *RequestBody.unsupported,
        "audio",
        "prediction",
        "web_search_options",
        "continue_final_message",
        "chat_template",
        "documents",
        "echo",
    )

    messages: Items[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Items[OfferedTool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: Literal[True] | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: Items[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None

    def refuse_unsupported(self) -> None:
        """Also what contradicts itself."""
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidArgument("tool_choice", "needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidArgument("tools", "two have the same name")

    @property
    def names(self) -> dict[str, str]:
        """Limits have newer names here."""
        own = {"sampling.logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            own["sampling.max_tokens"] = "max_completion_tokens"
        return super().names | own

    @property
    def offered(self) -> tuple[Tool, ...]:
        """What the model is told of; nothing where it may not call."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool.function.tool for tool in self.tools or ())

    @property
    def prompt(self) -> ChatPrompt:
        """The conversation."""
        return ChatPrompt(
            [message.as_template_message() for message in self.messages],
            self.offered,
            self._forced_call,
            template_kwargs(self.chat_template_kwargs, self.reasoning_effort),
        )

    @property
    def _forced_call(self) -> ForcedCall | None:
        several = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, ChosenTool):
            return ForcedCall(self.tool_choice.function.name, several=False)
        return ForcedCall(several=several) if self.tool_choice == "required" else None

    @property
    def sampling_params(self) -> SamplingParams:
        """Up to the model's context where no limit is given."""
        newer = self.max_completion_tokens
        return self.sampling(
            max_tokens=self.max_tokens if newer is None else newer,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
