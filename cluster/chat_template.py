"""A model's chat template: messages in, prompt text out.

Templates are Jinja from the checkpoint, so they run in a sandbox that can change nothing. Knows
no tokenizer; the special tokens' texts come in.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..protos.errors import InvalidArgument
from . import reasoning
from .tool_calls import Tool, format_of, with_instructions

# The public proto's name; the HTTP front calls it "messages".
FIELD = "chat.messages"
_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "self")


class ChatTemplate:
    """One compiled template, as transformers would run it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = _now  # pyright: ignore[reportArgumentType]
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._variables = find_undeclared_variables(environment.parse(source))
        self.knows_tools = "tools" in self._variables
        self.tool_format = format_of(source, knows_tools=self.knows_tools)
        self.splits_reasoning = reasoning.CLOSE in source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt, up to where the assistant's answer begins. variables: further ones.

        Raises InvalidArgument where the template refuses the messages or fails on them.
        """
        if not messages:
            raise InvalidArgument(FIELD, "there is no message")
        if not self.knows_tools:
            messages = with_instructions(messages, tools)
        for name in variables or ():
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise InvalidArgument("chat_template_kwargs", f"{name} cannot be set")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[tool.as_json for tool in tools] or None,
                add_generation_prompt=True,
                **self._special_tokens,
                **self._with_effort(variables or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            problem = f"the model's chat template refuses them: {error}"
            raise InvalidArgument(FIELD, problem) from error

    def _with_effort(self, variables: Mapping[str, object]) -> Mapping[str, object]:
        """How much to think, in the words that the template has for it: levels, or a switch."""
        effort = variables.get(_EFFORT)
        if effort is None or _EFFORT in self._variables:
            return variables
        if _SWITCH in self._variables:
            return {_SWITCH: effort != "none"} | dict(variables)
        if effort == "none" and not self.splits_reasoning:
            return variables
        raise InvalidArgument(_EFFORT, "the model's chat template has no word for it")


def _refuse(message: str) -> NoReturn:
    """`raise_exception` of templates, e.g. for roles that do not alternate."""
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    """`strftime_now` of templates that put the date into their system message."""
    return datetime.now().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    """As transformers has it: jinja's own filter escapes HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
