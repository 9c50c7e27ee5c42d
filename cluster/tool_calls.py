"""Functions that a model may call: how they are offered, written, and read back.

    tools ─► template (or instructions, where it has no words for them) ─► prompt
    text  ─► ToolCallReader ─► content and calls

A model writes calls in the format of its chat template's family; each is JSON inside. Knows
templates by their source and text as it comes; nothing of HTTP, tokens or requests.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from ..protos.errors import InvalidArgument
from .partial_marker import held_back

Json = Mapping[str, object]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = (
    "You may call functions to help with the user's question. These are their signatures:\n"
    "<tools>\n{tools}\n</tools>\n"
    "For each call answer with a JSON object with name and arguments, within these tags:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments as JSON object>}}\n'
    "</tool_call>"
)


class ToolFormat(Enum):
    """The families of chat templates, by how they write calls."""

    TAGGED = "tagged"  # Hermes, Qwen: JSON within <tool_call> tags, text around them
    OBJECT = "object"  # Llama: the whole answer is a JSON object with name and parameters
    LIST = "list"  # Mistral: the whole answer is a JSON list of calls


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as a client offers it. parameters: a JSON schema."""

    name: str
    description: str = ""
    parameters: Json = field(default_factory=lambda: {"type": "object", "properties": {}})

    @property
    def as_json(self) -> Json:
        """As templates read it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The answer has to be a call: of this function, or of any. several: or more than one."""

    name: str | None = None
    several: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments: JSON text."""

    id: str
    name: str
    arguments: str


def format_of(template_source: str, *, knows_tools: bool) -> ToolFormat:
    """How a model with this chat template writes calls."""
    if not knows_tools or _OPEN in template_source:
        return ToolFormat.TAGGED
    return ToolFormat.LIST if "[TOOL_CALLS]" in template_source else ToolFormat.OBJECT


def with_instructions(messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
    """A conversation for a template that knows no tools: all of it said in plain messages."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    offered = "\n".join(json.dumps(tool.as_json, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=offered)
    if plain and plain[0].get("role") == "system":
        text = f"{plain[0].get('content', '')}\n\n{text}"
        plain = plain[1:]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Json) -> Json:
    content = str(message.get("content") or "")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = cast("Sequence[Mapping[str, Json]]", message.get("tool_calls") or ())
    if not calls:
        return message
    written = [f"{_OPEN}\n{json.dumps(call['function'])}\n{_CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join([*([content] if content else []), *written])}


def forced_grammar(form: ToolFormat, tools: Sequence[Tool], forced: ForcedCall) -> str:
    """What an answer that has to be a call must match. InvalidArgument for an unknown name."""
    chosen = [tool for tool in tools if forced.name in (None, tool.name)]
    if not chosen:
        raise InvalidArgument("tool_choice", f"there is no tool {forced.name!r}")
    key = "parameters" if form is ToolFormat.OBJECT else "arguments"
    call: Json = {"anyOf": [_call_schema(tool, key) for tool in chosen]}
    if form is ToolFormat.LIST:
        most: Json = {} if forced.several else {"maxItems": 1}
        call = {"type": "array", "items": call, "minItems": 1, **most}
    body = f"%json {json.dumps(call)}"
    if form is not ToolFormat.TAGGED:
        return f"start: {body}"
    start = 'call ("\\n" call)*' if forced.several else "call"
    tagged = f'{json.dumps(_OPEN)} "\\n" body "\\n" {json.dumps(_CLOSE)}'
    return f"start: {start}\ncall: {tagged}\nbody: {body}"


def _call_schema(tool: Tool, key: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: tool.parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }


class ToolCallReader:
    """Text in, as it comes; content and whole calls out, in their order."""

    def __init__(self, form: ToolFormat, names: Sequence[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._text = ""  # not decided yet
        self._is_content = False  # of the formats that are all or nothing
        self._follows_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content that is certain, and the calls that are complete."""
        self._text += text
        if self._form is ToolFormat.TAGGED:
            return self._read_tagged()
        start = self._text.lstrip()
        if start and start[0] not in "{[":
            self._is_content = True
        return (self._take(), []) if self._is_content else ("", [])

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The text is over."""
        text = self._take()
        if self._form is ToolFormat.TAGGED:
            # a call that was cut off: shown as it is, so that nothing is lost
            return self._read_call(text, closed=False)
        calls = [] if self._is_content else self._parse(text)
        return ("", calls) if calls else (text, [])

    def _take(self) -> str:
        text, self._text = self._text, ""
        return text

    def _read_tagged(self) -> tuple[str, list[ToolCall]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if self._follows_call:  # line breaks between calls belong to the format
                self._text = self._text.lstrip()
                self._follows_call = not self._text
            before, opened, rest = self._text.partition(_OPEN)
            if not opened:
                num_held = held_back(before, _OPEN)
                content.append(before[: len(before) - num_held])
                self._text = before[len(before) - num_held :]
                break
            inside, closed, rest = rest.partition(_CLOSE)
            if not closed:
                content.append(before)
                self._text = self._text[len(before) :]
                break
            more, found = self._read_call(f"{_OPEN}{inside}{_CLOSE}", closed=True)
            content += [before, more]
            calls += found
            self._text, self._follows_call = rest, bool(found)
        return "".join(content), calls

    def _read_call(self, text: str, *, closed: bool) -> tuple[str, list[ToolCall]]:
        inside = text.removeprefix(_OPEN)
        if closed:
            inside = inside.removesuffix(_CLOSE)
        calls = self._parse(inside) if inside != text else []
        return ("", calls) if calls else (text, [])

    def _parse(self, text: str) -> list[ToolCall]:
        """The calls that a text is; none if it is anything else."""
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError):
            return []
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        calls = [self._call_of(item) for item in items]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call_of(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        call = cast("Json", value)
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names:
            return None
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)
