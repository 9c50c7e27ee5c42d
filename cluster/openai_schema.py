"""What the bodies of OpenAI-style requests have in common, and the body of `/v1/completions`.

Field names are OpenAI's, further ones vLLM's where the meaning is equal. What is not supported is
refused by name, never ignored. What only concerns OpenAI's own books and caches (user, metadata,
store, service_tier, prompt_cache_key, …) changes nothing here and is let through, as are names
nobody knows.
"""

from typing import Annotated, ClassVar, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..protos.errors import InvalidArgument
from ..protos.messages import AdmissionClass, SamplingParams
from . import grammar
from .generation import Prompt, TextPrompt, TokenPrompt

_UINT64 = 2**64
_MAX_PROMPTS = 128
_MAX_ENTRIES = 1024
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chats have none
# Older names of what is there.
_INSTEAD = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
}

T = TypeVar("T")
# One mistake is enough: millions of them in a body would take gigabytes to tell of.
Items = Annotated[list[T], Field(fail_fast=True)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _num_entries(value: object) -> int:
    return len(cast("dict[str, object]", value)) if isinstance(value, dict) else 0


def _refuse_many(value: object) -> object:
    if _num_entries(value) > _MAX_ENTRIES:
        most = {"most": _MAX_ENTRIES}
        raise PydanticCustomError("too_many", "has more than {most} entries", most)
    return value


Entries = Annotated[dict[str, T], BeforeValidator(_refuse_many)]


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


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
    choice: Items[str] | None = None
    grammar_: str | None = Field(default=None, alias="grammar")

    @model_validator(mode="before")
    @classmethod
    def refuse_many(cls, value: object) -> object:
        """Each unknown field would be a mistake of its own."""
        return _refuse_many(value)

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
    unsupported: ClassVar[tuple[str, ...]] = (
        "best_of",
        "moderation",
        "prompt_logprobs",
        "include_stop_str_in_output",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "logits_processors",
        "return_token_ids",
        "return_tokens_as_token_ids",
        *_INSTEAD,
    )

    model: str = ""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Entries[float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
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
                instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
                raise InvalidArgument(name, f"is not supported{instead}")

    @property
    def names(self) -> dict[str, str]:
        """What the client calls a field, where the public proto has another name for it."""
        is_text = self.response_format is None or self.response_format.type == "text"
        is_vllms = self.structured_outputs is not None and is_text
        return {grammar.FIELD: "structured_outputs"} if is_vllms else {}

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
        return self.stream_options is not None and bool(self.stream_options.include_usage)

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
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,  # -1 is vLLM's "off"
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            # OpenAI's seeds are signed; the same bits are as good
            seed=self.seed % _UINT64 if self.seed is not None and self.seed < 0 else self.seed,
            n=self.num_samples,
            stop=self._stop_strings(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
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


def template_kwargs(
    given: dict[str, object] | None, effort: ReasoningEffort | None
) -> dict[str, object]:
    """Further variables of a chat template; the effort is one of them."""
    said: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
    return said | (given or {})


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list):
        return "text"
    items = cast(list[object], value)
    first = items[0] if items else 0
    if isinstance(first, str):
        return "texts"
    return "token_lists" if isinstance(first, list) else "tokens"


# One of four shapes; told apart by their first item, so that an error names the item and not
# three shapes that were never meant.
_PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Items[str], Tag("texts")]
    | Annotated[Items[int], Tag("tokens")]
    | Annotated[Items[Items[int]], Tag("token_lists")],
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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
