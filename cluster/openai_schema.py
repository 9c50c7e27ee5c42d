"""The bodies of OpenAI-style requests, and what they mean for the gateway.

Field names are OpenAI's, further ones vLLM's where the meaning is equal. What is not supported is
refused by name, never ignored; names nobody knows are ignored, as OpenAI's servers do.
"""

import json
from typing import Annotated, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from ..protos.errors import InvalidArgument
from ..protos.messages import AdmissionClass, SamplingParams
from . import grammar
from .generation import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from .tool_calls import ForcedCall, Tool

_UINT64 = 2**64
_MAX_PROMPTS = 128
_MAX_TOOLS = 128
_ROLES = {"developer": "system"}  # OpenAI's newer name; templates know the old one
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chats have none


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage of the whole request."""

    include_usage: bool = False


class NamedSchema(BaseModel):
    """A JSON schema as OpenAI wraps it; `strict` makes no difference: it always is."""

    model_config = ConfigDict(strict=True)

    name: str = ""
    schema_: dict[str, object] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """`response_format`: text, any JSON object, or one that fits a schema."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def grammar(self) -> str:
        """Empty for text."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return grammar.json_object()
        if self.json_schema is None:
            raise InvalidArgument("response_format.json_schema", "is missing")
        schema = self.json_schema.schema_
        return grammar.json_object() if schema is None else grammar.json_schema(schema)


class StructuredOutputs(BaseModel):
    """vLLM's field: one way to say what the answer must match."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, object] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar_: str | None = Field(default=None, alias="grammar")

    @property
    def grammar(self) -> str:
        """Exactly one of them."""
        ways = [
            None if self.json_ is None else grammar.json_schema(self.json_),
            grammar.json_object() if self.json_object else None,
            None if self.regex is None else grammar.regex(self.regex),
            None if self.choice is None else grammar.choice(self.choice),
            self.grammar_,
        ]
        (*given,) = [way for way in ways if way is not None]
        if len(given) != 1:
            raise InvalidArgument("structured_outputs", "needs one way to say it")
        return given[0]


class RequestBody(BaseModel):
    """What chats and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[tuple[str, ...]] = ("best_of",)

    model: str = ""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    priority: int = 0
    admission_class: str = AdmissionClass.STANDARD.value
    request_id: str = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def refuse_unsupported(self) -> None:
        """InvalidArgument for the first field that is set and does nothing here."""
        for name in self.unsupported:
            value = (self.model_extra or {}).get(name)
            is_neutral = value is None or value is False or value in ("", [])
            if not is_neutral and (name, value) != ("best_of", 1):
                raise InvalidArgument(name, "is not supported")

    @property
    def grammar(self) -> str:
        """What the answer has to match; empty = anything."""
        formats = [each for each in (self.response_format, self.structured_outputs) if each]
        found = [each.grammar for each in formats]
        if sum(map(bool, found)) > 1:
            raise InvalidArgument("structured_outputs", "excludes response_format")
        return next(filter(None, found), "")

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage of the whole request."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def admission(self) -> AdmissionClass:
        """The class by its name."""
        try:
            return AdmissionClass(self.admission_class)
        except ValueError:
            known = ", ".join(AdmissionClass)
            raise InvalidArgument("admission_class", f"is none of {known}") from None

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """As the gateway wants it; ranges are checked there. As in vLLM `n` is also the number of
        beams; a single one is the greedy answer."""
        if self.use_beam_search and self.stream:
            raise InvalidArgument("stream", "beam search knows its results only at its end")
        is_greedy = self.use_beam_search and self.num_samples == 1
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=0.0 if is_greedy else _or(self.temperature, 1.0),
            top_k=max(self.top_k, 0) if self.top_k == -1 else self.top_k,  # -1 is vLLM's "off"
            top_p=_or(self.top_p, 1.0),
            min_p=self.min_p,
            # OpenAI's seeds are signed; the same bits are as good
            seed=self.seed % _UINT64 if self.seed is not None and self.seed < 0 else self.seed,
            n=self.num_samples,
            stop=self._stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self._logit_bias(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            grammar=self.grammar,
            beam_width=self.num_samples if self.use_beam_search else 0,
            length_penalty=self.length_penalty,
        )

    def _stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        try:
            return tuple(sorted((int(i), bias) for i, bias in (self.logit_bias or {}).items()))
        except ValueError:
            raise InvalidArgument("sampling.logit_bias", "its keys are token ids") from None


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
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_template_message(self) -> ChatMessage:
        """What a chat template reads; what is not there is left out."""
        message: dict[str, object] = {"role": _ROLES.get(self.role, self.role)}
        if self.content is None or isinstance(self.content, str):
            message["content"] = self.content or ""
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
        "functions",
        "function_call",
        "audio",
        "prediction",
        "web_search_options",
    )

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[OfferedTool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, object] | None = None

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
            self.chat_template_kwargs or {},
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


def _prompt_kind(value: object) -> str:
    if isinstance(value, str):
        return "text"
    items = cast(list[object], value) if isinstance(value, list) else []
    first = items[0] if items else 0
    if isinstance(first, str):
        return "texts"
    return "token_lists" if isinstance(first, list) else "tokens"


# One of four shapes; told apart by their first item, so that an error names the item and not
# three shapes that were never meant.
_PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[int], Tag("tokens")]
    | Annotated[list[list[int]], Tag("token_lists")],
    Discriminator(_prompt_kind),
]


class CompletionBody(RequestBody):
    """`POST /v1/completions`."""

    unsupported = (*RequestBody.unsupported, "echo", "suffix")

    prompt: _PromptField
    logprobs: int | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = Field(default=_DEFAULT_COMPLETION_TOKENS)

    @property
    def prompts(self) -> list[Prompt]:
        """One or more; each gets `n` choices."""
        given = self.prompt
        if isinstance(given, str):
            return [TextPrompt(given, self.add_special_tokens)]
        if len(given) > _MAX_PROMPTS and _prompt_kind(given) != "tokens":
            raise InvalidArgument("prompt", f"more than {_MAX_PROMPTS} prompts")
        prompts: list[Prompt] = []
        tokens: list[int] = []
        for item in given:
            if isinstance(item, str):
                prompts.append(TextPrompt(item, self.add_special_tokens))
            elif isinstance(item, int):
                tokens.append(item)
            else:
                prompts.append(TokenPrompt(item))
        return prompts or [TokenPrompt(tokens)]

    @property
    def sampling_params(self) -> SamplingParams:
        """16 tokens where no limit is given, as OpenAI has it."""
        return self.sampling(max_tokens=self.max_tokens, logprobs=self.logprobs)


def problem_of(error: ValidationError) -> InvalidArgument:
    """The first thing that is wrong with a body, by the path of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    tags = (
        "text",
        "texts",
        "tokens",
        "token_lists",
        "str",
        "list[TextPart]",
        "ChosenTool",
        "items",
    )
    path = [str(step) for step in first["loc"] if step not in tags]
    return InvalidArgument(".".join(path) or "body", first["msg"])


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
