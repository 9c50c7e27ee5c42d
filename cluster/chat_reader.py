"""An assistant's text, told apart: what it thinks, what it says, what it calls.

    text ─► ReasoningReader ─► ToolCallReader ─► ChatPart

Only what the model's chat template has is looked for; calls only where tools were offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from . import reasoning
from .live_generation import LiveGeneration
from .reasoning import ReasoningReader
from .tool_calls import Tool, ToolCall, ToolCallReader

_TAIL_TOKENS = 16  # of the prompt; more than an opening tag and its line breaks ever take


@dataclass(frozen=True, slots=True)
class ChatPart:
    """What some text adds."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ChatReader:
    """One sample's text, as it comes."""

    def __init__(self, thoughts: ReasoningReader | None, calls: ToolCallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @classmethod
    def of(cls, generation: LiveGeneration, tools: Sequence[Tool] = ()) -> "ChatReader":
        """For an answer to this generation's prompt."""
        tokenizer = generation.model.tokenizer
        template = tokenizer.chat_template
        if template is None:
            return cls(None, None)
        thoughts = calls = None
        if template.splits_reasoning:
            tail = list(generation.prepared.prompt_token_ids[-_TAIL_TOKENS:])
            text = tokenizer.decode(tail, skip_special_tokens=False)
            thoughts = ReasoningReader(is_open=text.rstrip().endswith(reasoning.OPEN))
        if tools:
            calls = ToolCallReader(template.tool_format, [tool.name for tool in tools])
        return cls(thoughts, calls)

    def read(self, text: str, *, is_end: bool = False) -> ChatPart:
        """What is certain by now; with `is_end` all that is left."""
        thoughts, text = self._read_thoughts(text, is_end=is_end)
        if self._calls is None:
            return ChatPart(text, thoughts)
        content, calls = self._calls.push(text)
        if is_end:
            more, last = self._calls.flush()
            content, calls = content + more, calls + last
        return ChatPart(content, thoughts, tuple(calls))

    def _read_thoughts(self, text: str, *, is_end: bool) -> tuple[str, str]:
        if self._thoughts is None:
            return "", text
        thoughts, answer = self._thoughts.push(text)
        if is_end:
            more, rest = self._thoughts.flush()
            thoughts, answer = thoughts + more, answer + rest
        return thoughts, answer
